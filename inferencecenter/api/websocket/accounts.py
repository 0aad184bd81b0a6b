"""Ops for administrators: accounts and tokens, through the same methods as the command line.

All of them access the accounts file on the disk worker. The secret of a new token is in one reply only.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from pydantic import ValidationError

from inferencecenter.auth.audit import AuditActor, AuditEvent
from inferencecenter.config.limits import NO_LIMITS, AccessLimits
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol import events
from inferencecenter.protocol.codec import invalid_request
from inferencecenter.protocol.scopes import Scope
from inferencecenter.protocol.values import AccessToken, AccountSummary

if TYPE_CHECKING:
    from inferencecenter.api.websocket.connection import Connection
    from inferencecenter.auth.account import Account, ClientInfo, NewToken, TokenInfo
    from inferencecenter.auth.accounts import Accounts
    from inferencecenter.protocol import requests
    from inferencecenter.protocol.base import Event
    from inferencecenter.protocol.values import AccessLimitChanges
    from inferencecenter.server.context import ServerContext


def list_accounts(connection: Connection, request: requests.ListAccounts) -> None:
    """Reply with a page of accounts of the database; the last page adds those of ``clients.toml``."""
    accounts = connection.context.accounts

    def read() -> Event:
        found = [_account(each) for each in accounts.clients(after=request.after, limit=request.limit + 1)]
        if len(found) > request.limit:
            return events.AccountsListed(
                accounts=tuple(found[: request.limit]), next=found[request.limit - 1].client_id
            )
        static = map(_static_account, accounts.static_accounts())
        return events.AccountsListed(accounts=(*found, *static), next=None)

    connection.audit(AuditEvent.ACCOUNTS_LISTED)
    connection.answer_from_disk(request, read)


def create_account(connection: Connection, request: requests.CreateAccount) -> None:
    """Create an account; unset fields have the daemon's defaults."""
    accounts, defaults = connection.context.accounts, connection.context.account_defaults
    limits = _limits(request.access_limits)

    def create() -> Event:
        accounts.create_client(
            request.client_id,
            max_sessions=request.max_sessions or defaults.default_max_sessions,
            priority=request.priority or defaults.default_priority,
            scopes=request.scopes,
            retention_days=request.retention_days,
            archive_mib=request.archive_mib,
            limits=limits,
            by=_actor(connection),
        )
        return events.AccountChanged(account=_find_account(accounts, request.client_id))

    connection.answer_from_disk(request, create)


def change_account(connection: Connection, request: requests.ChangeAccount) -> None:
    """Change an account; administrators cannot take the scope ``admin`` from their own.

    Raises:
        InferenceCenterError: ``invalid_request``.
    """
    context, client = connection.context, connection.client
    if request.client_id == client.client_id and request.scopes is not None and Scope.ADMIN not in request.scopes:
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST,
            f"scopes lacks {Scope.ADMIN}, which administrators cannot remove from their own account",
            field="scopes",
            hint="Another administrator can remove it.",
        )
    limits = None if request.access_limits is None else _limits(request.access_limits)
    storage = request.model_dump(include={"retention_days", "archive_mib"}, exclude_unset=True)

    def change() -> events.AccountChanged:
        found = context.accounts.change_client(
            request.client_id,
            limits=limits,
            max_sessions=request.max_sessions,
            priority=request.priority,
            scopes=request.scopes,
            storage=storage,
            by=_actor(connection),
        )
        if not found:
            raise _unknown_account(request.client_id)
        return events.AccountChanged(account=_find_account(context.accounts, request.client_id))

    def apply(changed: events.AccountChanged) -> None:
        account = changed.account
        context.tokens_changed()
        context.hub.close_outdated(account.client_id, frozenset(account.scopes), account.priority)

    connection.answer_from_disk(request, change, then=apply)


def get_account(connection: Connection, request: requests.GetAccount) -> None:
    """Reply with an account of the database and how much it stores."""
    context = connection.context

    def read() -> tuple[AccountSummary, Account | None]:
        account = _find_account(context.accounts, request.client_id)
        return account, context.accounts.account_of(request.client_id)

    async def answer() -> events.AccountChanged:
        account, principal = await context.disk_worker.run(connection.client_id, read)
        usage = None if principal is None else context.sessions.archive.usage(principal)
        return events.AccountChanged(account=account, session_usage=usage)

    connection.audit(AuditEvent.ACCOUNTS_LISTED, detail=request.client_id)
    connection.answer_later(request, answer)


def delete_account(connection: Connection, request: requests.DeleteAccount) -> None:
    """Revoke an account's tokens, close its sockets, delete its sessions if that is wanted, and last the account.

    Raises:
        InferenceCenterError: ``invalid_request`` for the administrator's own account.
    """
    context, name, by = connection.context, request.client_id, _actor(connection)
    if name == connection.client_id:
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST,
            f"client_id is {name!r}, which is the account of this administrator",
            field="client_id",
            hint="Another administrator can delete it.",
        )
    deletes = request.sessions == "delete"

    async def delete() -> events.AccountDeleted:
        n_revoked = await context.disk_worker.run(by.client_id, partial(context.accounts.revoke_all, name, by=by))
        if n_revoked is None:
            raise _unknown_account(name)
        context.tokens_changed()
        if deletes:
            await context.purge("client", name)
        detail = "sessions deleted" if deletes else "sessions kept"
        remove = partial(context.accounts.remove_client, name, detail=detail, by=by)
        if not await context.disk_worker.run(by.client_id, remove):
            raise _unknown_account(name)
        # A token that was created meanwhile may have a socket, and that a session.
        context.tokens_changed()
        if deletes:
            context.history.forget(name)
            if context.sessions.holds_any(name):
                await context.purge("client", name)
        return events.AccountDeleted(client_id=name, sessions=request.sessions, revoked_tokens=n_revoked)

    connection.answer_later(request, delete)


def list_tokens(connection: Connection, request: requests.ListTokens) -> None:
    """Reply with a page of the tokens of one account, or of all."""
    accounts = connection.context.accounts
    most = request.limit

    def read() -> Event:
        found = accounts.list_tokens(request.client_id, after=request.after, limit=most + 1)
        following = found[most - 1].token_id if len(found) > most else None
        return events.TokensListed(access_tokens=tuple(map(_token, found[:most])), next=following)

    connection.audit(AuditEvent.ACCOUNTS_LISTED, detail=request.client_id or "")
    connection.answer_from_disk(request, read)


def create_token(connection: Connection, request: requests.CreateToken) -> None:
    """Create a token of an account of the database."""
    context, limits = connection.context, _limits(request.access_limits)
    expires_at = None if request.expires_in_s is None else context.clock() + request.expires_in_s

    def create() -> Event:
        new_token = context.accounts.create_token(
            request.client_id, name=request.name, expires_at=expires_at, limits=limits, by=_actor(connection)
        )
        return _issued(context.accounts, new_token)

    connection.answer_from_disk(request, create)


def change_token(connection: Connection, request: requests.ChangeToken) -> None:
    """Replace the limits of a token."""
    context, limits = connection.context, _limits(request.access_limits)

    def change() -> Event:
        if not context.accounts.limit_token(request.token_id, limits, by=_actor(connection)):
            raise _unknown_token(request.token_id)
        return events.TokenChanged(access_token=_find_token(context.accounts, request.token_id))

    connection.answer_from_disk(request, change, then=partial(_apply, context))


def rotate_token(connection: Connection, request: requests.RotateToken) -> None:
    """Replace a token; the requesting socket may be one of those closed after the reply."""
    context = connection.context

    def rotate() -> Event:
        if (new_token := context.accounts.rotate_token(request.token_id, by=_actor(connection))) is None:
            raise _unknown_token(request.token_id)
        return _issued(context.accounts, new_token)

    connection.answer_from_disk(request, rotate, then=partial(_apply, context))


def revoke_token(connection: Connection, request: requests.RevokeToken) -> None:
    """Revoke a token; the requesting socket may be one of those closed after the reply."""
    context = connection.context

    def revoke() -> Event:
        if not context.accounts.revoke(request.token_id, by=_actor(connection)):
            raise _unknown_token(request.token_id)
        return events.TokenChanged(access_token=_find_token(context.accounts, request.token_id))

    connection.answer_from_disk(request, revoke, then=partial(_apply, context))


def _apply(context: ServerContext, _answer: object) -> None:
    context.tokens_changed()


def _actor(connection: Connection) -> AuditActor:
    return AuditActor(connection.client_id, connection.address)


def _issued(accounts: Accounts, new_token: NewToken) -> Event:
    return events.TokenIssued(token=new_token.token, access_token=_find_token(accounts, new_token.token_id))


def _limits(given: AccessLimitChanges | None) -> AccessLimits:
    """Return limits in the form in which accounts store them.

    Raises:
        InferenceCenterError: ``invalid_request`` naming the limit.
    """
    if given is None:
        return NO_LIMITS
    try:
        return AccessLimits.model_validate(given.model_dump(exclude_unset=True))
    except ValidationError as error:
        refused = invalid_request(error, known=AccessLimits.model_fields)
        raise InferenceCenterError(
            refused.code, refused.message, field=f"access_limits.{refused.field}", hint=refused.hint
        ) from None


def _find_account(accounts: Accounts, client_id: str) -> AccountSummary:
    found = accounts.clients(client_id)
    if not found:  # removed by another process since
        raise _unknown_account(client_id)
    return _account(found[0])


def _find_token(accounts: Accounts, token_id: str) -> AccessToken:
    found = accounts.list_tokens(token_id=token_id)
    if not found:
        raise _unknown_token(token_id)
    return _token(found[0])


def _account(client: ClientInfo) -> AccountSummary:
    return AccountSummary(
        client_id=client.client_id,
        source="database",
        scopes=client.scopes,
        priority=client.priority,
        max_sessions=client.max_sessions,
        retention_days=client.retention_days,
        archive_mib=client.archive_mib,
        created_at=client.created_at,
        unrevoked_tokens=client.tokens,
        access_limits=client.limits.given(),
    )


def _static_account(account: Account) -> AccountSummary:
    return AccountSummary(
        client_id=account.client_id,
        source="file",
        scopes=tuple(sorted(account.scopes)),
        priority=account.priority,
        max_sessions=account.max_sessions,
        retention_days=account.retention_days,
        archive_mib=account.archive_mib,
        unrevoked_tokens=0,
        access_limits=account.limits.given(),
    )


def _token(token: TokenInfo) -> AccessToken:
    return AccessToken(
        token_id=token.token_id,
        client_id=token.client_id,
        name=token.name,
        created_at=token.created_at,
        expires_at=token.expires_at,
        last_used_at=token.last_used_at,
        revoked=token.revoked,
        access_limits=token.limits.given(),
    )


def _unknown_account(client_id: str) -> InferenceCenterError:
    return InferenceCenterError(
        ErrorCode.INVALID_REQUEST,
        f"client_id is {client_id!r}, which is not an account in the database",
        field="client_id",
        hint="list_accounts lists them; those of clients.toml are changed in that file.",
    )


def _unknown_token(token_id: str) -> InferenceCenterError:
    return InferenceCenterError(
        ErrorCode.INVALID_REQUEST,
        f"token_id is {token_id!r}, which does not exist, has expired or is revoked",
        field="token_id",
        hint="list_tokens lists the ids.",
    )

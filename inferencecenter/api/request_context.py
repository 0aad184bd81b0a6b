"""Admission of requests and upgrades, and an HTTP request until its client disconnects."""

from __future__ import annotations

from asyncio import sleep
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, TypeVar

from starlette.datastructures import Headers

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.close import CloseCode
from inferencecenter.protocol.trace_context import read_traceparent
from inferencecenter.server.handshake import check_query, origin_allowed, read_credential
from inferencecenter.server.hub import EXPIRED, Deadline

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence

    from starlette.types import Scope as AsgiScope

    from inferencecenter.auth.account import Account
    from inferencecenter.protocol.scopes import Scope
    from inferencecenter.server.context import ServerContext
    from inferencecenter.server.http import HttpConnection
    from inferencecenter.sessions.context import AccountLimits

_Result = TypeVar("_Result")

_DISMISSALS: Final[Mapping[CloseCode, ErrorCode]] = MappingProxyType(
    {
        CloseCode.NOT_AUTHENTICATED: ErrorCode.NOT_AUTHENTICATED,
        CloseCode.POLICY: ErrorCode.FORBIDDEN,
        CloseCode.RESTART: ErrorCode.ENGINE_UNAVAILABLE,
    }
)


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of an admitted request or upgrade; ``account`` is ``None`` if none is required, or not yet.

    ``address`` is the remote address, ``traceparent`` the client's span that becomes the parent of the turns' spans,
    ``unix_uid`` the user of a program on the Unix socket.
    """

    account: Account | None
    address: str
    traceparent: str | None
    unix_uid: int | None = None

    @property
    def client(self) -> Account:
        assert self.account is not None, "the operation needs a scope"
        return self.account


class ClientDisconnectedError(Exception):
    """The client has disconnected, so no response can be sent."""


class RequestContext:
    """A request in progress, as the hub counts it; notifies its turns when the client disconnects.

    Implements ``server.hub.Participant``.

    Args:
        caller: The sender.
        connection: Where parts of its response may be written directly.
    """

    def __init__(self, caller: Caller, connection: HttpConnection | None = None) -> None:
        self.caller = caller
        self.connection = connection
        self._listeners: list[Callable[[Exception], None]] = []
        self._ended: Exception | None = None

    @property
    def client(self) -> Account:
        return self.caller.client

    @property
    def address(self) -> str:
        return self.caller.address

    def set_account_limits(self, limits: AccountLimits) -> None:
        """Set the limits of the sessions of its client."""
        self.caller = replace(self.caller, account=replace(self.client, **limits._asdict()))

    def drain(self, deadline_s: float) -> None:
        """No effect: responses end on their own."""

    def close(self, code: CloseCode, reason: str) -> None:
        """End the request with an error."""
        self.end(InferenceCenterError(_DISMISSALS.get(code, ErrorCode.ENGINE_UNAVAILABLE), reason))

    @contextmanager
    def until_expiry(self, now_s: float) -> Iterator[None]:
        """Context manager that dismisses the request when its token expires; ``now_s`` is in Unix seconds."""
        if self.client.expires_at is None:
            yield
            return
        expired = CloseCode.NOT_AUTHENTICATED, EXPIRED
        deadline = Deadline(self.client.expires_at - now_s, lambda: self.close(*expired))
        try:
            yield
        finally:
            deadline.cancel()

    def end(self, reason: Exception) -> None:
        """Notify the listeners that the response must end; only the first reason counts."""
        if self._ended is None:
            self._ended = reason
            for listener in tuple(self._listeners):
                listener(reason)

    def check_open(self) -> None:
        """Raise the reason why the response must end, if there is one: the token may have been revoked meanwhile."""
        if self._ended is not None:
            raise self._ended

    def listen(self, listener: Callable[[Exception], None]) -> None:
        """Call ``listener`` with the reason when the response must end; immediately if it already must."""
        self._listeners.append(listener)
        if self._ended is not None:
            listener(self._ended)

    def forget(self, listener: Callable[[Exception], None]) -> None:
        self._listeners.remove(listener)

    async def wait_for(self, future: asyncio.Future[_Result]) -> _Result:
        """Return the result of a future; if the response must end first, the reason becomes its exception."""

        def give_up(reason: Exception) -> None:
            if not future.done():
                future.set_exception(reason)

        self.listen(give_up)
        try:
            return await future
        finally:
            self.forget(give_up)


async def admit(
    context: ServerContext,
    asgi: AsgiScope,
    *,
    scope: Scope | None,
    subprotocols: Sequence[str] = (),
    local_account: str | None = None,
) -> Caller:
    """Admit an HTTP request, or the upgrade of a WebSocket that offers ``subprotocols``.

    Args:
        context: The rest of the daemon.
        asgi: The request.
        scope: Scope that the client needs; with ``None`` a request without a credential is admitted too.
        subprotocols: May contain a token.
        local_account: Account of requests without a credential from programs on this machine; ``None`` refuses them.

    Raises:
        InferenceCenterError: ``not_authenticated``, ``rate_limited`` after too many failures, ``forbidden`` for pages
            of other origins and clients without ``scope``, ``invalid_request`` for a secret in the URL,
            ``storage_unavailable``.
    """
    headers = Headers(scope=asgi)
    check_query(asgi["query_string"])
    peer = context.proxies.peer_info(asgi["client"][0] if asgi["client"] else "", headers)
    if not origin_allowed(headers.get("origin"), peer.host, context.settings.allowed_origins):
        raise InferenceCenterError(
            ErrorCode.FORBIDDEN,
            "this origin may not connect",
            field="Origin",
            hint="An operator can add it to server.allowed_origins.",
        )
    account = None
    # A browser reaches the Unix socket only through a proxy, which is then the peer.
    unix_uid = None if "origin" in headers else peer.unix_uid
    credential = read_credential(headers, subprotocols)
    if credential is None and scope is not None:
        credential = context.authenticator.unix_credential(unix_uid)
    if credential is not None:
        account = await context.authenticator.authenticate_anywhere(credential, address=peer.address)
    elif local_account is not None and peer.on_this_machine:
        account = context.authenticator.admit_local(local_account, address=peer.address)
    if scope is not None:
        if account is None:
            raise InferenceCenterError(ErrorCode.NOT_AUTHENTICATED, hint="Send a token: Authorization: Bearer ic_…")
        if scope not in account.scopes:
            raise InferenceCenterError(
                ErrorCode.FORBIDDEN, f"this requires the scope {scope}", hint="Use a token of a client that has it."
            )
        context.quotas.admit(account)
    return Caller(account, peer.address, read_traceparent(headers.get("traceparent")), unix_uid)


@asynccontextmanager
async def paced(context: ServerContext, client_id: str) -> AsyncIterator[None]:
    """Delay the error of a refused request of a client; see ``RefusalBackoff``.

    During the delay the request still counts towards its client's limit, which so bounds concurrent refusals as well.
    """
    try:
        yield
    except InferenceCenterError:
        if delay_s := context.refusal_backoffs.refused(client_id):
            await sleep(delay_s)
        raise
    context.refusal_backoffs.accepted(client_id)

"""``inferencecenter token``: create, list, rotate and revoke tokens in the state directory, and notify a daemon."""

from __future__ import annotations

import time
from dataclasses import asdict, fields
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Column
from rich.text import Text

from inferencecenter.auth.account import MAX_SESSIONS
from inferencecenter.auth.accounts_db import format_limits
from inferencecenter.auth.bootstrap import ensure_admin
from inferencecenter.cli.options import (
    LIMITS_HELP,
    ConfigOption,
    JsonOption,
    StateDirOption,
    changed,
    duration_s,
    given,
)
from inferencecenter.cli.output import print_json, stdout, text_table
from inferencecenter.cli.state_files import open_accounts
from inferencecenter.config.loader import load_settings
from inferencecenter.config.sections import Priority
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.scopes import Scope
from inferencecenter.server import control

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inferencecenter.auth.account import ClientInfo, TokenInfo
    from inferencecenter.config.limits import AccessLimits


app = typer.Typer(help="Create, list, rotate and revoke tokens.", no_args_is_help=True)


@app.command("create")
def create(  # noqa: PLR0913 - one argument an option
    client: Annotated[str, typer.Argument(help="Name of the account; created if it does not exist.")],
    *,
    name: Annotated[str, typer.Option(help="Purpose of the token, such as phone or laptop.")] = "",
    expires_in: Annotated[
        str | None,
        typer.Option("--expires-in", help="Lifetime of the token, such as 30d, 12h, 45m.", show_default=False),
    ] = None,
    scope: Annotated[
        list[Scope] | None, typer.Option(help="Scope of a new account; may be repeated.", show_default="user")
    ] = None,
    max_sessions: Annotated[
        int | None, typer.Option(help="Maximum sessions of a new account.", min=1, max=MAX_SESSIONS, show_default=False)
    ] = None,
    priority: Annotated[
        Priority | None, typer.Option(help="Priority class of a new account.", show_default=False)
    ] = None,
    retention_days: Annotated[
        float | None,
        typer.Option(
            "--retention-days",
            help="Days after which unused sessions of a new account are deleted.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[list[str] | None, typer.Option(help=LIMITS_HELP, metavar="NAME=VALUE", show_default=False)] = None,
    config: ConfigOption = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """Create a token and print it; it is not shown again."""
    settings = load_settings(config, given(state_dir=state_dir))
    limits = changed(limit or ())
    expires_at = None if expires_in is None else time.time() + duration_s(expires_in)
    with open_accounts(settings) as accounts:
        # Without this, a first token created here would keep the daemon from creating its administrator.
        ensure_admin(accounts, settings.state_dir)
        if not accounts.has_client(client):
            accounts.ensure_client(
                client,
                max_sessions=max_sessions or settings.auth.default_max_sessions,
                priority=priority or settings.auth.default_priority,
                scopes=scope or (Scope.USER,),
                retention_days=retention_days,
            )
        elif scope or max_sessions or priority or retention_days is not None:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST,
                f"client {client!r} already exists",
                hint="Omit --scope, --max-sessions, --priority and --retention-days, or name a new client.",
            )
        new_token = accounts.create_token(client, name=name, expires_at=expires_at, limits=limits)
    if json:
        of_token = {"client_id": client, "name": name, "expires_at": expires_at, "limits": limits.given()}
        print_json({**asdict(new_token), **of_token})
    elif stdout.is_terminal:
        stdout.print(Text.assemble((new_token.token, "bold")), soft_wrap=True)
        stdout.print("It is not shown again. Revoke it with", f"`inferencecenter token revoke {new_token.token_id}`.")
    else:
        typer.echo(new_token.token)


@app.command("list")
def list_tokens(
    *,
    client: Annotated[str | None, typer.Option(help="Only this account.", show_default=False)] = None,
    config: ConfigOption = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """List tokens, oldest first; their secrets are not stored."""
    settings = load_settings(config, given(state_dir=state_dir))
    with open_accounts(settings) as accounts:
        tokens = accounts.list_tokens(client)
    if json:
        print_json([plain(token) for token in tokens])
        return
    columns = (Column("token_id", no_wrap=True), "client", "name", "created", "expires", "last used", "state", "limits")
    stdout.print(text_table(columns, map(_cells, tokens)))


@app.command("limits")
def limits(
    token_id: Annotated[str, typer.Argument(help="Id of the token, as listed by `token list`.")],
    assignments: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME=VALUE]...", help=LIMITS_HELP, show_default=False)
    ] = None,
    *,
    config: ConfigOption = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """Show or change a token's own limits; a running daemon applies them at once."""
    settings = load_settings(config, given(state_dir=state_dir))
    notified = None
    with open_accounts(settings) as accounts:
        found = next((each for each in accounts.list_tokens() if each.token_id == token_id), None)
        if found is None:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST,
                f"{token_id!r} is not a token id",
                field="token_id",
                hint="`inferencecenter token list` lists the ids.",
            )
        own = found.limits
        if assignments:
            own = changed(assignments, own)
            accounts.limit_token(token_id, own)
            notified = control.notify_tokens_changed(settings.state_dir)
    show_limits({"token_id": token_id, "client_id": found.client_id}, own, notified=notified, json=json)


@app.command("rotate")
def rotate(
    token_id: Annotated[str, typer.Argument(help="Id of the token, as listed by `token list`.")],
    *,
    config: ConfigOption = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """Replace a token by a new one with the same name, expiry and limits, and print it; it is not shown again."""
    settings = load_settings(config, given(state_dir=state_dir))
    with open_accounts(settings) as accounts:
        new_token = accounts.rotate_token(token_id)
    if new_token is None:
        raise _not_valid(token_id)
    notified = control.notify_tokens_changed(settings.state_dir)
    if json:
        print_json({**asdict(new_token), "revoked": token_id, "daemon_notified": notified})
    elif stdout.is_terminal:
        stdout.print(Text.assemble((new_token.token, "bold")), soft_wrap=True)
        stdout.print(f"It is not shown again. {token_id} is revoked.")
    else:
        typer.echo(new_token.token)


@app.command("revoke")
def revoke(
    token_id: Annotated[str, typer.Argument(help="Id of the token, as listed by `token list`.")],
    *,
    config: ConfigOption = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """Revoke a token and close the sockets that authenticated with it."""
    settings = load_settings(config, given(state_dir=state_dir))
    with open_accounts(settings) as accounts:
        if not accounts.revoke(token_id):
            raise _not_valid(token_id)
    notified = control.notify_tokens_changed(settings.state_dir)
    if json:
        print_json({"token_id": token_id, "revoked": True, "daemon_notified": notified})
    else:
        stdout.print(f"Revoked {token_id};", "its sockets are closed." if notified else "no daemon is running.")


def _not_valid(token_id: str) -> InferenceCenterError:
    return InferenceCenterError(
        ErrorCode.INVALID_REQUEST,
        f"{token_id!r} is not a token id, or is already revoked",
        field="token_id",
        hint="`inferencecenter token list` lists the ids.",
    )


def show_limits(
    whose: dict[str, str],
    limits: AccessLimits,
    *,
    of_sessions: Mapping[str, float | None] = MappingProxyType({}),
    notified: bool | None,
    json: bool,
) -> None:
    """Print limits, and whether a daemon was ``notified`` of a change; ``None`` without a change."""
    given_sessions = {name: number for name, number in of_sessions.items() if number is not None}
    if json:
        of_daemon = {} if notified is None else {"daemon_notified": notified}
        print_json({**whose, **given_sessions, "limits": limits.given(), **of_daemon})
        return
    shown = [f"{name}={number:g}" for name, number in given_sessions.items()]
    shown.append(format_limits(limits))
    typer.echo(" ".join(shown).rstrip() or "no limits of its own")
    if notified is not None:
        stdout.print("They apply from now on." if notified else "No daemon is running.")


def plain(entry: TokenInfo | ClientInfo) -> dict[str, Any]:
    """Return a token or an account as JSON data."""
    return {field.name: getattr(entry, field.name) for field in fields(entry)} | {"limits": entry.limits.given()}


def _cells(token: TokenInfo) -> tuple[str, ...]:
    dates = (_date(at) for at in (token.created_at, token.expires_at, token.last_used_at))
    state = "revoked" if token.revoked else "valid"
    return token.token_id, token.client_id, token.name, *dates, state, format_limits(token.limits)


def _date(at: float | None) -> str:
    return "never" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M")

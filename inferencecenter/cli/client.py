"""``inferencecenter client``: the accounts in the state directory, and what each may use."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.table import Column, Table
from rich.text import Text

from inferencecenter.auth.accounts_db import format_limits
from inferencecenter.cli.options import LIMITS_HELP, ConfigOption, JsonOption, StateDirOption, changed, given
from inferencecenter.cli.output import print_json, stdout
from inferencecenter.cli.token import open_accounts, plain, show_limits
from inferencecenter.config.loader import load_settings
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.server import control

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inferencecenter.auth.account import ClientInfo
    from inferencecenter.auth.accounts import Accounts

_SESSIONS: Final = "max_sessions"
_LIMITS_HELP: Final = f"{LIMITS_HELP} {_SESSIONS}=50 is how many sessions the account may have open."

app = typer.Typer(help="List accounts and limit them.", no_args_is_help=True)


@app.command("list")
def list_clients(
    *,
    config: ConfigOption = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """List the accounts, oldest first; those of clients.toml stand there."""
    settings = load_settings(config, given(state_dir=state_dir))
    with open_accounts(settings) as accounts:
        clients = accounts.clients()
    if json:
        print_json([plain(client) for client in clients])
        return
    table = Table(Column("client", no_wrap=True), "class", "scopes", "sessions", "tokens", "limits")
    for client in clients:
        counts = (str(client.max_sessions), str(client.tokens))
        table.add_row(
            *map(
                Text,
                (client.client_id, client.priority, " ".join(client.scopes), *counts, format_limits(client.limits)),
            )
        )
    stdout.print(table)


@app.command("limits")
def limits(
    client: Annotated[str, typer.Argument(help="The account.")],
    assignments: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME=VALUE]...", help=_LIMITS_HELP, show_default=False)
    ] = None,
    *,
    config: ConfigOption = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """Show what an account may use, or change it; its tokens have that where they have no limit of their own."""
    settings = load_settings(config, given(state_dir=state_dir))
    told = None
    with open_accounts(settings) as accounts:
        found = _find(accounts, client)
        if assignments:
            max_sessions, of_tokens = _taken_out(assignments)
            accounts.limit_client(client, changed(of_tokens, found.limits), max_sessions=max_sessions)
            found = _find(accounts, client)
            told = control.notify_tokens_changed(settings.state_dir)
    show_limits({"client_id": client}, found.limits, max_sessions=found.max_sessions, told=told, json=json)


def _taken_out(assignments: Iterable[str]) -> tuple[int | None, list[str]]:
    """Return the number of sessions that is assigned, if any, and the other assignments.

    Raises:
        InferenceCenterError: ``invalid_request`` for one that is no number.
    """
    max_sessions, others = None, []
    for assignment in assignments:
        name, _, text = assignment.partition("=")
        if name != _SESSIONS:
            others.append(assignment)
        elif re.fullmatch("[0-9]{1,9}", text):
            max_sessions = int(text)
        else:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST,
                f"{assignment!r} is no number of sessions",
                field=_SESSIONS,
                hint=f"{_SESSIONS}=50; it has no `none` and no `default`, as it is the account's alone.",
            )
    return max_sessions, others


def _find(accounts: Accounts, client_id: str) -> ClientInfo:
    found = next((each for each in accounts.clients() if each.client_id == client_id), None)
    if found is None:
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST,
            f"client {client_id!r} is none of the accounts in the state directory",
            field="client",
            hint="`inferencecenter client list` shows them; limits of clients.toml stand in that file.",
        )
    return found

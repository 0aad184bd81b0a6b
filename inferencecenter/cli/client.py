"""``inferencecenter client``: accounts in the state directory, and their limits."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.table import Column

from inferencecenter.auth.accounts_db import format_limits
from inferencecenter.cli.options import LIMITS_HELP, ConfigOption, JsonOption, StateDirOption, changed, given
from inferencecenter.cli.output import print_json, stdout, text_table
from inferencecenter.cli.state_files import open_accounts
from inferencecenter.cli.token import plain, show_limits
from inferencecenter.config.loader import load_settings
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.server import control

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inferencecenter.auth.account import ClientInfo
    from inferencecenter.auth.accounts import Accounts

_SESSIONS: Final = "max_sessions"
_LIMITS_HELP: Final = f"{LIMITS_HELP} {_SESSIONS}=50 is the maximum number of open sessions."

app = typer.Typer(help="List accounts and limit them.", no_args_is_help=True)


@app.command("list")
def list_clients(
    *,
    config: ConfigOption = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """List the accounts, oldest first; those of clients.toml are only in that file."""
    settings = load_settings(config, given(state_dir=state_dir))
    with open_accounts(settings) as accounts:
        clients = accounts.clients()
    if json:
        print_json([plain(client) for client in clients])
        return
    columns = (Column("client", no_wrap=True), "class", "scopes", "sessions", "tokens", "limits")
    stdout.print(text_table(columns, map(_cells, clients)))


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
    """Show or change the limits of an account, which apply to its tokens without limits of their own."""
    settings = load_settings(config, given(state_dir=state_dir))
    notified = None
    with open_accounts(settings) as accounts:
        found = _find(accounts, client)
        if assignments:
            max_sessions, of_tokens = _split_sessions(assignments)
            accounts.limit_client(client, changed(of_tokens, found.limits), max_sessions=max_sessions)
            found = _find(accounts, client)
            notified = control.notify_tokens_changed(settings.state_dir)
    show_limits({"client_id": client}, found.limits, max_sessions=found.max_sessions, notified=notified, json=json)


def _cells(client: ClientInfo) -> tuple[str, ...]:
    counts = (str(client.max_sessions), str(client.tokens))
    return client.client_id, client.priority, " ".join(client.scopes), *counts, format_limits(client.limits)


def _split_sessions(assignments: Iterable[str]) -> tuple[int | None, list[str]]:
    """Return the assigned number of sessions, if any, and the other assignments.

    Raises:
        InferenceCenterError: ``invalid_request`` for an invalid number.
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
                f"{assignment!r} is not a number of sessions",
                field=_SESSIONS,
                hint=f"{_SESSIONS}=50; `none` and `default` are not allowed here.",
            )
    return max_sessions, others


def _find(accounts: Accounts, client_id: str) -> ClientInfo:
    found = next((each for each in accounts.clients() if each.client_id == client_id), None)
    if found is None:
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST,
            f"client {client_id!r} is not an account in the state directory",
            field="client",
            hint="`inferencecenter client list` lists them; limits of clients.toml are set in that file.",
        )
    return found

"""``inferencecenter client``: accounts in the state directory, their limits and deletion."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, Literal

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
from inferencecenter.sessions.store.schema import DATABASE_NAME

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inferencecenter.auth.account import ClientInfo
    from inferencecenter.auth.accounts import Accounts

_SESSION_LIMITS: Final = ("max_sessions", "retention_days", "archive_mib")
_LIMITS_HELP: Final = (
    f"{LIMITS_HELP} max_sessions=50 is the maximum number of open sessions; retention_days=30 are the days after its"
    " last use at which a session is deleted, and archive_mib=512 the Mi characters that stored sessions may hold,"
    " both with `default` for the daemon's setting."
)
_MIB: Final = 1024 * 1024

app = typer.Typer(help="List accounts, set their limits and delete them.", no_args_is_help=True)


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
    client: Annotated[str, typer.Argument(help="Name of the account.")],
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
            of_sessions, of_tokens = _split(assignments)
            max_sessions = of_sessions.pop("max_sessions", None)
            accounts.change_client(
                client,
                limits=changed(of_tokens, found.limits),
                max_sessions=None if max_sessions is None else int(max_sessions),
                storage=of_sessions,
            )
            found = _find(accounts, client)
            notified = control.notify_tokens_changed(settings.state_dir)
    shown = {name: getattr(found, name) for name in _SESSION_LIMITS}
    show_limits({"client_id": client}, found.limits, of_sessions=shown, notified=notified, json=json)


@app.command("delete")
def delete_client(  # noqa: PLR0913 - one argument an option
    client: Annotated[str, typer.Argument(help="Name of the account.")],
    *,
    sessions: Annotated[
        Literal["delete", "keep"],
        typer.Option(help="Whether its sessions and usage are deleted or kept.", show_default=False),
    ],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    config: ConfigOption = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """Delete an account with its tokens, whose sockets are closed; those of clients.toml are only in that file."""
    from inferencecenter.cli.session import n_sessions_text, purge_stored  # noqa: PLC0415 - the others read no sessions
    from inferencecenter.sessions.store.archive import Archive  # noqa: PLC0415

    settings = load_settings(config, given(state_dir=state_dir))
    path = settings.state_dir / DATABASE_NAME
    with open_accounts(settings) as accounts:
        found = _find(accounts, client)
        with Archive.open(path) as archive:
            n_sessions, n_chars = len(archive.matches("client", client)), archive.n_chars(client)
        stored = f"{n_sessions_text(n_sessions)} with {n_chars / _MIB:.1f} MiB of text"
        if not yes:
            fate = "are deleted" if sessions == "delete" else "stay stored and belong to a new account of this name"
            typer.confirm(
                f"Delete account {client}? {found.tokens} of its tokens stop working; {stored} {fate}."
                " This cannot be undone.",
                abort=True,
                err=True,
            )
        accounts.revoke_all(client)
        control.notify_tokens_changed(settings.state_dir)
        if sessions == "delete":
            purge_stored(settings, "client", client)
        accounts.remove_client(client, detail="sessions deleted" if sessions == "delete" else "sessions kept")
    control.notify_tokens_changed(settings.state_dir)
    if json:
        numbers = {"tokens": found.tokens, "stored_sessions": n_sessions, "stored_chars": n_chars}
        print_json({"client_id": client, "sessions": sessions, **numbers})
    else:
        stdout.print(
            f"Deleted account {client}; {stored} {'deleted' if sessions == 'delete' else 'kept'}.", markup=False
        )


def _cells(client: ClientInfo) -> tuple[str, ...]:
    counts = (str(client.max_sessions), str(client.tokens))
    return client.client_id, client.priority, " ".join(client.scopes), *counts, format_limits(client.limits)


def _split(assignments: Iterable[str]) -> tuple[dict[str, float | None], list[str]]:
    """Return the assigned limits of sessions by name, and the other assignments.

    Raises:
        InferenceCenterError: ``invalid_request`` for an invalid number.
    """
    of_sessions: dict[str, float | None] = {}
    others = []
    for assignment in assignments:
        name, _, text = assignment.partition("=")
        if name not in _SESSION_LIMITS:
            others.append(assignment)
        elif text == "default" and name != "max_sessions":
            of_sessions[name] = None
        else:
            of_sessions[name] = _number(name, text)
    return of_sessions, others


def _number(name: str, text: str) -> float:
    try:
        return float(text) if name == "retention_days" else int(text)
    except ValueError:
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST,
            f"{name} is {text!r}, which is not a number",
            field=name,
            hint="max_sessions=50" if name == "max_sessions" else f"{name}=30, or {name}=default.",
        ) from None


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

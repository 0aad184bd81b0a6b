"""``inferencecenter audit``: logins, refusals and changes of accounts; works alongside a running daemon."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from inferencecenter.auth.audit import MAX_ROWS, AuditEvent
from inferencecenter.cli.options import ConfigOption, JsonOption, StateDirOption, given
from inferencecenter.cli.output import print_json, print_rows
from inferencecenter.cli.state_files import open_accounts
from inferencecenter.config.loader import load_settings

if TYPE_CHECKING:
    from inferencecenter.auth.audit import AuditLine


def audit(  # noqa: PLR0913 - one argument an option
    *,
    last: Annotated[
        int, typer.Option("--last", help="Number of newest lines to show.", min=1, max=sum(MAX_ROWS.values()))
    ] = 100,
    client: Annotated[str | None, typer.Option(help="Only this account.", show_default=False)] = None,
    event: Annotated[AuditEvent | None, typer.Option(help="Only this event.", show_default=False)] = None,
    config: ConfigOption = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """Show the audit log, newest last, in local time; tab-separated when piped."""
    settings = load_settings(config, given(state_dir=state_dir))
    with open_accounts(settings) as accounts:
        lines = accounts.audit_lines(last=last, client_id=client, event=event)
    if json:
        print_json([asdict(line) for line in lines])
    else:
        print_rows(("time", "event", "client", "token_id", "address", "times", "detail", "by"), map(cells, lines))


def cells(line: AuditLine) -> tuple[str, ...]:
    """Return time, event, client, token, address, count, detail and acting client of a line."""
    return (
        datetime.fromtimestamp(line.at).astimezone().strftime("%Y-%m-%d %H:%M:%S"),
        line.event.value,
        line.client_id or "",
        line.token_id or "",
        line.address or "",
        str(line.count),
        line.detail,
        line.actor or "",
    )

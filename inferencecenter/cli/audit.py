"""``inferencecenter audit``: logins, refusals and changes of accounts; works alongside a running daemon."""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from inferencecenter.auth.accounts import DATABASE_NAME, Accounts
from inferencecenter.auth.audit import MAX_ROWS, AuditEvent
from inferencecenter.cli.options import ConfigOption, JsonOption, StateDirOption, given
from inferencecenter.cli.output import print_json, stdout
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
    path = settings.state_dir / DATABASE_NAME
    with contextlib.closing(Accounts.open(path, clock=time.time, audit_days=settings.auth.audit_days)) as accounts:
        lines = accounts.audit_lines(last=last, client_id=client, event=event)
    if json:
        print_json([asdict(line) for line in lines])
    elif stdout.is_terminal:
        stdout.print(as_table(lines))
    else:
        for line in lines:
            typer.echo("\t".join(cells(line)))


def as_table(lines: list[AuditLine]) -> Table:
    """Return the lines as a table."""
    table = Table("time", "event", "client", "token_id", "address", "times", "detail")
    for line in lines:
        # As text: client-supplied names are not markup.
        table.add_row(*map(Text, cells(line)))
    return table


def cells(line: AuditLine) -> tuple[str, ...]:
    """Return time, event, client, token, address, count and detail of a line."""
    return (
        datetime.fromtimestamp(line.at).astimezone().strftime("%Y-%m-%d %H:%M:%S"),
        line.event.value,
        line.client_id or "",
        line.token_id or "",
        line.address or "",
        str(line.count),
        line.detail,
    )

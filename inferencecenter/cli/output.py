"""Output of commands: text for people, JSON for scripts, one message per error."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

import orjson
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from inferencecenter.config.loader import InvalidSettingsError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.table import Column

    from inferencecenter.core.errors import InferenceCenterError

stdout: Final = Console(highlight=False)
stderr: Final = Console(highlight=False, stderr=True)


def print_json(value: object) -> None:
    """Write a value as indented JSON to standard output."""
    typer.echo(orjson.dumps(value, default=str, option=orjson.OPT_INDENT_2).decode())


def text_table(columns: Iterable[str | Column], rows: Iterable[Iterable[str]]) -> Table:
    """Return rows as a table whose cells are plain text, since names chosen by clients may contain markup."""
    table = Table(*columns)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def print_rows(columns: Iterable[str | Column], rows: Iterable[Iterable[str]]) -> None:
    """Write rows as a table to a terminal, otherwise tab-separated."""
    if stdout.is_terminal:
        stdout.print(text_table(columns, rows))
    else:
        for row in rows:
            typer.echo("\t".join(row))


def problems_of(error: InferenceCenterError) -> tuple[InferenceCenterError, ...]:
    return error.problems if isinstance(error, InvalidSettingsError) else (error,)


def as_json(error: InferenceCenterError) -> dict[str, Any]:
    return {"code": error.code.value, "message": error.message, "field": error.field, "hint": error.hint}


def report(error: InferenceCenterError) -> None:
    """Write code, message and hint of each problem to standard error."""
    # Imported for an error: only the daemon logs.
    from inferencecenter.telemetry.logs import is_journal, with_priority  # noqa: PLC0415

    mark = with_priority("", "error") if is_journal(sys.stderr) else ""
    for problem in problems_of(error):
        stderr.print(Text.assemble(mark, (problem.code.value, "bold red"), ": ", problem.message), soft_wrap=True)
        if problem.hint:
            stderr.print(Text.assemble(mark, ("hint: ", "bold"), problem.hint), soft_wrap=True)

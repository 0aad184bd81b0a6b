"""``inferencecenter docs``: write the generated documentation, or say which of it is stale."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

import inferencecenter
from inferencecenter.cli.reference.pages import documents

_STALE_EXIT_CODE: Final = 1


def docs(
    *,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit with 1 when a file is stale.")] = False,
    root: Annotated[
        Path | None, typer.Option(help="Root of the repository.", show_default="the one this package lies in")
    ] = None,
) -> None:
    """Write every generated page and the annotated default configuration."""
    base = root or Path(inferencecenter.__file__).parents[1]
    stale = [name for name, text in documents().items() if _read(base / name) != text]
    if not check:
        for name in stale:
            (base / name).parent.mkdir(parents=True, exist_ok=True)
            (base / name).write_text(documents()[name], encoding="utf-8")
    for name in stale:
        typer.echo(f"{name}: {'stale; `make docs` writes it' if check else 'written'}")
    if check and stale:
        raise typer.Exit(_STALE_EXIT_CODE)


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None

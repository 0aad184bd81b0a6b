"""Options that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

ConfigOption: TypeAlias = Annotated[
    Path | None, typer.Option("--config", help="Configuration file.", metavar="FILE", show_default=False)
]
StateDirOption: TypeAlias = Annotated[
    Path | None, typer.Option("--state-dir", help="Directory of accounts and sessions.", show_default=False)
]
JsonOption: TypeAlias = Annotated[bool, typer.Option("--json", help="Write JSON.")]


def given(**values: Any) -> dict[str, Any]:
    """Return what was given on the command line, under dotted setting names: ``server__port`` is ``server.port``."""
    return {name.replace("__", "."): value for name, value in values.items() if value is not None}

"""``inferencecenter bench``: the benchmarks of a repository checkout, which are not part of the wheel."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Final

import typer

import inferencecenter
from inferencecenter.core.errors import ErrorCode, InferenceCenterError

_ROOT: Final = Path(inferencecenter.__file__).parents[1]

if (_ROOT / "benchmarks" / "command.py").is_file():
    if str(_ROOT) not in sys.path:
        sys.path.append(str(_ROOT))
    bench = import_module("benchmarks.command").bench
else:
    CONTEXT_SETTINGS: Final = {"ignore_unknown_options": True, "allow_extra_args": True}
    """Accept any arguments, so that the message is shown."""

    def bench(_context: typer.Context) -> None:
        """Run benchmarks, alone or side by side with other servers; only in a checkout of the repository."""
        raise InferenceCenterError(
            ErrorCode.INVALID_CONFIG,
            "`bench` is part of the repository, not of the installed package",
            hint="Clone the repository, run `make run` there, and then .venv/bin/inferencecenter bench.",
        )

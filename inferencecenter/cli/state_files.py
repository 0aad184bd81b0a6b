"""What commands need that put other files in the place of the daemon's: none runs, and nothing is deleted."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.server.control import try_lock_state_dir

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextlib.contextmanager
def without_daemon(state_dir: Path) -> Iterator[None]:
    """Make the state directory if there is none, and keep daemons from starting on it meanwhile.

    Raises:
        InferenceCenterError: ``storage_unavailable`` when one runs, or the directory cannot be made.
    """
    with contextlib.ExitStack() as stack:
        try:
            state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            alone = stack.enter_context(try_lock_state_dir(state_dir))
        except OSError as error:
            raise unavailable(
                f"{state_dir} cannot be written: {error.strerror}", "Run this as the daemon's user."
            ) from error
        if not alone:
            raise unavailable(f"a daemon uses {state_dir}", "Stop it first.")
        yield


def aside_name(path: Path, why: str) -> Path:
    """Return a name that no file has for what ``path`` leads to now."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    name = path.with_name(f"{path.name}.{why}-{stamp}")
    number = 1
    while name.exists():
        number += 1
        name = path.with_name(f"{path.name}.{why}-{stamp}-{number}")
    return name


def unavailable(message: str, hint: str) -> InferenceCenterError:
    """Return the error for files that cannot be used."""
    return InferenceCenterError(ErrorCode.STORAGE_UNAVAILABLE, message, hint=hint)

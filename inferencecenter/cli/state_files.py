"""Access to the daemon's files for commands: to open them, or to replace them while no daemon runs. None is deleted."""

from __future__ import annotations

import contextlib
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from inferencecenter.auth.accounts import DATABASE_NAME, Accounts
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.server.control import try_lock_state_dir

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from inferencecenter.config.settings import Settings


@contextlib.contextmanager
def open_accounts(settings: Settings) -> Iterator[Accounts]:
    """Open the accounts of the state directory for the block, with or without a running daemon."""
    path = settings.state_dir / DATABASE_NAME
    with contextlib.closing(Accounts.open(path, clock=time.time, audit_days=settings.auth.audit_days)) as accounts:
        yield accounts


@contextlib.contextmanager
def without_daemon(state_dir: Path) -> Iterator[None]:
    """Create the state directory if needed, and lock it against daemons inside the block.

    Raises:
        InferenceCenterError: ``storage_unavailable`` when a daemon runs, or the directory cannot be created.
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
    """Return an unused name to which ``path`` can be renamed."""
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

"""Starts one engine when the one before it, of this or of an earlier daemon, is gone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inferencecenter.supervisor.orphan import engine_lock, record_holder
from inferencecenter.supervisor.process import EngineProcess

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from inferencecenter.ipc.messages import EngineOptions, FromEngine


async def launch(
    options: EngineOptions, *, on_message: Callable[[FromEngine], None], lock_path: Path | None
) -> EngineProcess:
    """Start an engine that holds the lock at ``lock_path``, if there is one.

    Raises:
        OrphanError: Another engine holds the lock and does not go.
        OSError: The process cannot be started, or the lock not be opened.
    """
    if lock_path is None:
        return await EngineProcess.spawn(options, on_message=on_message)
    async with engine_lock(lock_path) as fd:
        process = await EngineProcess.spawn(options, on_message=on_message, keep_open=(fd,))
        record_holder(fd, process.pid)
        return process

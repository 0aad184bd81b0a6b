"""Starts one engine when the one before it, of this or of an earlier daemon, is gone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from inferencecenter.supervisor.orphan import engine_lock, record_holder
from inferencecenter.supervisor.process import EngineProcess

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from inferencecenter.ipc.messages import EngineOptions, FromEngine


async def launch(
    options: EngineOptions,
    *,
    is_first: bool,
    on_message: Callable[[FromEngine], None],
    on_drain: Callable[[], None],
    lock_path: Path | None,
) -> EngineProcess:
    """Start an engine that holds the lock at ``lock_path``, if there is one, and takes over what was parked.

    Of what another daemon's engine parked, only durable sessions are still known. One that got ready here has deleted
    the rest, so that what is there later was parked for sessions of this daemon.

    Raises:
        OrphanError: Another engine holds the lock and does not go.
        OSError: The process cannot be started, or the lock not be opened.
    """
    options = msgspec.structs.replace(options, kv_adopt="durable" if is_first else "all")
    if lock_path is None:
        return await EngineProcess.spawn(options, on_message=on_message, on_drain=on_drain)
    async with engine_lock(lock_path) as fd:
        process = await EngineProcess.spawn(options, on_message=on_message, on_drain=on_drain, keep_open=(fd,))
        record_holder(fd, process.pid)
        return process

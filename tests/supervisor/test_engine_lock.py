"""The lock that an engine of a dead daemon still holds."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
from typing import TYPE_CHECKING

import pytest

from inferencecenter.core.tasks import TaskGroup
from inferencecenter.supervisor.process import EngineLockError, engine_lock, record_holder

if TYPE_CHECKING:
    from pathlib import Path

_SLEEPER = "import signal; print('up', flush=True); signal.pause()"


async def orphan(path: Path) -> asyncio.subprocess.Process:
    """A process that holds the lock, like an engine whose daemon died."""
    async with engine_lock(path) as fd:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _SLEEPER, pass_fds=(fd,), stdout=asyncio.subprocess.PIPE
        )
        record_holder(fd, process.pid)
    assert process.stdout is not None
    await process.stdout.readline()
    return process


async def test_lock_is_acquired_when_the_orphan_exits(tmp_path: Path) -> None:
    """The lock is exclusive until then, and free without delay afterwards."""
    path = tmp_path / "engine.lock"
    process = await orphan(path)
    order: list[str] = []

    async def next_engine() -> None:
        async with engine_lock(path):
            order.append("locked")

    tasks = TaskGroup("test")
    task = tasks.spawn(next_engine(), name="next")
    for _ in range(5):
        await asyncio.sleep(0)
    order.append("killed")
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()
    async with asyncio.timeout(60):
        await task
    assert order == ["killed", "locked"]


async def test_error_names_a_remaining_orphan(tmp_path: Path) -> None:
    """The wait has a timeout."""
    path = tmp_path / "engine.lock"
    process = await orphan(path)
    with pytest.raises(EngineLockError, match=str(process.pid)):
        async with engine_lock(path, wait_s=0.01):
            pass
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()


async def test_lock_is_free_without_an_engine(tmp_path: Path) -> None:
    """A released lock can be acquired again; the file is private."""
    path = tmp_path / "engine.lock"
    for _ in range(2):
        async with engine_lock(path):
            pass
    assert stat.S_IMODE(path.stat().st_mode) == 0o600

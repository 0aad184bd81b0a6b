"""Makes sure that the engine of a daemon that died is gone before the next one starts.

The engine inherits a locked file that its daemon then closes. So the lock is held exactly as long as the engine lives,
whatever becomes of the daemon, and the file says for which process the next daemon has to wait.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

WAIT_S: Final = 10.0
"""How long an orphan may take: the kernel kills it together with its parent, but freeing its memory takes a while."""


class OrphanError(Exception):
    """Another engine holds the lock and does not go."""


@asynccontextmanager
async def engine_lock(path: Path, *, wait_s: float = WAIT_S) -> AsyncIterator[int]:
    """Hold the lock on ``path`` and yield its file descriptor, for an engine to inherit.

    Raises:
        OrphanError: The engine that holds the lock is still there after ``wait_s``.
        OSError: The file cannot be opened.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while not _lock(fd):
            await _holder_gone(_holder(fd), wait_s=wait_s)
        yield fd
    finally:
        os.close(fd)


def record_holder(fd: int, pid: int) -> None:
    """Write into the lock file which engine holds it from now on."""
    os.ftruncate(fd, 0)
    os.pwrite(fd, str(pid).encode(), 0)


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    record_holder(fd, os.getpid())
    return True


def _holder(fd: int) -> int:
    text = os.pread(fd, 32, 0)
    if not text.isdigit():
        raise OrphanError("another daemon is starting an engine in this state directory")
    return int(text)


async def _holder_gone(pid: int, *, wait_s: float) -> None:
    loop = asyncio.get_running_loop()
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        # The lock outlives its holder's pid by the moment in which the kernel closes the holder's files.
        raise OrphanError(f"the engine lock is held by process {pid}, which is gone") from None
    gone = asyncio.Event()
    loop.add_reader(pidfd, gone.set)
    try:
        async with asyncio.timeout(wait_s):
            await gone.wait()
    except TimeoutError:
        raise OrphanError(f"process {pid} still holds the engine lock after {wait_s:g} s") from None
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)

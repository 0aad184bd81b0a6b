"""Readings of all GPUs for those who ask often, or all at once: a driver takes its time, and may never answer."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from inferencecenter.hardware.nvml import Gpus, read_gpus
from inferencecenter.tasks import TaskGroup

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_AGE_S: Final = 2.0
PATIENCE_S: Final = 1.0
_NO_ANSWER: Final = Gpus(problem="the driver does not answer")


class GpuCache:
    """Reads GPUs off the event loop, one reading at a time, at most every two seconds.

    Args:
        read: Readings of all GPUs; blocks for some milliseconds, or for ever.
        patience_s: How long one who asks waits; then no GPU is there.
        monotonic: Seconds that only rise.
    """

    def __init__(
        self,
        read: Callable[[], Gpus] = read_gpus,
        *,
        patience_s: float = PATIENCE_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._patience_s = patience_s
        self._monotonic = monotonic
        self._tasks = TaskGroup("gpus")
        self._gpus = Gpus()
        self._read_at_s = float("-inf")
        self._reading: asyncio.Task[None] | None = None

    async def get(self) -> Gpus:
        """Return readings that are at most two seconds old; none if the driver does not answer in time."""
        if self._monotonic() - self._read_at_s < MAX_AGE_S:
            return self._gpus
        if self._reading is None:
            self._reading = self._tasks.spawn(self._look(), name="read")
        done, _ = await asyncio.wait([self._reading], timeout=self._patience_s)
        return self._gpus if done else _NO_ANSWER

    async def close(self) -> None:
        """Wait for no reading any more."""
        await self._tasks.cancel()

    async def _look(self) -> None:
        self._gpus = _NO_ANSWER
        try:
            self._gpus = await asyncio.to_thread(self._read)
            self._read_at_s = self._monotonic()
        finally:
            self._reading = None

"""Owned asyncio tasks: the only place that creates tasks, so that none is lost and no failure goes unnoticed.

A task with one job is spawned, and ends with it. A task that watches or serves for its owner's lifetime is kept
running: an unexpected exception is logged and counted, and the work is restarted after a back-off. So a temporary fault
costs seconds, and a permanent one is a log line every minute and a rising metric.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar, Final

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

RESTART_MIN_S: Final = 1.0
"""Wait before failed work is restarted; doubled by each failure in a row."""
RESTART_MAX_S: Final = 60.0
"""Maximum wait; work that ran for this long resets the back-off."""


class TaskGroup:
    """Tasks that belong to one owner and end with it.

    A failed task is logged at once with its name, and counted in ``failures``; ``cancel`` ends those that still run.
    """

    failures: ClassVar[Counter[str]] = Counter()
    """Failures by owner in the whole process: global like the log."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, coroutine: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        """Start ``coroutine`` as a task of this owner."""
        task = asyncio.get_running_loop().create_task(coroutine, name=f"{self._owner}:{name}")
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def keep_running(
        self,
        work: Callable[[], Coroutine[Any, Any, None]],
        *,
        name: str,
        pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> asyncio.Task[None]:
        """Run ``work`` as a task of this owner, restarted whenever it fails, until it returns or is cancelled.

        Args:
            work: Called for each start; it has to cope with the state that a failed run leaves.
            name: Of the task.
            pause: Waits for seconds before a restart.
        """
        return self.spawn(self._restart(work, name=name, pause=pause), name=name)

    async def cancel(self) -> None:
        """Cancel every task of this owner and wait until all have ended."""
        current = asyncio.current_task()
        tasks = [task for task in self._tasks if task is not current]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def join(self) -> None:
        """Wait until every task of this owner has ended."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _restart(
        self,
        work: Callable[[], Coroutine[Any, Any, None]],
        *,
        name: str,
        pause: Callable[[float], Awaitable[object]],
    ) -> None:
        loop, delay_s = asyncio.get_running_loop(), RESTART_MIN_S
        while True:
            began_s = loop.time()
            try:
                return await work()
            # The border of all long-lived work, which has to survive any failure.
            except Exception as error:  # noqa: BLE001
                if loop.time() - began_s >= RESTART_MAX_S:
                    delay_s = RESTART_MIN_S
                self.failures[self._owner] += 1
                _log_error("task_restarts", task=f"{self._owner}:{name}", delay_s=delay_s, exc_info=error)
            await pause(delay_s)
            delay_s = min(RESTART_MAX_S, 2 * delay_s)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failures[self._owner] += 1
            _log_error("task_failed", task=task.get_name(), exc_info=error)


def _log_error(event: str, **fields: Any) -> None:
    # A local import: the SDK imports this module, and structlog would take a quarter of that time.
    import structlog  # noqa: PLC0415

    structlog.get_logger(__name__).error(event, **fields)

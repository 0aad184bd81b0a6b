"""A thread for work that would block the event loop, shared fairly between clients."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from inferencecenter.core.fair_queue import FairQueue

if TYPE_CHECKING:
    from collections.abc import Callable

_Result = TypeVar("_Result")


class FairWorker:
    """Runs one job at a time, round-robin over clients with waiting work.

    A job whose caller is cancelled while it waits is never started. The queue is bounded by the limits on callers, each
    of which waits for its own job.

    Args:
        name: Prefix of the thread's name.
    """

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()
        self._busy = False

    async def run(self, client_id: str, work: Callable[[], _Result]) -> _Result:
        """Run ``work`` in the thread and return its result or raise its exception."""
        await self._turn(client_id)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        finally:
            self._grant_next()

    def close(self) -> None:
        """Start no further job."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _turn(self, client_id: str) -> None:
        if not self._busy:
            self._busy = True
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(client_id, turn)
        try:
            await turn
        except asyncio.CancelledError:
            self._waiting.withdraw(client_id, turn)
            if turn.done() and not turn.cancelled():  # granted at the same moment
                self._grant_next()
            raise

    def _grant_next(self) -> None:
        while (turn := self._waiting.take()) is not None:
            if not turn.cancelled():
                turn.set_result(None)
                return
        self._busy = False

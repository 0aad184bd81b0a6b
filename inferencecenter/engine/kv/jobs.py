"""Jobs for the one worker thread, and what the engine's thread does with their results."""

from __future__ import annotations

from collections import deque
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class _Job:
    future: Future[Any]
    finished: Callable[[Any], None]
    optional: bool


class Jobs:
    """Hands jobs to a worker in order, and results to ``finished`` in the same order, when asked to.

    Args:
        worker: Has one thread: later jobs rely on earlier ones being done.
    """

    def __init__(self, worker: Executor) -> None:
        self._worker = worker
        self._jobs: deque[_Job] = deque()

    def submit(
        self,
        job: Callable[[], ResultT],
        finished: Callable[[ResultT | Exception], None],
        *,
        notify: Callable[[], None] | None = None,
        optional: bool = False,
    ) -> Future[ResultT]:
        """Queue a job and return what ``withdraw`` takes.

        ``notify`` is called on the worker as soon as the result can be settled. An ``optional`` job is not worth
        waiting for at the end.
        """
        try:
            future: Future[ResultT] = self._worker.submit(job)
        except RuntimeError:  # it was shut down
            future = Future()
            future.cancel()
        self._jobs.append(_Job(future, finished, optional))
        if notify is not None:
            future.add_done_callback(lambda _: notify())
        return future

    def withdraw(self, future: Future[Any]) -> bool:
        """End a job with ``CancelledError`` now, if it has not begun; ``False`` when it has."""
        if not future.cancel():
            return False
        for job in tuple(self._jobs):
            if job.future is future:
                self._jobs.remove(job)
                job.finished(CancelledError())
        return True

    def settle(self) -> None:
        """Hand out the results of the jobs that are done.

        What a job raised is its result, ``CancelledError`` that of one that did not run.
        """
        while self._jobs and self._jobs[0].future.done():
            job = self._jobs.popleft()
            try:
                result = job.future.result()
            except Exception as error:  # noqa: BLE001 - a border: who submitted the job judges it
                result = error
            job.finished(result)

    def drain(self, progressed: Callable[[], None]) -> None:
        """Do what ``finish`` does, but settle each job as soon as it is done, and call ``progressed`` after each."""
        self._cancel_optional()
        while self._jobs:
            wait([self._jobs[0].future])
            self.settle()
            progressed()

    def finish(self) -> None:
        """Wait for all jobs but the optional ones that have not begun, and settle."""
        self._cancel_optional()
        wait([job.future for job in self._jobs])
        self.settle()

    def _cancel_optional(self) -> None:
        for job in self._jobs:
            if job.optional:
                job.future.cancel()

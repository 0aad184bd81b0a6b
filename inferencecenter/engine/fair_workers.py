"""Fair scheduling of clients' jobs on the threads of an executor."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar, overload

from inferencecenter.core.fair_queue import FairQueue

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

# A text of this size is tokenized in less than a tenth of a second.
_SHORT_BYTES: Final = 64 * 1024

_Item = TypeVar("_Item")


class JobCancelledError(Exception):
    """The result of the running job is no longer needed."""


@dataclass(slots=True, eq=False)
class Job:
    """Work for one client, whose duration depends on ``size_bytes``.

    ``work`` is called with the job; it must not raise, and drops its result once the job is ``cancelled``.
    """

    client_id: str
    work: Callable[[Job], None]
    size_bytes: int = 0
    cancelled: bool = False

    def check(self) -> None:
        """Return if the job is still wanted.

        Raises:
            JobCancelledError: The job was cancelled.
        """
        if self.cancelled:
            raise JobCancelledError

    def each(self, items: Sequence[_Item]) -> Sequence[_Item]:
        """Return the items as a sequence whose items raise ``JobCancelledError`` once the job is cancelled."""
        return _CancellableItems(self, items)


class _CancellableItems(Sequence[_Item]):
    def __init__(self, job: Job, items: Sequence[_Item]) -> None:
        self._job = job
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> _Item: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[_Item]: ...

    def __getitem__(self, index: int | slice) -> _Item | Sequence[_Item]:
        self._job.check()
        return self._items[index]


class FairWorkers:
    """Runs clients' jobs on a shared executor, fairly. All methods may be called from any thread.

    An executor's own queue is FIFO: a client that submits 500 jobs makes all others wait behind them, and submitted
    jobs cannot be removed. Here each client has its own queue. The executor gets only as many jobs as run at once; when
    one ends, the client that has waited longest since its last job submits the next one. Where several run at once, one
    client's long jobs never occupy all threads: one is left for other clients.

    A queued job is cancelled by removing it with everything it references. A thread cannot be stopped, so a running job
    checks ``cancelled`` between its parts and raises ``JobCancelledError``.

    Args:
        executor: Runs the jobs.
        most: Most jobs running at once.
    """

    def __init__(self, executor: Executor, *, most: int) -> None:
        self._executor = executor
        self._most = most
        self._waiting: FairQueue[Job] = FairQueue()
        self._running: set[Job] = set()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return the number of queued jobs."""
        with self._lock:
            return len(self._waiting)

    def submit(self, job: Job) -> None:
        """Queue a job for its client."""
        with self._lock:
            self._waiting.add(job.client_id, job)
            self._fill()

    def cancel(self, job: Job) -> None:
        """Remove a queued job, or mark a running one as cancelled; a finished one is unaffected."""
        with self._lock:
            job.cancelled = True
            self._waiting.withdraw(job.client_id, job)

    def unless_cancelled(self, job: Job, call: Callable[[], None]) -> None:
        """Make a call that does not block, unless the job is cancelled; ``cancel`` does not return meanwhile."""
        with self._lock:
            if not job.cancelled:
                call()

    def close(self) -> None:
        """Cancel all jobs."""
        with self._lock:
            for job in (*self._waiting, *self._running):
                job.cancelled = True
            self._waiting.clear()

    def _fill(self) -> None:
        """Submit as many jobs to the executor as may run; the lock is held."""
        while len(self._running) < self._most and (job := self._waiting.take(self._may_run)) is not None:
            self._running.add(job)
            with suppress(RuntimeError):  # it was shut down, and nothing runs any more
                self._executor.submit(self._run, job)

    def _may_run(self, job: Job) -> bool:
        """Return whether a thread stays free for other clients if this job runs beside its client's others."""
        if self._most == 1 or job.size_bytes <= _SHORT_BYTES:
            return True
        long = sum(each.size_bytes > _SHORT_BYTES for each in self._running if each.client_id == job.client_id)
        return long < self._most - 1

    def _run(self, job: Job) -> None:
        try:
            if not job.cancelled:
                job.work(job)
        finally:
            with self._lock:
                self._running.discard(job)
                self._fill()

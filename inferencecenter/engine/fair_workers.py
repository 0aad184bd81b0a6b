"""Work for clients on few threads: clients take turns, and what nothing waits for any more is withdrawn.

An executor's own queue is one line, so a client that submits 500 jobs keeps all others waiting behind them, and what
was submitted stays in it. Here each client has a line of its own. Only as many jobs as run at once are given to the
executor; when one ends, the client that has waited longest since its last job gives the next one. Where several run
at once, no client has all of them run long ones: a thread is left for what another client brings meanwhile.

A job that waits is withdrawn by taking it out of its line, with all that it refers to. A thread cannot be stopped, so a
job that runs looks at ``withdrawn`` between its parts, and raises ``JobCancelledError``.
"""

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

# A text of so many bytes is tokenized in less than a tenth of a second.
_SHORT_BYTES: Final = 64 * 1024

_Item = TypeVar("_Item")


class JobCancelledError(Exception):
    """Nothing waits for what the job that runs would bring."""


@dataclass(slots=True, eq=False)
class Job:
    """Work for one client, which takes as long as its ``size_bytes`` say.

    ``work`` is called with the job; it must not raise, and drops its result once the job is ``withdrawn``.
    """

    client_id: str
    work: Callable[[Job], None]
    size_bytes: int = 0
    cancelled: bool = False

    def check(self) -> None:
        """Go on only if something waits for this.

        Raises:
            WithdrawnError: Nothing does.
        """
        if self.cancelled:
            raise JobCancelledError

    def each(self, items: Sequence[_Item]) -> Sequence[_Item]:
        """Return the items as a sequence whose items raise ``JobCancelledError`` once the job is cancelled."""
        return _Wanted(self, items)


class _Wanted(Sequence[_Item]):
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
    """Runs jobs on an executor that may have other work too. All methods may be called from any thread.

    Args:
        executor: Runs them.
        most: How many run at once.
    """

    def __init__(self, executor: Executor, *, most: int) -> None:
        self._executor = executor
        self._most = most
        self._waiting: FairQueue[Job] = FairQueue()
        self._running: set[Job] = set()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return how many jobs wait."""
        with self._lock:
            return len(self._waiting)

    def submit(self, job: Job) -> None:
        """Have a job run when it is its client's turn."""
        with self._lock:
            self._waiting.add(job.client_id, job)
            self._fill()

    def cancel(self, job: Job) -> None:
        """Forget a job that waits, and tell one that runs that nothing waits for it; one that is over is over."""
        with self._lock:
            job.cancelled = True
            self._waiting.withdraw(job.client_id, job)

    def close(self) -> None:
        """Withdraw all jobs."""
        with self._lock:
            for job in (*self._waiting, *self._running):
                job.cancelled = True
            self._waiting.clear()

    def _fill(self) -> None:
        """Give the executor as many jobs as may run; the lock is held."""
        while len(self._running) < self._most and (job := self._waiting.take(self._may_run)) is not None:
            self._running.add(job)
            with suppress(RuntimeError):  # it was shut down, and nothing runs any more
                self._executor.submit(self._run, job)

    def _may_run(self, job: Job) -> bool:
        """Tell whether a thread stays for other clients when a job runs beside its client's others."""
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

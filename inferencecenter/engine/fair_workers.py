"""Work for clients on few threads: clients take turns, and what nothing waits for any more is withdrawn.

An executor's own queue is one line, so a client that submits 500 jobs keeps all others waiting behind them, and what
was submitted stays in it. Here each client has a line of its own. Only as many jobs as run at once are given to the
executor; when one ends, the client that has waited longest since its last job gives the next one.

A job that waits is withdrawn by taking it out of its line, with all that it refers to. A thread cannot be stopped, so a
job that runs looks at ``withdrawn`` between its parts, and raises ``WithdrawnError``.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, overload

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

_Item = TypeVar("_Item")


class WithdrawnError(Exception):
    """Nothing waits for what the job that runs would bring."""


@dataclass(slots=True, eq=False)
class Job:
    """Work for one client; ``work`` is called with the job, must not raise, and drops its result once ``withdrawn``."""

    client_id: str
    work: Callable[[Job], None]
    withdrawn: bool = False

    def check(self) -> None:
        """Go on only if something waits for this.

        Raises:
            WithdrawnError: Nothing does.
        """
        if self.withdrawn:
            raise WithdrawnError

    def each(self, items: Sequence[_Item]) -> Sequence[_Item]:
        """Return the items as a sequence of which getting one raises ``WithdrawnError`` once the job is withdrawn."""
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
        # Clients with jobs that wait, the one whose turn it is first; of each its jobs, the oldest first.
        self._lines: OrderedDict[str, dict[Job, None]] = OrderedDict()
        self._running: set[Job] = set()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return how many jobs wait."""
        with self._lock:
            return sum(map(len, self._lines.values()))

    def submit(self, job: Job) -> None:
        """Have a job run when it is its client's turn."""
        with self._lock:
            self._lines.setdefault(job.client_id, {})[job] = None
            self._fill()

    def withdraw(self, job: Job) -> None:
        """Forget a job that waits, and tell one that runs that nothing waits for it; one that is over is over."""
        with self._lock:
            job.withdrawn = True
            line = self._lines.get(job.client_id, {})
            if job in line:
                del line[job]
                if not line:
                    del self._lines[job.client_id]

    def close(self) -> None:
        """Withdraw all jobs."""
        with self._lock:
            for line in self._lines.values():
                for job in line:
                    job.withdrawn = True
            self._lines.clear()
            for job in self._running:
                job.withdrawn = True

    def _fill(self) -> None:
        """Give the executor as many jobs as may run; the lock is held."""
        while self._lines and len(self._running) < self._most:
            client_id, line = self._lines.popitem(last=False)
            job = next(iter(line))
            del line[job]
            if line:
                self._lines[client_id] = line
            self._running.add(job)
            with suppress(RuntimeError):  # it was shut down, and nothing runs any more
                self._executor.submit(self._run, job)

    def _run(self, job: Job) -> None:
        try:
            if not job.withdrawn:
                job.work(job)
        finally:
            with self._lock:
                self._running.discard(job)
                self._fill()

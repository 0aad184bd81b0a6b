"""Work for clients on few threads: clients take turns, and what nothing waits for any more is withdrawn.

An executor's own queue is one line, so a client that submits 500 jobs keeps all others waiting behind them, and what
was submitted stays in it. Here each client has a line of its own. Only as many jobs as run at once are given to the
executor; when one ends, the client that has waited longest since its last job gives the next one. Where several run
at once, no client has all of them run long ones: a thread is left for what another client brings meanwhile.

A job that waits is withdrawn by taking it out of its line, with all that it refers to. A thread cannot be stopped, so a
job that runs looks at ``withdrawn`` between its parts, and raises ``WithdrawnError``.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar, overload

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

# A text of so many bytes is tokenized in less than a tenth of a second.
_SHORT_BYTES: Final = 64 * 1024

_Item = TypeVar("_Item")


class WithdrawnError(Exception):
    """Nothing waits for what the job that runs would bring."""


@dataclass(slots=True, eq=False)
class Job:
    """Work for one client, which takes as long as its ``size_bytes`` say.

    ``work`` is called with the job; it must not raise, and drops its result once the job is ``withdrawn``.
    """

    client_id: str
    work: Callable[[Job], None]
    size_bytes: int = 0
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
        while len(self._running) < self._most and (client_id := self._next_client()) is not None:
            line = self._lines.pop(client_id)
            job = next(iter(line))
            del line[job]
            if line:
                self._lines[client_id] = line
            self._running.add(job)
            with suppress(RuntimeError):  # it was shut down, and nothing runs any more
                self._executor.submit(self._run, job)

    def _next_client(self) -> str | None:
        """Return the client whose turn it is of those whose next job may run now."""
        long = Counter(job.client_id for job in self._running if job.size_bytes > _SHORT_BYTES)
        for client_id, line in self._lines.items():
            is_long = next(iter(line)).size_bytes > _SHORT_BYTES
            if self._most == 1 or not is_long or long[client_id] < self._most - 1:
                return client_id
        return None

    def _run(self, job: Job) -> None:
        try:
            if not job.withdrawn:
                job.work(job)
        finally:
            with self._lock:
                self._running.discard(job)
                self._fill()

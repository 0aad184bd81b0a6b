"""One timer for every session that may expire: a heap of due times, looked at in bounded batches."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferencecenter.sessions.facts import Timer

MAX_BATCH: Final = 100
"""Keys that one turn of the event loop handles; the rest follows in the next one."""
_MAX_TIMER_S: Final = 86_400.0
_SPARE_ENTRIES: Final = 64


class ExpiryQueue:
    """Calls back for each key when its time has come.

    A key that is put again or discarded leaves its old entry in the heap, which is skipped when it comes up. The heap
    is rebuilt when most of it is such entries, so it stays within twice the number of keys.

    Args:
        monotonic: Seconds that only rise.
        call_later: Arranges for a call after some seconds.
        due: Called with a key, which is no longer in the queue; may put it again.
    """

    def __init__(
        self,
        *,
        monotonic: Callable[[], float],
        call_later: Callable[[float, Callable[[], None]], Timer],
        due: Callable[[str], None],
    ) -> None:
        self._monotonic = monotonic
        self._call_later = call_later
        self._due = due
        self._due_at: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []
        self._timer: Timer | None = None
        self._timer_at = 0.0

    def __len__(self) -> int:
        return len(self._due_at)

    def put(self, key: str, at: float) -> None:
        """Call back for ``key`` at ``at`` in place of any earlier arrangement."""
        self._due_at[key] = at
        heapq.heappush(self._heap, (at, key))
        if len(self._heap) > 2 * len(self._due_at) + _SPARE_ENTRIES:
            self._heap = [(due_at, name) for name, due_at in self._due_at.items()]
            heapq.heapify(self._heap)
        self._arm()

    def discard(self, key: str) -> None:
        """Forget a key, if it is here."""
        self._due_at.pop(key, None)
        if not self._due_at:
            self._heap.clear()
            self._disarm()

    def _arm(self) -> None:
        """Have the timer come no later than the first entry is due."""
        if not self._heap:
            return
        now = self._monotonic()
        at = min(max(self._heap[0][0], now), now + _MAX_TIMER_S)
        if self._timer is not None:
            if self._timer_at <= at:
                return
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._call_later(at - now, self._fire)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        self._timer = None
        now = self._monotonic()
        for _ in range(MAX_BATCH):
            if not self._heap or self._heap[0][0] > now:
                break
            at, key = heapq.heappop(self._heap)
            if self._due_at.get(key) == at:
                del self._due_at[key]
                self._due(key)
        self._arm()

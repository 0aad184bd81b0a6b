"""When the loop has to look at a turn again, even if nothing else happens."""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class Deadlines:
    """Turns by the monotonic second at which one of their times runs out.

    What is due is a hint: the turn may have ended or begun since, and whoever is told looks for itself.
    """

    def __init__(self) -> None:
        self._due: list[tuple[float, str]] = []

    def add(self, turn_id: str, deadlines_s: Iterable[float]) -> None:
        """Take note of a turn's deadlines; infinite ones never come."""
        for due_s in deadlines_s:
            if due_s < math.inf:
                heapq.heappush(self._due, (due_s, turn_id))

    def passed(self, now: float) -> tuple[str, ...]:
        """Return the turns with a deadline up to ``now``, and forget those deadlines."""
        turn_ids: list[str] = []
        while self._due and self._due[0][0] <= now:
            turn_ids.append(heapq.heappop(self._due)[1])
        return tuple(turn_ids)

    def wait_s(self, now: float) -> float | None:
        """Return the seconds until the next deadline, at least 0, or ``None`` when there is none."""
        return max(0.0, self._due[0][0] - now) if self._due else None

    def clear(self) -> None:
        """Forget all deadlines: there is no turn any more."""
        self._due.clear()

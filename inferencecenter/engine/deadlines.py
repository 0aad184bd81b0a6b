"""When the loop has to look at a turn again, even if nothing else happens."""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# With no more than these it is not worth looking which of them are of turns that have ended.
_FEWEST: Final = 1024


class Deadlines:
    """Turns by the monotonic second at which one of their times runs out.

    What is due is a hint: the turn may have ended or begun since, which is for the caller to see. Deadlines of turns
    that have ended are forgotten when they are the greater part of all.

    Args:
        lives: Tells whether a turn has not ended.
    """

    def __init__(self, lives: Callable[[str], bool]) -> None:
        self._lives = lives
        self._due: list[tuple[float, str]] = []
        self._most = _FEWEST

    def __len__(self) -> int:
        return len(self._due)

    def add(self, turn_id: str, deadlines_s: Iterable[float]) -> None:
        """Take note of a turn's deadlines; infinite ones never come."""
        for due_s in deadlines_s:
            if due_s < math.inf:
                heapq.heappush(self._due, (due_s, turn_id))
        if len(self._due) > self._most:
            self._due = [(due_s, turn_id) for due_s, turn_id in self._due if self._lives(turn_id)]
            heapq.heapify(self._due)
            self._most = max(_FEWEST, 2 * len(self._due))

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

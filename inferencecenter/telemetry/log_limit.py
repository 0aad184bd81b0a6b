"""Rate limit for log lines caused by clients: one per interval, with the number of suppressed lines."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

INTERVAL_S: Final = 60.0


class LogLimit:
    """Admits the first line and then one per interval.

    Args:
        interval_s: Minimum seconds between two lines.
        clock: Monotonic clock in seconds.
    """

    def __init__(self, interval_s: float = INTERVAL_S, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._next_s = float("-inf")
        self._n_held_back = 0

    def admit(self) -> int | None:
        """Return how many lines were suppressed since the last one, or ``None`` if this one is suppressed too."""
        now_s = self._clock()
        if now_s < self._next_s:
            self._n_held_back += 1
            return None
        self._next_s = now_s + self._interval_s
        n_held_back, self._n_held_back = self._n_held_back, 0
        return n_held_back

"""What is left of limits: requests in a window, tokens in a bucket, tokens of a day. Pure; times are milliseconds.

Each answers when it would say yes: one millisecond earlier it still says no.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

MINUTE_MS: Final = 60_000
DAY_MS: Final = 86_400_000
TICK_MS: Final = 100
"""What comes within a tick is one entry, so that a window never holds more than some hundreds."""
_MAX_OTHER_DAYS: Final = 4


class Window:
    """Counts what happened within the last minute, whole ticks: at most a tick longer than a minute ago."""

    def __init__(self) -> None:
        self._ticks: deque[tuple[int, int]] = deque()
        self._total = 0

    def total(self, *, now_ms: int) -> int:
        """Return how often it happened within the minute."""
        while self._ticks and _leaves_ms(self._ticks[0][0]) <= now_ms:
            self._total -= self._ticks.popleft()[1]
        return self._total

    def retry_after_ms(self, limit: int, *, now_ms: int) -> int | None:
        """Return how long it takes until fewer than ``limit`` are within the minute; ``None`` if that is so now."""
        excess = self.total(now_ms=now_ms) - limit
        if excess < 0:
            return None
        for tick, count in self._ticks:
            excess -= count
            if excess < 0:
                return _leaves_ms(tick) - now_ms
        raise AssertionError("a limit is at least 1")

    def count(self, *, now_ms: int) -> None:
        """Count one more."""
        tick = now_ms // TICK_MS
        self.total(now_ms=now_ms)
        if self._ticks and self._ticks[-1][0] == tick:
            self._ticks[-1] = (tick, self._ticks[-1][1] + 1)
        else:
            self._ticks.append((tick, 1))
        self._total += 1


def _leaves_ms(tick: int) -> int:
    return (tick + 1) * TICK_MS + MINUTE_MS


class Bucket:
    """Tokens of a minute: full at the beginning, regained evenly, and owed when more are taken than are there."""

    def __init__(self) -> None:
        # How many are missing, in tokens times milliseconds of a minute: whole numbers, so that nothing is rounded.
        self._missing = 0
        self._looked_ms = 0

    def left(self, limit: int, *, now_ms: int) -> int:
        """Return the whole tokens that are there; below 0 are those owed."""
        self._regain(limit, now_ms)
        return (limit * MINUTE_MS - self._missing) // MINUTE_MS

    def retry_after_ms(self, limit: int, *, now_ms: int) -> int | None:
        """Return how long it takes until a token is there, ``None`` if one is."""
        self._regain(limit, now_ms)
        short = self._missing - (limit - 1) * MINUTE_MS
        return None if short <= 0 else -(-short // limit)

    def take(self, n_tokens: int, limit: int, *, now_ms: int) -> None:
        """Take tokens, whether they are there or not."""
        self._regain(limit, now_ms)
        self._missing += n_tokens * MINUTE_MS

    def is_full(self, limit: int, *, now_ms: int) -> bool:
        """Tell whether nothing is missing."""
        self._regain(limit, now_ms)
        return self._missing == 0

    def _regain(self, limit: int, now_ms: int) -> None:
        self._missing = max(0, self._missing - limit * max(0, now_ms - self._looked_ms))
        self._looked_ms = now_ms


@dataclass(slots=True)
class Day:
    """Tokens used since midnight UTC; ``ends_ms`` is the next one, in Unix milliseconds.

    Each day keeps its own count, so that a clock that is set back over midnight and comes there again forgets nothing.
    """

    used: int = 0
    ends_ms: int = 0
    _others: dict[int, int] = field(default_factory=dict)

    def at(self, now_ms: float) -> Day:
        """Return this day, or change to the one that it is by now; asked for every token, hence one comparison."""
        if not 0 < self.ends_ms - now_ms <= DAY_MS:
            if self.used:
                self._others[self.ends_ms] = self.used
                while len(self._others) > _MAX_OTHER_DAYS:
                    del self._others[next(iter(self._others))]
            self.ends_ms = (int(now_ms) // DAY_MS + 1) * DAY_MS
            self.used = self._others.pop(self.ends_ms, 0)
        return self

    @property
    def end(self) -> str:
        """The end of the day in words."""
        return datetime.fromtimestamp(self.ends_ms / 1000, UTC).strftime("%Y-%m-%d 00:00 UTC")

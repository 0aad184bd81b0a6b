"""When and how often a lost engine is restarted, and with how many layers on the GPU. Pure."""

from __future__ import annotations

import math
import re
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

HEALTHY_AFTER_S: Final = 60.0
"""An engine that was ready this long resets the count of failures."""
_MAX_DOUBLINGS: Final = 30
_ASSUMED_LAYERS: Final = 64
"""Assumed for "all" before the model is known; more than most models have."""


class RestartBackoff:
    """Exponential back-off with jitter over consecutive failures.

    Args:
        min_s: Seconds to wait after a first failure.
        max_s: Most seconds to wait.
        random: Returns numbers from 0 to 1.
    """

    def __init__(self, *, min_s: float, max_s: float, random: Callable[[], float]) -> None:
        self._min_s = min_s
        self._max_s = max_s
        self._random = random
        self._failures = 0

    def after_failure(self, *, ready_s: float) -> float:
        """Return how many seconds to wait.

        Args:
            ready_s: How long the engine had been ready, 0 if it never was.
        """
        self._failures = 0 if ready_s >= HEALTHY_AFTER_S else self._failures
        wait_s = min(self._max_s, math.ldexp(self._min_s, min(self._failures, _MAX_DOUBLINGS)))
        self._failures += 1
        return wait_s * (0.5 + self._random() / 2)


_LACKS_MEMORY: Final = re.compile(r"alloc|out.?of.?(device)?.?memory", re.IGNORECASE)


class RestartBudget:
    """Limits the restarts within a sliding window."""

    def __init__(self, *, max_restarts: int, window_s: float) -> None:
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._restarts: deque[float] = deque()

    def take(self, *, now: float) -> bool:
        """Count a restart at ``now`` in monotonic seconds; return ``False`` if it exceeds the limit."""
        while self._restarts and now - self._restarts[0] > self._window_s:
            self._restarts.popleft()
        if len(self._restarts) >= self._max_restarts:
            return False
        self._restarts.append(now)
        return True

    def give_back(self) -> None:
        """Forget the last restart: no failure of an engine caused it."""
        if self._restarts:
            self._restarts.pop()

    def clear(self) -> None:
        """Forget all restarts: their cause is gone."""
        self._restarts.clear()


def fewer_layers(current: int, known_layers: int | None) -> int:
    """Return how many layers to offload after an engine died loading ``current`` of them: half, down to none.

    Args:
        current: The layers that were tried; -1 is all.
        known_layers: The model's layers, if it was ever loaded.
    """
    if current < 0:
        current = _ASSUMED_LAYERS if known_layers is None else known_layers
    elif known_layers is not None:
        current = min(current, known_layers)
    return current // 2


def lacks_memory(reason: str) -> bool:
    """Return whether llama.cpp's reason for refusing a model is lack of memory."""
    return bool(_LACKS_MEMORY.search(reason))

"""How long to wait before an engine that was lost is started again."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

HEALTHY_AFTER_S: Final = 60.0
"""An engine that was ready for so long starts the count of failures anew."""
_MAX_DOUBLINGS: Final = 30


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Bounds of the wait, in seconds, and how many restarts within ``window_s`` are the last ones."""

    min_s: float = 0.5
    max_s: float = 30.0
    max_restarts: int = 5
    window_s: float = 600.0


class Backoff:
    """Doubles the wait with each failure in a row, with jitter.

    Args:
        policy: Bounds.
        random: Numbers from 0 to 1.
    """

    def __init__(self, policy: RestartPolicy, *, random: Callable[[], float]) -> None:
        self._policy = policy
        self._random = random
        self._failures = 0

    def after_failure(self, *, ready_s: float) -> float:
        """Return how many seconds to wait.

        Args:
            ready_s: How long the engine had been ready, 0 when it never was.
        """
        self._failures = 0 if ready_s >= HEALTHY_AFTER_S else self._failures
        wait_s = min(self._policy.max_s, math.ldexp(self._policy.min_s, min(self._failures, _MAX_DOUBLINGS)))
        self._failures += 1
        return wait_s * (0.5 + self._random() / 2)

"""A point in time at which something is called, however far away it is."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_MAX_TIMER_S: Final = 7 * 86_400.0


class Deadline:
    """Calls something once when its time has come, unless it is cancelled before; made and used on the event loop.

    Args:
        delay_s: How long until then; what is past is called soon, never at once.
        passed: What is called.
    """

    __slots__ = ("_passed", "_timer")

    def __init__(self, delay_s: float, passed: Callable[[], object]) -> None:
        self._passed = passed
        self._timer = self._arm(delay_s)

    def cancel(self) -> None:
        """Call nothing any more."""
        self._timer.cancel()

    def _arm(self, delay_s: float) -> asyncio.TimerHandle:
        loop = asyncio.get_running_loop()
        # A deadline further away than a timer should be is looked at again when the timer ends.
        if delay_s > _MAX_TIMER_S:
            return loop.call_later(_MAX_TIMER_S, self._again, delay_s - _MAX_TIMER_S)
        return loop.call_later(max(0.0, delay_s), self._passed)

    def _again(self, delay_s: float) -> None:
        self._timer = self._arm(delay_s)

"""Detects an engine that has work and makes no progress."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

POLLS: Final = 4
"""Polls within the timeout."""


class TimerHandle(Protocol):
    """A scheduled call that can be cancelled."""

    def cancel(self) -> None:
        """Cancel the call."""


def call_later(delay_s: float, call: Callable[[], None]) -> TimerHandle:
    """Schedule a call after ``delay_s`` seconds on the running event loop."""
    return asyncio.get_running_loop().call_later(delay_s, call)


def call_soon(call: Callable[[], None]) -> None:
    """Schedule a call in the next iteration of the running event loop."""
    asyncio.get_running_loop().call_soon(call)


class Watchdog:
    """Polls a progress counter while enabled, and calls ``on_hang`` when it has stopped changing.

    Unchanged polls are counted, not seconds: a daemon that was itself suspended has polled once in that time.

    Args:
        timeout_s: Seconds without a change after which ``on_hang`` is called, at most a quarter late.
        ticks: Returns the progress counter.
        on_hang: Called once; polling stops then.
        call_later: Schedules a call after some seconds.
    """

    def __init__(
        self,
        timeout_s: float,
        *,
        ticks: Callable[[], int],
        on_hang: Callable[[], None],
        call_later: Callable[[float, Callable[[], None]], TimerHandle],
    ) -> None:
        self._pause_s = timeout_s / POLLS
        self._ticks = ticks
        self._on_hang = on_hang
        self._call_later = call_later
        self._timer: TimerHandle | None = None
        self._last_ticks = 0
        self._unchanged = 0

    def keep(self, *, watching: bool) -> None:
        """Start or stop polling; no timer runs while ``watching`` is false."""
        if watching and self._timer is None:
            self._last_ticks, self._unchanged = self._ticks(), 0
            self._timer = self._call_later(self._pause_s, self._poll)
        elif not watching and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _poll(self) -> None:
        ticks = self._ticks()
        self._unchanged = self._unchanged + 1 if ticks == self._last_ticks else 0
        self._last_ticks = ticks
        if self._unchanged < POLLS:
            self._timer = self._call_later(self._pause_s, self._poll)
        else:
            self._timer = None
            self._on_hang()

"""Detects an engine that has work and makes no progress."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

LOOKS: Final = 4
"""How often the engine's progress is looked at within the time that it may make none."""


class TimerHandle(Protocol):
    """Something that will happen unless it is cancelled."""

    def cancel(self) -> None:
        """Keep it from happening."""


def call_later(delay_s: float, call: Callable[[], None]) -> TimerHandle:
    """Arrange for a call after some seconds, on the running event loop."""
    return asyncio.get_running_loop().call_later(delay_s, call)


def call_soon(call: Callable[[], None]) -> None:
    """Arrange for a call in the next turn of the running event loop."""
    asyncio.get_running_loop().call_soon(call)


class Watchdog:
    """Looks at a number now and then, for as long as it is told to, and says when it has stopped changing.

    Looks are counted, not seconds: a front that was stopped for a while itself has looked once in that time.

    Args:
        timeout_s: Seconds without a change after which ``on_hang`` is called, a quarter more at most.
        beats: Returns the number.
        on_hang: Called once; the watch is over then.
        call_later: Arranges for a call after some seconds.
    """

    def __init__(
        self,
        timeout_s: float,
        *,
        ticks: Callable[[], int],
        on_hang: Callable[[], None],
        call_later: Callable[[float, Callable[[], None]], TimerHandle],
    ) -> None:
        self._pause_s = timeout_s / LOOKS
        self._beats = ticks
        self._on_hang = on_hang
        self._call_later = call_later
        self._timer: TimerHandle | None = None
        self._seen = 0
        self._unchanged = 0

    def keep(self, *, watching: bool) -> None:
        """Begin to watch, or end it; nothing is done, and no timer runs, while nobody is to be watched."""
        if watching and self._timer is None:
            self._seen, self._unchanged = self._beats(), 0
            self._timer = self._call_later(self._pause_s, self._look)
        elif not watching and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        beats = self._beats()
        self._unchanged = self._unchanged + 1 if beats == self._seen else 0
        self._seen = beats
        if self._unchanged < LOOKS:
            self._timer = self._call_later(self._pause_s, self._look)
        else:
            self._timer = None
            self._on_hang()

"""Timers of the event loop that a test advances."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import uvloop

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


@dataclass(frozen=True)
class _Timer:
    due_s: float
    handle: asyncio.TimerHandle
    callback: Callable[..., object]
    args: tuple[Any, ...]


class LoopClock:
    """Controls timers scheduled with ``call_later`` from now on, sleeping included.

    Limits of a test can exceed any stall of the machine without a wait. ``asyncio.timeout`` keeps real time,
    since it guards tests, unless ``timeouts`` is set.

    Args:
        monkeypatch: Restores the loop after the test.
        timeouts: Whether ``asyncio.timeout`` is controlled too.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, timeouts: bool = False) -> None:
        self._loop = asyncio.get_running_loop()
        # Each kind of loop implements one with the other.
        self._arrange = self._loop.call_later if isinstance(self._loop, uvloop.Loop) else self._arrange_at
        self._at = self._loop.call_at
        self._ahead_s = 0.0
        self._timeouts = timeouts
        self._timers: list[_Timer] = []
        monkeypatch.setattr(self._loop, "call_later", self._call_later)
        monkeypatch.setattr(self._loop, "call_at", self._call_at)

    async def go_on(self, seconds: float) -> None:
        """Let so many seconds pass at once, and the loop turn a few times with what came due."""
        await self._turn()
        self._ahead_s += seconds
        due = [timer for timer in self._timers if timer.due_s <= self._now_s]
        self._timers = [timer for timer in self._timers if timer not in due]
        for timer in sorted(due, key=lambda timer: timer.due_s):
            if not timer.handle.cancelled():
                timer.handle.cancel()
                timer.callback(*timer.args)
        await self._turn()

    @property
    def _now_s(self) -> float:
        return self._loop.time() + self._ahead_s

    async def _turn(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    def _arrange_at(
        self, delay_s: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        return self._at(self._loop.time() + delay_s, callback, *args, context=context)

    def _call_at(
        self, when_s: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        arrange = self._call_later if self._timeouts else self._arrange
        return arrange(when_s - self._loop.time(), callback, *args, context=context)

    def _call_later(
        self, delay_s: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        handle = self._arrange(delay_s, callback, *args, context=context)
        self._timers = [timer for timer in self._timers if not timer.handle.cancelled()]
        self._timers.append(_Timer(self._now_s + delay_s, handle, callback, args))
        return handle

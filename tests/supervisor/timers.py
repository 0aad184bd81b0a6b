"""Timers that fire on request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Call:
    """A scheduled call, and whether it is done."""

    delay_s: float
    callback: Callable[[], None]
    over: bool = False

    def cancel(self) -> None:
        """Cancel it."""
        self.over = True


@dataclass
class Timers:
    """All scheduled calls, in order."""

    calls: list[Call] = field(default_factory=list)

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Call:
        """Schedule a call."""
        call = Call(delay_s, callback)
        self.calls.append(call)
        return call

    @property
    def pending(self) -> list[Call]:
        """The pending calls."""
        return [call for call in self.calls if not call.over]

    def fire(self) -> None:
        """Fire the only timer."""
        (call,) = self.pending
        call.over = True
        call.callback()

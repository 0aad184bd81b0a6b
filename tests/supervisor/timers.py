"""Timers that fire when a test says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Call:
    """A call that was arranged, and whether it is over."""

    delay_s: float
    callback: Callable[[], None]
    over: bool = False

    def cancel(self) -> None:
        """Keep it from happening."""
        self.over = True


@dataclass
class Timers:
    """Every call that was arranged, in order."""

    calls: list[Call] = field(default_factory=list)

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Call:
        """Arrange for a call."""
        call = Call(delay_s, callback)
        self.calls.append(call)
        return call

    @property
    def pending(self) -> list[Call]:
        """What will happen yet."""
        return [call for call in self.calls if not call.over]

    def fire(self) -> None:
        """Let the time of the only timer come."""
        (call,) = self.pending
        call.over = True
        call.callback()

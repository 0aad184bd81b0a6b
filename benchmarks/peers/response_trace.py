"""The trace of one turn as received by a client, for any protocol."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchmarks.target import TurnTrace

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Counted:
    """A turn's tokens as its server counts them; ``cached_tokens`` is ``None`` where it does not."""

    prompt_tokens: int
    tokens: int
    cached_tokens: int | None


@dataclass(slots=True)
class ResponseTrace:
    """A turn as it is received.

    Attributes:
        on_text: Called when a piece of text arrives, after its time was noted.
        text: The answer so far.
        counted: What the server counted; a turn of which it never does has failed.
        error: Why the turn failed.
    """

    on_text: Callable[[], None] | None = None
    started_s: float = field(default_factory=time.monotonic)
    times_s: list[float] = field(default_factory=list)
    text: str = ""
    counted: Counted | None = None
    error: str | None = None

    def begin(self) -> None:
        """Start the clock, directly before the turn is requested."""
        self.started_s = time.monotonic()

    def piece(self, text: str, *, now_s: float) -> None:
        """Record a piece of text, which may be empty."""
        if text:
            self.times_s.append(now_s)
            self.text += text
            if self.on_text is not None:
                self.on_text()

    def trace(self) -> TurnTrace:
        """Return the turn, which has ended."""
        if self.counted is None and self.error is None:
            self.error = "the server does not report the number of generated tokens"
        counted = self.counted or Counted(0, 0, None)
        return TurnTrace(
            started_s=self.started_s,
            token_times_s=tuple(self.times_s),
            ended_s=time.monotonic(),
            prompt_tokens=counted.prompt_tokens,
            tokens=counted.tokens,
            cached_tokens=counted.cached_tokens,
            error=self.error,
        )

"""Compares what a client received of a turn with the daemon's transcript: nothing lost, nothing duplicated."""

from __future__ import annotations

from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.peers.line import Frame, TurnUsage


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of two texts: missing and additional characters, and the first difference."""

    lost_chars: int = 0
    extra_chars: int = 0
    first: int | None = None


def difference(expected: str, shown: str) -> Difference:
    """Return the missing and additional characters of ``shown`` relative to ``expected``."""
    if expected == shown:
        return Difference()
    lost = extra = 0
    for change, expected_from, expected_to, shown_from, shown_to in SequenceMatcher(
        None, expected, shown, autojunk=False
    ).get_opcodes():
        if change != "equal":
            lost += expected_to - expected_from
            extra += shown_to - shown_from
    first = next(
        (place for place, (one, other) in enumerate(zip(expected, shown, strict=False)) if one != other),
        min(len(expected), len(shown)),
    )
    return Difference(lost, extra, first)


@dataclass(slots=True)
class ObservedTurn:
    """A turn as received by a client, over one or several connections.

    Attributes:
        started_s: When it was asked for; times are seconds of ``time.monotonic``.
        times_s: When each piece of text arrived.
        text: All of it so far.
        finishes: Each terminal event, by its finish reason or its error code.
        usage: What the daemon counted.
        ended_s: When the first terminal event arrived.
        misnumbered: Events whose number did not rise.
    """

    started_s: float
    times_s: list[float] = field(default_factory=list)
    text: str = ""
    finishes: list[str] = field(default_factory=list)
    usage: TurnUsage | None = None
    ended_s: float | None = None
    misnumbered: int = 0
    _seq: int = 0

    @property
    def seq(self) -> int:
        """The number of the last event."""
        return self._seq

    def take(self, frame: Frame, *, now_s: float) -> None:
        """Record an event of the turn."""
        if frame.seq is not None:
            self.misnumbered += frame.seq <= self._seq
            self._seq = frame.seq
        if frame.op == "token":
            self.times_s.append(now_s)
            self.text += frame.content or ""
        elif frame.op == "end" or (frame.op == "error" and frame.turn_id is not None):
            self.finishes.append(frame.finish_reason or frame.code)
            self.usage = frame.usage or self.usage
            self.ended_s = self.ended_s or now_s

    def begin_at(self, seq: int) -> None:
        """Treat the events of the session up to this number as received."""
        self._seq = seq

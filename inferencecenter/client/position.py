"""How far a session's numbered history of events has arrived here."""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING

from inferencecenter.protocol.events import Error, Reasoning, Token, ToolCall

if TYPE_CHECKING:
    from inferencecenter.protocol.base import SessionEvent
    from inferencecenter.protocol.events import SessionResumed


class Arrival(Enum):
    """What the number of an event says about it."""

    NEXT = auto()
    REPEATED = auto()
    AFTER_A_GAP = auto()


class Position:
    """The last event that arrived.

    Attributes:
        epoch: Incarnation of the history; ``None`` when it is not known.
        seq: Number of the last event, 0 before the first.
    """

    def __init__(self, epoch: str | None, seq: int = 0) -> None:
        self.epoch = epoch
        self.seq = seq
        self._resumed_after: int | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.epoch}, {self.seq})"

    def admit(self, event: SessionEvent | Error) -> Arrival:
        """Count an event, unless it was here before or events before it are missing.

        A text may stand for several, of which it has the last number, so nothing is missing before one. Nor is there
        a gap to fill where the history was resumed already: what is not sent again was not for this client.
        """
        assert event.seq is not None, "only numbered events have a position"
        if event.seq <= self.seq:
            return Arrival.REPEATED
        is_text = isinstance(event, Token | Reasoning | ToolCall)
        adjoins = is_text or event.seq == self.seq + 1 or self.seq == self._resumed_after
        if not adjoins:
            return Arrival.AFTER_A_GAP
        self.seq = event.seq
        return Arrival.NEXT

    def note(self, seq: int) -> None:
        """Count an event that is taken whatever its number, as the answer to a request."""
        self.seq = max(self.seq, seq)

    def resume(self, resumed: SessionResumed) -> None:
        """Go on where the daemon goes on: at the same place, or after all that is lost."""
        if not resumed.resumed:
            self.seq = resumed.seq
        self.epoch = resumed.epoch
        self._resumed_after = self.seq

    def forget(self) -> None:
        """Stop counting: the events go elsewhere; whatever comes next is new."""
        self.epoch = None
        self.seq = 0
        self._resumed_after = 0

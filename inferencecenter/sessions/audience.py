"""Who hears of a session: one socket at most, and whoever comes back to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from inferencecenter.protocol import events

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferencecenter.protocol.base import Event
    from inferencecenter.protocol.requests import ResumeSession
    from inferencecenter.sessions.client import EventSink, ReplaySink
    from inferencecenter.sessions.facts import Timer
    from inferencecenter.sessions.journal import Journal
    from inferencecenter.sessions.replay import Numbered, Replay

Lost: TypeAlias = Literal["no_position", "other_epoch", "unknown_position", "too_old"]
"""Why events cannot be told again."""


@dataclass(frozen=True, slots=True)
class Missed:
    """What a client has missed: the events themselves, or the reason why they cannot be told."""

    events: tuple[Numbered, ...] = ()
    reason: Lost | None = None


class Audience:
    """Sends a session's events once they are safe, and keeps them for those who come back.

    An event that the journal still holds back when somebody resumes goes to nobody but that one.

    Args:
        session_id: The session.
        journal: What makes events safe.
        replay: What keeps them.
        sink: Who listens at first.
        moved: Called with the session's name, who listened before and who listens now, when that changes.
    """

    def __init__(
        self,
        session_id: str,
        *,
        journal: Journal,
        replay: Replay,
        sink: EventSink | None,
        moved: Callable[[str, EventSink | None, EventSink | None], None],
    ) -> None:
        self._session_id = session_id
        self._journal = journal
        self._replay = replay
        self._sink = sink
        self._moved = moved
        self._generation = 0
        self._folding: Timer | None = None

    @property
    def sink(self) -> EventSink | None:
        """Who listens."""
        return self._sink

    def tell(self, event: Numbered) -> None:
        """Keep an event, and send it to whoever listens."""
        self._replay.add(event)
        self.send(event)

    def answer(self, event: Numbered, sink: EventSink) -> None:
        """Keep an event, and send it to whoever asked for it; others find it when they come back."""
        if sink is self._sink:
            self.tell(event)
        else:
            self._replay.add(event)
            self._journal.release(lambda: sink.send(event))

    def send(self, event: Event) -> None:
        """Send an event to whoever listens."""
        if (sink := self._sink) is None:
            return
        generation = self._generation

        def deliver() -> None:
            if generation == self._generation:
                sink.send(event)

        self._journal.release(deliver)

    def attach(self, sink: EventSink) -> None:
        """Send events to ``sink`` from now on; another one that had them is told when it has had all of its own."""
        self.rest()
        self._replay.unfold()
        before, self._sink = self._sink, sink
        self._moved(self._session_id, before, sink)
        if before is not None and before is not sink:
            gone = events.SessionDetached(session_id=self._session_id, reason="resumed_elsewhere")
            self._journal.release(lambda: before.send(gone))

    def detach(self) -> None:
        """Send events to nobody."""
        before, self._sink = self._sink, None
        self._moved(self._session_id, before, None)

    def missed(self, request: ResumeSession, *, epoch: str, seq: int) -> Missed:
        """Return what a client has missed whose position is that of ``request``, the session's being the others."""
        if request.epoch is None:
            return Missed(reason="no_position")
        if request.epoch != epoch:
            return Missed(reason="other_epoch")
        if request.last_seq > seq:
            return Missed(reason="unknown_position")
        missing = self._replay.after(request.last_seq)
        return Missed(reason="too_old") if missing is None else Missed(tuple(missing))

    def resume(self, sink: ReplaySink, answer: events.SessionResumed, missing: tuple[Numbered, ...]) -> None:
        """Send events to ``sink`` from now on, ``answer`` and the ``missing`` ones first."""
        self._generation += 1
        self.attach(sink)
        generation = self._generation

        def deliver() -> None:
            if generation == self._generation:
                sink.replay((answer, *missing))

        self._journal.release(deliver)

    def fold_later(self, delay_s: float, call_later: Callable[[float, Callable[[], None]], Timer]) -> None:
        """Keep no events from ``delay_s`` on, unless somebody comes or ``rest`` is called before."""
        self.rest()
        self._folding = call_later(delay_s, self._fold)

    def rest(self) -> None:
        """Go on as now: nothing has to be forgotten later."""
        if self._folding is not None:
            self._folding.cancel()
            self._folding = None

    def _fold(self) -> None:
        self._folding = None
        self._replay.fold()

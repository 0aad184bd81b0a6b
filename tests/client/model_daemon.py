"""A session of a daemon as the protocol promises it, without sockets, and a client's end that can be disconnected.

Everything that can be lost is lost at random: frames in flight in both directions, events beyond the replay buffer,
and the daemon's whole buffer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from inferencecenter.client.answer import TurnStream
from inferencecenter.client.session import SequenceStatus, SequenceTracker
from inferencecenter.protocol.events import End, Error, Queued, SessionResumed, Token
from inferencecenter.protocol.values import ChatMessage, TranscriptTurn, Usage
from tests.client.peer import STATS, USAGE

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferencecenter.client.answer import TurnStreamEvent
    from inferencecenter.protocol.base import Event

NumberedEvent = Queued | Token | End | Error


@dataclass
class ModelDaemon:
    """A session that answers with ``pieces`` and keeps the protocol's promises."""

    pieces: list[str]
    epoch: int = 1
    seq: int = 0
    n_emitted: int = 0
    turn: str | None = None
    key: str | None = None
    turns_begun: int = 0
    ended: dict[str, End] = field(default_factory=dict)
    ring: list[NumberedEvent] = field(default_factory=list)
    transcript: list[ChatMessage] = field(default_factory=lambda: [ChatMessage(role="system", content="s")])
    turns: list[TranscriptTurn] = field(default_factory=list)

    def infer(self, request_id: str, key: str) -> list[NumberedEvent]:
        """Begin the turn, attach to it, or repeat its end."""
        if key in self.ended:
            return [self.ended[key].model_copy(update={"id": request_id})]
        if self.turn is None:
            self.turns_begun += 1
            self.turn, self.key, self.n_emitted = f"t{self.turns_begun}", key, 0
        assert self.key == key
        return [self._publish(Queued(id=request_id, turn_id=self.turn, position=0, **self._number()))]

    def step(self) -> list[NumberedEvent]:
        """Emit the next piece, or end the turn."""
        if self.turn is None:
            return []
        if self.n_emitted < len(self.pieces):
            piece = self.pieces[self.n_emitted]
            self.n_emitted += 1
            return [self._publish(Token(turn_id=self.turn, content=piece, **self._number()))]
        end = End.model_validate(
            {
                "turn_id": self.turn,
                "finish_reason": "stop",
                "warnings": (),
                "usage": USAGE,
                "stats": STATS,
                **self._number(),
            }
        )
        self.transcript += [
            ChatMessage(role="user", content="?"),
            ChatMessage(role="assistant", content="".join(self.pieces)),
        ]
        usage = Usage.model_validate(USAGE)
        self.turns.append(
            TranscriptTurn(turn_id=self.turn, finish_reason="stop", messages=len(self.transcript), usage=usage)
        )
        assert self.key is not None
        self.ended[self.key] = end
        self.turn = None
        return [self._publish(end)]

    def fail(self) -> list[NumberedEvent]:
        """End the turn with an error and discard it."""
        if self.turn is None:
            return []
        error = Error(
            code="internal", message="broke", error="broke", turn_id=self.turn, retryable=False, **self._number()
        )
        self.turn = None
        return [self._publish(error)]

    def forget(self, *, restarted: bool) -> None:
        """Lose the replay buffer, and with a restart also the sequence numbers."""
        self.ring = []
        if restarted:
            self.epoch += 1
            self.seq = 0

    def resume(self, epoch: str | None, last_seq: int, *, joined: bool) -> list[Event]:
        """Answer ``resume_session``, with the missed events if they are buffered."""
        missing = [event for event in self.ring if event.seq is not None and event.seq > last_seq]
        complete = epoch == f"e{self.epoch}" and len(missing) == self.seq - last_seq
        common: dict[str, Any] = {
            "session_id": "s",
            "state": "busy" if self.turn else "idle",
            "epoch": f"e{self.epoch}",
            "seq": self.seq,
            "turn_id": self.turn,
        }
        if complete:
            return [SessionResumed(resumed=True, **common), *(_joined(missing) if joined else missing)]
        return [
            SessionResumed(
                resumed=False,
                reason="too_old",
                content="".join(self.pieces[: self.n_emitted]) if self.turn else None,
                transcript=tuple(self.transcript),
                turns=tuple(self.turns),
                **common,
            )
        ]

    def _number(self) -> dict[str, Any]:
        self.seq += 1
        return {"session_id": "s", "seq": self.seq}

    def _publish(self, event: NumberedEvent) -> NumberedEvent:
        self.ring.append(event)
        return event


@dataclass
class ModelClient:
    """The client's end: position and stream, combined as a session does."""

    daemon: ModelDaemon
    stream: TurnStream = field(default_factory=lambda: TurnStream("s"))
    position: SequenceTracker = field(default_factory=lambda: SequenceTracker("e1"))
    events: list[TurnStreamEvent] = field(default_factory=list)
    inbound: list[Event] = field(default_factory=list)
    n_asked: int = 0
    missing: bool = False

    @property
    def text(self) -> str:
        """The text shown so far."""
        return "".join(event.content for event in self.events if isinstance(event, Token))

    def send_if_due(self, *, arrives: bool = True) -> None:
        """Send ``infer`` if the stream requests it; it may be lost in flight."""
        if self.stream.must_send and not self.stream.is_over and not self.inbound:
            self.n_asked += 1
            self.stream.requested(f"c{self.n_asked}")
            if arrives:
                self.inbound += self.daemon.infer(f"c{self.n_asked}", "key")

    def read(self, n_frames: int) -> None:
        """Take some of the frames in flight."""
        for _ in range(min(n_frames, len(self.inbound))):
            event = self.inbound.pop(0)
            if not self.stream.is_over and self._counts(event):
                self.events += self.stream.apply(event)

    def disconnect(self, happens: Callable[[], None], *, joined: bool) -> None:
        """Lose the socket with the frames in flight, let the daemon continue, and reconnect."""
        self.inbound = []
        self.missing = True
        happens()
        self.inbound += self.daemon.resume(self.position.epoch, self.position.seq, joined=joined)

    def _counts(self, event: Event) -> bool:
        if isinstance(event, SessionResumed):
            self.position.resume(event)
            self.missing = False
            return True
        assert isinstance(event, NumberedEvent)
        assert event.seq is not None
        if event.id is not None and event.id == f"c{self.n_asked}":
            if not self.missing:
                self.position.record(event.seq)
            return True
        if self.missing:
            return False
        arrival = self.position.admit(event)
        assert arrival is not SequenceStatus.AFTER_A_GAP
        return arrival is SequenceStatus.NEXT


def _joined(events: list[NumberedEvent]) -> list[NumberedEvent]:
    """Join the text of neighboring tokens of one turn."""
    joined: list[NumberedEvent] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, Token) and isinstance(last, Token) and last.turn_id == event.turn_id:
            joined[-1] = event.model_copy(update={"content": last.content + event.content})
        else:
            joined.append(event)
    return joined

"""What a client is told about a session. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol import events
from inferencecenter.protocol.values import SessionSummary
from inferencecenter.sessions.prompt import messages_of

if TYPE_CHECKING:
    from inferencecenter.protocol.params import Params
    from inferencecenter.protocol.values import ChatMessage, Usage
    from inferencecenter.sessions.audience import Lost
    from inferencecenter.sessions.facts import SessionFacts
    from inferencecenter.sessions.history import History
    from inferencecenter.sessions.ledger import Ledger
    from inferencecenter.sessions.states import SessionState
    from inferencecenter.sessions.turn import Turn


@dataclass(frozen=True, slots=True)
class TurnFacts:
    """What is known of a turn: the messages ``before`` it, those that it ``asked``, and its ``answer``.

    ``note`` is text of whoever asked. A turn that is ``running`` has no answer or usage yet, and a ``finish_reason``
    only if it is about to end for it. One that was discarded left no messages, and one that failed its ``failure``.
    """

    turn_id: str
    note: str
    before: tuple[ChatMessage, ...]
    asked: tuple[ChatMessage, ...]
    answer: ChatMessage | None = None
    finish_reason: str | None = None
    usage: Usage | None = None
    running: bool = False
    failure: events.Error | None = None


@dataclass(frozen=True, slots=True)
class Standing:
    """A session as it stands: ``seq`` is the number of its last event, ``last_used_at`` Unix seconds.

    ``model`` is the name of the one that answers now, ``n_ctx`` is its, or the first one's while it is not known.
    """

    facts: SessionFacts
    model: str
    n_ctx: int
    state: SessionState
    seq: int
    last_used_at: float
    history: History
    ledger: Ledger

    def describe(self, params: Params) -> events.Session:
        """Return everything about the session, with its effective params; a running turn is not yet part of it."""
        facts, history = self.facts, self.history
        return events.Session(
            session_id=facts.session_id,
            epoch=facts.epoch,
            seq=self.seq,
            state=self.state.value,
            model=self.model,
            n_ctx=self.n_ctx,
            n_tokens=history.n_tokens,
            on_full=facts.on_full,
            dropped_messages=history.view.n_dropped,
            params=params.model_dump(mode="json"),
            metadata=facts.metadata,
            transcript=history.messages,
            turns=self.ledger.turns,
            usage=self.ledger.usage,
        )

    def summary(self) -> SessionSummary:
        """Return what a list of sessions shows."""
        facts, history = self.facts, self.history
        return SessionSummary(
            session_id=facts.session_id,
            state=self.state.value,
            mode=facts.mode,
            model=self.model,
            messages=len(history.messages),
            tokens=history.n_tokens,
            created_at=facts.created_at,
            last_used_at=self.last_used_at,
            metadata=facts.metadata,
        )

    def turn(self, turn_id: str) -> TurnFacts:
        """Return what is known of a turn that has ended.

        Raises:
            InferenceCenterError: ``turn_not_found``.
        """
        if (failed := self.ledger.failure(turn_id)) is not None:
            return TurnFacts(turn_id, failed.note, before=self.history.messages, asked=(), failure=failed.error)
        if (known := self.ledger.turn(turn_id)) is None:
            raise InferenceCenterError(ErrorCode.TURN_NOT_FOUND)
        listed, note = known
        messages = self.history.messages
        mark = next((mark for mark in self.history.turns if mark.turn_id == turn_id), None)
        begin, end = (listed.messages, listed.messages) if mark is None else (mark.n_before, mark.n_messages)
        said = messages[begin:end]
        return TurnFacts(
            turn_id=turn_id,
            note=note,
            before=messages[:begin],
            asked=said[:-1],
            answer=said[-1] if said else None,
            finish_reason=listed.finish_reason,
            usage=listed.usage,
        )

    def resumed(self, lost: Lost | None, *, turn: Turn | None, request_id: str | None) -> events.SessionResumed:
        """Return the answer to a client that comes back.

        Args:
            lost: Why it cannot be told what it has missed; then it is told all that was said.
            turn: The one that is being answered.
            request_id: The frame that asked.
        """
        asked = messages_of(turn.order.request) if turn else ()
        speaking = turn.speaking if turn else None
        return events.SessionResumed(
            id=request_id,
            session_id=self.facts.session_id,
            resumed=lost is None,
            reason=lost,
            state=self.state.value,
            epoch=self.facts.epoch,
            seq=self.seq,
            turn_id=turn.turn_id if turn else None,
            content=turn.content if turn and lost else None,
            reasoning=(speaking.reasoning or None) if speaking and lost else None,
            tool_calls=(speaking.calls or None) if speaking and lost else None,
            transcript=self.history.messages + asked if lost else None,
            turns=self.ledger.turns if lost else None,
        )

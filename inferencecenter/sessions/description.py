"""What a client is told about a session. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from inferencecenter.protocol import events
from inferencecenter.protocol.values import SessionSummary
from inferencecenter.sessions.prompt import messages_of

if TYPE_CHECKING:
    from inferencecenter.protocol.params import Params
    from inferencecenter.sessions.audience import Lost
    from inferencecenter.sessions.facts import SessionFacts
    from inferencecenter.sessions.history import History
    from inferencecenter.sessions.ledger import Ledger
    from inferencecenter.sessions.states import SessionState
    from inferencecenter.sessions.turn import Turn


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

    def resumed(self, lost: Lost | None, *, turn: Turn | None, request_id: str | None) -> events.SessionResumed:
        """Return the answer to a client that comes back.

        Args:
            lost: Why it cannot be told what it has missed; then it is told all that was said.
            turn: The one that is being answered.
            request_id: The frame that asked.
        """
        asked = messages_of(turn.order.request) if turn else ()
        return events.SessionResumed(
            id=request_id,
            session_id=self.facts.session_id,
            resumed=lost is None,
            reason=lost,
            state=self.state.value,
            epoch=self.facts.epoch,
            seq=self.seq,
            turn_id=turn.turn_id if turn else None,
            content=turn.answer.text if turn and lost else None,
            transcript=self.history.messages + asked if lost else None,
            turns=self.ledger.turns if lost else None,
        )

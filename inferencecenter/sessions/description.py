"""What a client is told about a session. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from inferencecenter.protocol import events
from inferencecenter.protocol.values import SessionSummary

if TYPE_CHECKING:
    from inferencecenter.sessions.facts import SessionFacts
    from inferencecenter.sessions.history import History
    from inferencecenter.sessions.ledger import Ledger
    from inferencecenter.sessions.states import SessionState


@dataclass(frozen=True, slots=True)
class Standing:
    """A session as it stands: ``seq`` is the number of its last event, ``last_used_at`` Unix seconds."""

    facts: SessionFacts
    state: SessionState
    seq: int
    last_used_at: float
    history: History
    ledger: Ledger

    def describe(self) -> events.Session:
        """Return everything about the session; a running turn is not yet part of it."""
        facts, history = self.facts, self.history
        return events.Session(
            session_id=facts.session_id,
            epoch=facts.epoch,
            seq=self.seq,
            state=self.state.value,
            model=facts.model,
            n_ctx=facts.n_ctx,
            n_tokens=history.n_tokens,
            on_full=facts.on_full,
            dropped_messages=history.view.n_dropped,
            params=facts.params.model_dump(mode="json"),
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
            model=facts.model,
            messages=len(history.messages),
            tokens=history.n_tokens,
            created_at=facts.created_at,
            last_used_at=self.last_used_at,
            metadata=facts.metadata,
        )

"""The numbered events of one session, sent to whoever is attached."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inferencecenter.errors import ERRORS, ErrorCode
from inferencecenter.protocol import events
from inferencecenter.protocol.values import TokenLogprobs, TokenProbability, Usage

if TYPE_CHECKING:
    from inferencecenter.ipc import messages as ipc
    from inferencecenter.protocol.base import Event
    from inferencecenter.sessions.client import EventSink
    from inferencecenter.sessions.shift import Shift
    from inferencecenter.sessions.turn import Outcome, Turn


class EventStream:
    """Builds a session's events and numbers them from 1, also while nobody listens.

    Args:
        session_id: The session.
        sink: Who listens at first.
    """

    def __init__(self, session_id: str, sink: EventSink) -> None:
        self.sink: EventSink | None = sink
        self.seq = 0
        self._session_id = session_id

    def queued(self, turn: Turn, *, eta_ms: float | None, request_id: str | None = None) -> None:
        """Acknowledge a turn, or say that its place has changed."""
        self._send(
            events.Queued(
                id=request_id,
                session_id=self._session_id,
                seq=self._next(),
                turn_id=turn.turn_id,
                position=turn.position,
                eta_ms=eta_ms,
            )
        )

    def progress(self, event: ipc.Progress) -> None:
        """Say how much of the prompt has been read."""
        self._send(
            events.Progress(
                session_id=self._session_id,
                seq=self._next(),
                turn_id=event.turn_id,
                done=event.done,
                total=event.total,
            )
        )

    def context_shifted(self, turn: Turn, shift: Shift) -> None:
        """Say that the oldest turns are no longer read."""
        self._send(
            events.ContextShifted(
                session_id=self._session_id,
                seq=self._next(),
                turn_id=turn.turn_id,
                dropped_turns=shift.dropped_turns,
                tokens=shift.dropped_tokens,
            )
        )

    def token(self, event: ipc.Delta) -> None:
        """Pass on new text; not validated, since this is where the time goes."""
        self._send(
            events.Token.model_construct(
                op="token",
                id=None,
                session_id=self._session_id,
                seq=self._next(),
                turn_id=event.turn_id,
                content=event.text,
                logprobs=tuple(_logprobs(entry) for entry in event.logprobs) or None,
            )
        )

    def end(self, turn: Turn, outcome: Outcome) -> events.End:
        """Say that a turn is over, and return what was said."""
        stats = outcome.stats
        event = events.End.model_validate(
            {
                "id": turn.ending_id,
                "session_id": self._session_id,
                "seq": self._next(),
                "turn_id": turn.turn_id,
                "finish_reason": outcome.finish,
                "stop": outcome.stop,
                "warnings": outcome.warnings,
                "usage": Usage(
                    prompt_tokens=stats.prompt_tokens,
                    cached_tokens=stats.cached_tokens,
                    completion_tokens=stats.tokens,
                ),
                "stats": stats,
            }
        )
        self._send(event)
        return event

    def again(self, event: events.End, *, request_id: str | None) -> None:
        """Repeat the end of a turn, with the number it had."""
        self._send(event.model_copy(update={"id": request_id}))

    def failed(self, turn: Turn, failure: ipc.Failed) -> None:
        """Say that a turn could not run or go on."""
        code = ErrorCode(failure.code) if failure.code in ERRORS else ErrorCode.INTERNAL
        self._send(
            events.Error(
                id=turn.ending_id or turn.request_id,
                code=code.value,
                message=failure.message,
                error=failure.message,
                hint=failure.hint,
                field=failure.field,
                session_id=self._session_id,
                seq=self._next(),
                turn_id=turn.turn_id,
                retryable=ERRORS[code].retryable,
                retry_after_ms=ERRORS[code].retry_after_ms,
            )
        )

    def appended(self, n_messages: int) -> events.Appended:
        """Return the event that answers ``append``."""
        return events.Appended(session_id=self._session_id, seq=self._next(), messages=n_messages)

    def rewound(self, turn: str, n_messages: int) -> events.SessionRewound:
        """Return the event that answers ``rewind_session``."""
        return events.SessionRewound(session_id=self._session_id, seq=self._next(), turn=turn, messages=n_messages)

    def expired(self) -> None:
        """Say that the session is gone because nobody used it."""
        self._send(events.SessionExpired(session_id=self._session_id, seq=self._next()))

    def _next(self) -> int:
        self.seq += 1
        return self.seq

    def _send(self, event: Event) -> None:
        if self.sink is not None:
            self.sink.send(event)


def _logprobs(entry: ipc.TokenLogprobs) -> TokenLogprobs:
    sampled = entry.sampled
    return TokenLogprobs(
        token=sampled.token,
        token_id=sampled.token_id,
        logprob=sampled.logprob,
        top=tuple(TokenProbability(token=top.token, token_id=top.token_id, logprob=top.logprob) for top in entry.top),
    )

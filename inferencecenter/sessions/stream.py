"""The numbered events of one session, each written down before it is sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inferencecenter.errors import ERRORS, ErrorCode
from inferencecenter.protocol import events
from inferencecenter.protocol.values import TokenLogprobs, TokenProbability, Usage
from inferencecenter.sessions.formats import parts
from inferencecenter.sessions.records import Said
from inferencecenter.sessions.speaking import call_id

if TYPE_CHECKING:
    from inferencecenter.ipc import messages as ipc
    from inferencecenter.protocol.base import SessionEvent, TurnEvent
    from inferencecenter.sessions.audience import Audience
    from inferencecenter.sessions.client import EventSink
    from inferencecenter.sessions.formats.parts import Part
    from inferencecenter.sessions.journal import Journal
    from inferencecenter.sessions.records import Record
    from inferencecenter.sessions.replay import Numbered
    from inferencecenter.sessions.shift import Shift
    from inferencecenter.sessions.speaking import Utterance
    from inferencecenter.sessions.turn import Outcome, Turn


class EventStream:
    """Builds a session's events, numbers them from 1 also while nobody listens, and has them written down and sent.

    An event is numbered when it is built, and told before the next one is built.

    Args:
        session_id: The session.
        journal: Where it is written down.
        audience: Who hears of it.
        seq: Number of the last event of an earlier daemon.
    """

    def __init__(self, session_id: str, *, journal: Journal, audience: Audience, seq: int = 0) -> None:
        self.seq = seq
        self._session_id = session_id
        self._journal = journal
        self._audience = audience

    # What there is to tell.

    def queued(self, turn: Turn, *, eta_ms: float | None, request_id: str | None = None) -> events.Queued:
        """Acknowledge a turn, or say that its place has changed."""
        return events.Queued(
            id=request_id,
            session_id=self._session_id,
            seq=self._next(),
            turn_id=turn.turn_id,
            position=turn.position,
            eta_ms=eta_ms,
        )

    def progress(self, event: ipc.PrefillProgress) -> events.Progress:
        """Say how much of the prompt has been read."""
        return events.Progress(
            session_id=self._session_id,
            seq=self._next(),
            turn_id=event.turn_id,
            done=event.done,
            total=event.total,
        )

    def context_shifted(self, turn: Turn, shift: Shift) -> events.ContextShifted:
        """Say that the oldest turns are no longer read."""
        return events.ContextShifted(
            session_id=self._session_id,
            seq=self._next(),
            turn_id=turn.turn_id,
            dropped_turns=shift.dropped_turns,
            tokens=shift.dropped_tokens,
        )

    def end(self, turn: Turn, outcome: Outcome) -> events.End:
        """Say that a turn is over."""
        stats = outcome.stats
        return events.End.model_validate(
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
                    reasoning_tokens=turn.reasoning_tokens,
                ),
                "stats": stats,
            }
        )

    def failed(self, turn: Turn, failure: ipc.Failed) -> events.Error:
        """Say that a turn could not run or go on."""
        code = ErrorCode(failure.code) if failure.code in ERRORS else ErrorCode.INTERNAL
        return events.Error(
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

    def appended(self, n_messages: int, *, request_id: str | None) -> events.Appended:
        """Answer ``append``."""
        return events.Appended(id=request_id, session_id=self._session_id, seq=self._next(), messages=n_messages)

    def rewound(self, turn: str, n_messages: int, *, request_id: str | None) -> events.SessionRewound:
        """Answer ``rewind_session``."""
        return events.SessionRewound(
            id=request_id, session_id=self._session_id, seq=self._next(), turn=turn, messages=n_messages
        )

    def expired(self) -> events.SessionExpired:
        """Say that the session is gone because nobody used it."""
        return events.SessionExpired(session_id=self._session_id, seq=self._next())

    # How it is told.

    def write(self, record: Record) -> None:
        """Have a record written before anything that is told from now on."""
        self._journal.write(record, flush=type(record) is not Said)

    def tell(self, event: Numbered, record: Record) -> None:
        """Send the event that was built last once ``record``, which has its number, is written."""
        self.write(record)
        self._audience.tell(event)

    def mention(self, event: TurnEvent) -> None:
        """Send the event that was built last, of which only the number is written down."""
        self.tell(event, Said(session_id=self._session_id, seq=event.seq, turn_id=event.turn_id, tokens=b"", text=""))

    def say(self, event: ipc.TokenDelta) -> None:
        """Pass on new text; tokens that show none are only written down.

        Not validated, since this is where the time goes.
        """
        shown = bool(event.text or event.logprobs)
        seq = self._next() if shown else self.seq
        said = Said(session_id=self._session_id, seq=seq, turn_id=event.turn_id, tokens=event.tokens, text=event.text)
        if not shown:
            self.write(said)
            return
        token = events.Token.model_construct(
            op="token",
            id=None,
            session_id=self._session_id,
            seq=seq,
            turn_id=event.turn_id,
            content=event.text,
            logprobs=tuple(_logprobs(entry) for entry in event.logprobs) or None,
        )
        self.tell(token, said)

    def speak(self, event: ipc.TokenDelta, utterance: Utterance) -> None:
        """Pass on what new text consists of; text that shows nothing yet is only written down."""
        told = [self._spoken(event.turn_id, part) for part in utterance.parts]
        if told and utterance.logprobs:
            told[0] = told[0].model_copy(update={"logprobs": tuple(map(_logprobs, utterance.logprobs))})
        self.write(
            Said(
                session_id=self._session_id,
                seq=self.seq,
                turn_id=event.turn_id,
                tokens=event.tokens,
                text=event.text,
                parts=utterance.parts,
            )
        )
        for spoken in told:
            self._audience.tell(spoken)

    def answer(self, event: SessionEvent, record: Record, sink: EventSink) -> None:
        """Send the event that was built last to whoever asked for it; see ``tell``."""
        self.write(record)
        self._audience.answer(event, sink)

    def again(self, event: events.End, *, request_id: str | None) -> None:
        """Repeat the end of a turn, with the number it had."""
        self._audience.send(event.model_copy(update={"id": request_id}))

    def _spoken(self, turn_id: str, part: Part) -> events.Token | events.Reasoning | events.ToolCall:
        told: dict[str, Any] = {
            "id": None,
            "session_id": self._session_id,
            "seq": self._next(),
            "turn_id": turn_id,
            "logprobs": None,
        }
        match part:
            case parts.Said(text):
                return events.Token.model_construct(op="token", content=text, **told)
            case parts.Thought(text):
                return events.Reasoning.model_construct(op="reasoning", content=text, **told)
            case parts.Called(index, name):
                told |= {"index": index, "name": name, "arguments": ""}
            case parts.Argued(index, text):
                told |= {"index": index, "name": None, "arguments": text}
        return events.ToolCall.model_construct(op="tool_call", call_id=call_id(turn_id, part.index), **told)

    def _next(self) -> int:
        self.seq += 1
        return self.seq


def _logprobs(entry: ipc.SampledLogprobs) -> TokenLogprobs:
    sampled = entry.sampled
    return TokenLogprobs(
        token=sampled.token,
        token_id=sampled.token_id,
        logprob=sampled.logprob,
        top=tuple(TokenProbability(token=top.token, token_id=top.token_id, logprob=top.logprob) for top in entry.top),
    )

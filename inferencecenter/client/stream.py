"""One turn as an unbroken stream of events over any number of connections. No I/O.

The invariant: the text yielded so far is a prefix of the answer, because the daemon commits text before it sends it. So
after a reconnect the daemon either replays the missed events or sends the answer so far, of which only the remainder
beyond that prefix is yielded.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Final, TypeAlias

from inferencecenter.client.answer import Answer
from inferencecenter.client.errors import as_exception, failure
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.events import (
    ContextShifted,
    End,
    Error,
    Progress,
    Queued,
    Reasoning,
    SessionResumed,
    Token,
    ToolCall,
)
from inferencecenter.protocol.values import TurnStats

if TYPE_CHECKING:
    from collections.abc import Iterator

    from inferencecenter.protocol.base import Event
    from inferencecenter.protocol.values import TranscriptTurn

TurnStreamEvent: TypeAlias = Queued | Progress | ContextShifted | Token | Reasoning | ToolCall | End

# A daemon that has just restarted may refuse a repeated turn in these cases.
_PASSING: Final = frozenset({ErrorCode.MODEL_LOADING, ErrorCode.ENGINE_UNAVAILABLE})
_NO_TIMES: Final = "The turn ended while the connection was lost: its times are not known."


class StreamState(Enum):
    """State of a turn as its client knows it."""

    ASKING = auto()
    """Sent, or about to be; the daemon has not yet assigned the turn's id."""
    RUNNING = auto()
    """The daemon has assigned the turn's id."""
    ENDING = auto()
    """The text is complete; the end of the turn is still unknown."""
    OVER = auto()


class TurnStream:
    """Filters a session's events into the events of one turn, each once and in order.

    While ``due`` is set, the owner sends ``infer`` with the turn's key and reports the request id with ``asked``.

    Attributes:
        due: Whether ``infer`` has to be sent (again).
        refusal: The temporary refusal of the last ``infer``; ``None`` if there was none.
    """

    def __init__(self, session_id: str) -> None:
        self.due = True
        self.refusal: InferenceCenterError | None = None
        self._session_id = session_id
        self._asks = True
        self._interrupted = False
        self._state = StreamState.ASKING
        self._request_id: str | None = None
        self._turn_id: str | None = None
        self._shown = Answer()
        # While asking: events that may turn out to belong to the turn.
        self._snapshot: SessionResumed | None = None
        self._early: list[TurnStreamEvent] = []

    @classmethod
    def following(cls, session_id: str, turn_id: str) -> TurnStream:
        """Return the stream of a turn that another connection started, to be begun with ``session_resumed``."""
        stream = cls(session_id)
        stream.due, stream._asks = False, False
        stream._state, stream._turn_id = StreamState.RUNNING, turn_id
        return stream

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._turn_id}, {self._state.name}, due={self.due})"

    @property
    def state(self) -> StreamState:
        """State of the turn."""
        return self._state

    @property
    def over(self) -> bool:
        """Whether the turn's last event was yielded."""
        return self._state is StreamState.OVER

    @property
    def turn_id(self) -> str | None:
        """Id of the turn, once the daemon has assigned it."""
        return self._turn_id

    def asked(self, request_id: str) -> None:
        """Record the request id of ``infer``; replies to earlier ids are ignored from now on."""
        self.due, self.refusal = False, None
        self._request_id = request_id

    def take(self, event: Event) -> Iterator[TurnStreamEvent]:
        """Yield the turn's events that follow from an event of the session: none, the event itself, or several.

        Raises:
            InferenceCenterError: The turn failed, was refused, or is lost.
        """
        match event:
            case SessionResumed():
                yield from self._resume(event)
            case Error():
                self._fail(event)
            case Queued() | Progress() | ContextShifted() | Token() | Reasoning() | ToolCall() | End():
                yield from self._take(event)

    def _take(self, event: TurnStreamEvent) -> Iterator[TurnStreamEvent]:
        answers = event.id is not None and event.id == self._request_id
        if self._state is StreamState.RUNNING and event.turn_id == self._turn_id:
            yield from self._give(event)
        elif self._state is StreamState.ASKING:
            if answers:
                yield from self._acknowledge(event)
            elif self._interrupted:
                self._early.append(event)
        elif self._state is StreamState.ENDING and answers:
            if not isinstance(event, End):
                raise self._lost("the daemon does not know it any more")
            yield from self._give(event)

    def _give(self, event: TurnStreamEvent) -> Iterator[TurnStreamEvent]:
        self._shown.take(event)
        if isinstance(event, End):
            self._state = StreamState.OVER
        yield event

    def _acknowledge(self, event: TurnStreamEvent) -> Iterator[TurnStreamEvent]:
        """Start with the turn that the daemon names and with its events that have already arrived."""
        snapshot, early = self._snapshot, [early for early in self._early if early.turn_id == event.turn_id]
        self._snapshot, self._early = None, []
        self._state, self._turn_id, self.due = StreamState.RUNNING, event.turn_id, False
        if snapshot is not None and snapshot.turn_id == event.turn_id:
            yield from self._catch_up(_so_far(snapshot), seq=snapshot.seq)
        elif snapshot is not None and (ended := _ended(snapshot, event.turn_id)) is not None:
            yield from self._finish_text(snapshot, ended)
        for known in (*early, event):
            if not self.over:
                yield from self._give(known)

    def _resume(self, resumed: SessionResumed) -> Iterator[TurnStreamEvent]:
        """Continue after a reconnect: requests may not have arrived, and events may have been missed."""
        self._interrupted = True
        if self._state is StreamState.RUNNING:
            if not resumed.resumed:
                yield from self._resume_without_events(resumed)
            return
        self.due = not self.over
        if not resumed.resumed:
            self._snapshot, self._early = resumed, []

    def _resume_without_events(self, resumed: SessionResumed) -> Iterator[TurnStreamEvent]:
        assert self._turn_id is not None, "a running turn has an id"
        if resumed.turn_id == self._turn_id:
            yield from self._catch_up(_so_far(resumed), seq=resumed.seq)
            return
        ended = _ended(resumed, self._turn_id)
        if ended is None:
            raise self._lost("it failed, or was rewound, while the connection was lost")
        yield from self._finish_text(resumed, ended)
        if self._asks:
            self._state, self.due = StreamState.ENDING, True
        else:
            yield from self._give(_end_of(resumed, ended))

    def _catch_up(self, answer: Answer, *, seq: int) -> Iterator[TurnStreamEvent]:
        """Yield the part of the turn's answer that has not been yielded yet."""
        turn_id = str(self._turn_id)
        try:
            missing = tuple(self._shown.missing(answer, session_id=self._session_id, turn_id=turn_id, seq=max(seq, 1)))
        except ValueError:
            self._state = StreamState.OVER
            raise failure(
                ErrorCode.INTERNAL, f"the text received of turn {turn_id} is not a prefix of its answer"
            ) from None
        for event in missing:
            yield from self._give(event)

    def _finish_text(self, resumed: SessionResumed, ended: TranscriptTurn) -> Iterator[TurnStreamEvent]:
        """Yield the remaining answer of a turn that has ended."""
        answer = _answer(resumed, ended)
        if answer is not None:
            yield from self._catch_up(answer, seq=resumed.seq)

    def _fail(self, event: Error) -> None:
        failed = self._turn_id is not None and event.turn_id == self._turn_id
        refused = event.id is not None and event.id == self._request_id and self._state is not StreamState.RUNNING
        if not (failed or refused):
            return
        error = as_exception(event)
        if refused and event.turn_id is None and error.code in _PASSING and self._interrupted:
            self.due, self.refusal = True, error
            return
        self._state = StreamState.OVER
        raise error

    def _lost(self, why: str) -> InferenceCenterError:
        self._state = StreamState.OVER
        return failure(ErrorCode.TURN_NOT_FOUND, f"the rest of turn {self._turn_id} is lost: {why}", hint="Ask again.")


def _ended(resumed: SessionResumed, turn_id: str) -> TranscriptTurn | None:
    """Return the transcript's record of a turn, if it has ended and is part of the transcript."""
    return next((turn for turn in resumed.turns or () if turn.turn_id == turn_id), None)


def _so_far(resumed: SessionResumed) -> Answer:
    """Return the running turn's answer so far."""
    return Answer.of(resumed.content or "", resumed.reasoning, resumed.tool_calls)


def _answer(resumed: SessionResumed, ended: TranscriptTurn) -> Answer | None:
    """Return a turn's answer, ``None`` when the turn was discarded and left no messages."""
    turns = resumed.turns or ()
    before = max((turn.messages for turn in turns[: turns.index(ended)]), default=0)
    transcript = resumed.transcript or ()
    if not before < ended.messages <= len(transcript):
        return None
    last = transcript[ended.messages - 1]
    return Answer.of(last.content, last.reasoning, last.tool_calls) if last.role == "assistant" else None


def _end_of(resumed: SessionResumed, ended: TranscriptTurn) -> End:
    """Return the ``end`` of a turn as far as the transcript records it."""
    usage = ended.usage
    stats = TurnStats(
        ttft_ms=0.0,
        total_ms=0.0,
        tokens=usage.completion_tokens,
        tps=0.0,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        queue_ms=0.0,
        preempted=0,
    )
    return End.model_validate(
        {
            "session_id": resumed.session_id,
            "seq": max(resumed.seq, 1),
            "turn_id": ended.turn_id,
            "finish_reason": ended.finish_reason,
            "warnings": (_NO_TIMES,),
            "usage": usage,
            "stats": stats,
        }
    )

"""State of one turn: its answer, and a continuous stream of its events over any number of connections. No I/O.

Invariant: the text yielded so far is a prefix of the answer, because the daemon commits text before it sends it. After
a reconnect the daemon either replays the missed events or sends the answer so far, of which only the part after that
prefix is yielded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Final, TypeAlias

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
)
from inferencecenter.protocol.events import ToolCall as ToolCallEvent
from inferencecenter.protocol.values import ChatMessage, ToolCall, TurnStats

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from inferencecenter.protocol.base import Event
    from inferencecenter.protocol.values import FinishReason, TranscriptTurn, Usage

TurnStreamEvent: TypeAlias = Queued | Progress | ContextShifted | Token | Reasoning | ToolCallEvent | End

# A daemon that has just restarted may refuse a repeated turn in these cases.
_PASSING: Final = frozenset({ErrorCode.MODEL_LOADING, ErrorCode.ENGINE_UNAVAILABLE})
_NO_TIMES: Final = "The turn ended while the connection was lost: its timings are unknown."


@dataclass(slots=True)
class Answer:
    """The answer received so far; ``end`` is set once it is complete."""

    end: End | None = None
    _content: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)
    _calls: list[_Call] = field(default_factory=list)

    @classmethod
    def of(cls, content: str, reasoning: str | None = None, tool_calls: Sequence[ToolCall] | None = None) -> Answer:
        calls = [_Call(call.call_id, call.name, [call.arguments]) for call in tool_calls or ()]
        return cls(_content=[content], _reasoning=[reasoning or ""], _calls=calls)

    def __str__(self) -> str:
        return self.content

    @property
    def has_begun(self) -> bool:
        """Whether any text, reasoning or tool call has arrived."""
        return bool(self._content or self._reasoning or self._calls)

    @property
    def content(self) -> str:
        """The text."""
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        """The reasoning that precedes the text."""
        return "".join(self._reasoning)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The requested tool calls; the last one's arguments are complete only if the turn ended with ``tool_calls``.

        Use ``result`` to send back what a tool returned.
        """
        return tuple(
            ToolCall(call_id=call.call_id, name=call.name, arguments="".join(call.arguments)) for call in self._calls
        )

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the turn ended; ``None`` while it runs."""
        return None if self.end is None else self.end.finish_reason

    @property
    def stats(self) -> TurnStats | None:
        """Timings and rates of the turn; ``None`` while it runs."""
        return None if self.end is None else self.end.stats

    @property
    def usage(self) -> Usage | None:
        """Token counts of the turn; ``None`` while it runs."""
        return None if self.end is None else self.end.usage

    @property
    def warnings(self) -> tuple[str, ...]:
        """Valid parameters that had no effect."""
        return () if self.end is None else self.end.warnings

    def apply(self, event: Event) -> None:
        """Apply an event of the turn."""
        match event:
            case Token(content=content):
                self._content.append(content)
            case Reasoning(content=content):
                self._reasoning.append(content)
            case ToolCallEvent(name=str(name)):
                self._calls.append(_Call(event.call_id, name, [event.arguments]))
            case ToolCallEvent(index=index) if index < len(self._calls):
                self._calls[index].arguments.append(event.arguments)
            case End():
                self.end = event

    def missing(
        self, whole: Answer, *, session_id: str, turn_id: str, seq: int
    ) -> Iterator[Token | Reasoning | ToolCallEvent]:
        """Yield, as events, the part of ``whole`` that this answer lacks.

        Raises:
            ValueError: This answer is not a prefix of ``whole``.
        """
        head = {"session_id": session_id, "turn_id": turn_id, "seq": seq}
        if reasoning := _rest(self.reasoning, whole.reasoning):
            yield Reasoning.model_validate({**head, "content": reasoning})
        if content := _rest(self.content, whole.content):
            yield Token.model_validate({**head, "content": content})
        known = self.tool_calls
        for index, call in enumerate(whole.tool_calls):
            name = None if index < len(known) else call.name
            rest = call.arguments if name is not None else _rest(known[index].arguments, call.arguments)
            if rest or name is not None:
                yield ToolCallEvent.model_validate(
                    {**head, "index": index, "call_id": call.call_id, "name": name, "arguments": rest}
                )


class AnswerProperties:
    """Properties of a turn that are read from its answer.

    Attributes:
        answer: The answer received so far.
    """

    answer: Answer

    @property
    def content(self) -> str:
        """The text received so far."""
        return self.answer.content

    @property
    def reasoning(self) -> str:
        """The reasoning that precedes the text."""
        return self.answer.reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The requested tool calls; see ``Answer.tool_calls``."""
        return self.answer.tool_calls

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the turn ended; ``None`` while it runs."""
        return self.answer.finish_reason

    @property
    def stats(self) -> TurnStats | None:
        """Timings and rates of the turn; ``None`` while it runs."""
        return self.answer.stats

    @property
    def usage(self) -> Usage | None:
        """Token counts of the turn; ``None`` while it runs."""
        return self.answer.usage


@dataclass(slots=True)
class _Call:
    call_id: str
    name: str
    arguments: list[str]


def result(call: ToolCall, content: str) -> ChatMessage:
    """Return the message that carries a tool's result."""
    return ChatMessage(role="tool", content=content, tool_call_id=call.call_id)


def _rest(begins: str, whole: str) -> str:
    if not whole.startswith(begins):
        raise ValueError("another answer")
    return whole[len(begins) :]


class StreamState(Enum):
    """Client-side state of a turn."""

    REQUESTED = auto()
    """The request is sent, or will be; the daemon has not assigned the id of the turn yet."""
    RUNNING = auto()
    """The daemon has assigned the turn's id."""
    ENDING = auto()
    """The text is complete; the end of the turn is still unknown."""
    OVER = auto()


class TurnStream:
    """Filters a session's events into the events of one turn, each once and in order.

    While ``must_send`` is set, the owner sends ``infer`` with the turn's key, and passes its id to ``requested``.

    Attributes:
        must_send: Whether ``infer`` has to be sent (again).
        refusal: The temporary refusal of the last ``infer``; ``None`` if there was none.
    """

    def __init__(self, session_id: str) -> None:
        self.must_send = True
        self.refusal: InferenceCenterError | None = None
        self._session_id = session_id
        self._is_repeatable = True
        self._interrupted = False
        self._state = StreamState.REQUESTED
        self._request_id: str | None = None
        self._turn_id: str | None = None
        self._yielded = Answer()
        # Events that arrived before the acknowledgment and may belong to the turn.
        self._snapshot: SessionResumed | None = None
        self._early: list[TurnStreamEvent] = []

    @classmethod
    def following(cls, session_id: str, turn_id: str) -> TurnStream:
        """Return the stream of a turn that another connection started; its first event is ``session_resumed``."""
        stream = cls(session_id)
        stream.must_send, stream._is_repeatable = False, False
        stream._state, stream._turn_id = StreamState.RUNNING, turn_id
        return stream

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._turn_id}, {self._state.name}, must_send={self.must_send})"

    @property
    def state(self) -> StreamState:
        return self._state

    @property
    def is_over(self) -> bool:
        """Whether the turn's last event was yielded."""
        return self._state is StreamState.OVER

    @property
    def turn_id(self) -> str | None:
        """Id of the turn, once the daemon has assigned it."""
        return self._turn_id

    def requested(self, request_id: str) -> None:
        """Record the request id of ``infer``; replies to earlier ids are ignored from now on."""
        self.must_send, self.refusal = False, None
        self._request_id = request_id

    def apply(self, event: Event) -> Iterator[TurnStreamEvent]:
        """Yield the turn's events that follow from an event of the session: none, the event itself, or several.

        Raises:
            InferenceCenterError: The turn failed, was refused, or is lost.
        """
        match event:
            case SessionResumed():
                yield from self._resume(event)
            case Error():
                self._fail(event)
            case Queued() | Progress() | ContextShifted() | Token() | Reasoning() | ToolCallEvent() | End():
                yield from self._take(event)

    def _take(self, event: TurnStreamEvent) -> Iterator[TurnStreamEvent]:
        answers = event.id is not None and event.id == self._request_id
        if self._state is StreamState.RUNNING and event.turn_id == self._turn_id:
            yield from self._deliver(event)
        elif self._state is StreamState.REQUESTED:
            if answers:
                yield from self._acknowledge(event)
            elif self._interrupted:
                self._early.append(event)
        elif self._state is StreamState.ENDING and answers:
            if not isinstance(event, End):
                raise self._lost("the daemon no longer has it")
            yield from self._deliver(event)

    def _deliver(self, event: TurnStreamEvent) -> Iterator[TurnStreamEvent]:
        self._yielded.apply(event)
        if isinstance(event, End):
            self._state = StreamState.OVER
        yield event

    def _acknowledge(self, event: TurnStreamEvent) -> Iterator[TurnStreamEvent]:
        """Adopt the turn that the daemon names, and yield its events that have already arrived."""
        snapshot, early = self._snapshot, [early for early in self._early if early.turn_id == event.turn_id]
        self._snapshot, self._early = None, []
        self._state, self._turn_id, self.must_send = StreamState.RUNNING, event.turn_id, False
        if snapshot is not None and snapshot.turn_id == event.turn_id:
            yield from self._catch_up(_so_far(snapshot), seq=snapshot.seq)
        elif snapshot is not None and (ended := _ended(snapshot, event.turn_id)) is not None:
            yield from self._finish_text(snapshot, ended)
        for known in (*early, event):
            if not self.is_over:
                yield from self._deliver(known)

    def _resume(self, resumed: SessionResumed) -> Iterator[TurnStreamEvent]:
        """Continue after a reconnect, before which the request or events may have been lost."""
        self._interrupted = True
        if self._state is StreamState.RUNNING:
            if not resumed.resumed:
                yield from self._resume_without_events(resumed)
            return
        self.must_send = not self.is_over
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
        if self._is_repeatable:
            self._state, self.must_send = StreamState.ENDING, True
        else:
            yield from self._deliver(_end_of(resumed, ended))

    def _catch_up(self, answer: Answer, *, seq: int) -> Iterator[TurnStreamEvent]:
        """Yield the part of the turn's answer that has not been yielded yet."""
        turn_id = str(self._turn_id)
        try:
            missing = tuple(
                self._yielded.missing(answer, session_id=self._session_id, turn_id=turn_id, seq=max(seq, 1))
            )
        except ValueError:
            self._state = StreamState.OVER
            raise failure(
                ErrorCode.INTERNAL, f"the text received of turn {turn_id} is not a prefix of its answer"
            ) from None
        for event in missing:
            yield from self._deliver(event)

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
            self.must_send, self.refusal = True, error
            return
        self._state = StreamState.OVER
        raise error

    def _lost(self, why: str) -> InferenceCenterError:
        self._state = StreamState.OVER
        return failure(ErrorCode.TURN_NOT_FOUND, f"the rest of turn {self._turn_id} is lost: {why}", hint="Ask again.")


def _ended(resumed: SessionResumed, turn_id: str) -> TranscriptTurn | None:
    """Return the transcript's record of a turn; ``None`` if it has not ended, or the transcript no longer has it."""
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
    """Return the ``end`` of a turn, reconstructed from the transcript's record."""
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

"""A session's numbered events: written down, published to one subscriber, and replayed after a reconnect."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import structlog

from inferencecenter.core.errors import ERRORS, ErrorCode
from inferencecenter.protocol import events
from inferencecenter.protocol.codec import encode
from inferencecenter.protocol.events import Reasoning, Token, ToolCall, goes_on, text_of, with_text
from inferencecenter.protocol.values import TokenLogprobs, TokenProbability, Usage
from inferencecenter.sessions.journal import TokensAppended
from inferencecenter.sessions.output_parsing import parts
from inferencecenter.sessions.output_parsing.assembler import call_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from inferencecenter.ipc import messages as ipc
    from inferencecenter.protocol.base import Event, SessionEvent, TurnEvent
    from inferencecenter.protocol.events import Error, Text
    from inferencecenter.protocol.requests import ResumeSession
    from inferencecenter.sessions.client import EventSink, ReplaySink
    from inferencecenter.sessions.journal import Journal, Record
    from inferencecenter.sessions.output_parsing.assembler import OutputDelta
    from inferencecenter.sessions.output_parsing.parts import Part
    from inferencecenter.sessions.prompt.plan import ContextShift
    from inferencecenter.sessions.session import LiveSession
    from inferencecenter.sessions.session_config import ScheduledCall
    from inferencecenter.sessions.turn import Turn, TurnOutcome


NumberedEvent: TypeAlias = "SessionEvent | Error"
"""An event with a number; an error has one when it ends a turn."""
MAX_JOINED_BYTES: Final = 64 * 1024
"""Of token text in one event: below what WebSocket clients accept by default (1 MiB), with room for JSON around it."""
_TOKEN_BYTES: Final = 64

_log = structlog.get_logger(__name__)
_LOGPROB_BYTES: Final = 64


class _Run:
    """Pieces of one text whose numbers follow each other; kept as text, since there are many."""

    __slots__ = ("contents", "first", "first_seq", "logprobs", "plain_turn")

    def __init__(self, event: Text) -> None:
        self.first = event
        self.plain_turn = event.turn_id if type(event) is Token else None
        self.first_seq = event.seq
        self.contents: deque[str] = deque()
        self.logprobs: deque[tuple[TokenLogprobs, ...] | None] | None = None if event.logprobs is None else deque()

    def takes(self, event: Text) -> bool:
        # By far most are tokens, so these are quick.
        is_plain = self.plain_turn is not None and type(event) is Token
        return (
            (event.turn_id == self.plain_turn if is_plain else goes_on(self.first, event))
            and event.seq == self.first_seq + len(self.contents)
            and (event.logprobs is None) == (self.logprobs is None)
        )

    def add(self, event: Text, text: str) -> None:
        self.contents.append(text)
        if self.logprobs is not None:
            self.logprobs.append(event.logprobs)

    def drop_first(self) -> int:
        """Forget the first token and return what it took."""
        self.first_seq += 1
        content = self.contents.popleft()
        return _token_bytes(content, self.logprobs.popleft() if self.logprobs is not None else None)

    def after(self, last_seq: int) -> Iterator[Text]:
        """Yield what came after ``last_seq``, joined as far as one event should hold."""
        parts: list[str] = []
        logprobs: list[TokenLogprobs] = []
        size = 0
        for index in range(max(0, last_seq + 1 - self.first_seq), len(self.contents)):
            entry = self.logprobs[index] if self.logprobs is not None else None
            parts.append(self.contents[index])
            logprobs.extend(entry or ())
            size += _token_bytes(self.contents[index], entry)
            if size >= MAX_JOINED_BYTES:
                yield self._joined(index, parts, logprobs)
                parts, logprobs, size = [], [], 0
        if parts:
            yield self._joined(len(self.contents) - 1, parts, logprobs)

    def _joined(self, index: int, parts: list[str], logprobs: list[TokenLogprobs]) -> Text:
        return with_text(self.first, "".join(parts), seq=self.first_seq + index, logprobs=tuple(logprobs) or None)


class ReplayBuffer:
    """Numbered events up to a number of bytes, the oldest are forgotten first.

    Args:
        limit_bytes: What they may take, about.
        seq: Number of the last event that is already lost.
    """

    def __init__(self, limit_bytes: int, *, seq: int = 0) -> None:
        self._limit_bytes = limit_bytes
        self._bytes = 0
        self._entries: deque[_Run | tuple[NumberedEvent, int]] = deque()
        self._lost_seq = seq
        self._last_seq = seq
        self._disabled = False

    def __repr__(self) -> str:
        return f"<Replay {self._lost_seq + 1}..{self._last_seq}, {self._bytes} bytes>"

    @property
    def size_bytes(self) -> int:
        """What is kept takes, about."""
        return self._bytes

    def add(self, event: NumberedEvent) -> None:
        """Keep an event, whose number follows the last one's.

        A number that was given to an event which a defect kept from being told leaves a gap. What came before it is
        forgotten then: clients that come back from there are told how the session stands instead.
        """
        assert event.seq is not None, "what is kept has a number"
        if event.seq != self._last_seq + 1:
            _log.error("event_numbers_have_a_gap", after=self._last_seq, next=event.seq)
            self._forget_all(event.seq - 1)
        self._last_seq = event.seq
        if self._disabled:
            self._lost_seq = event.seq
            return
        if type(event) is Token or isinstance(event, Reasoning | ToolCall):
            self._add_text(event)
        else:
            size = len(encode(event) or "")
            self._entries.append((event, size))
            self._bytes += size
        while self._bytes > self._limit_bytes:
            self._forget_oldest()

    def after(self, last_seq: int) -> list[NumberedEvent] | None:
        """Return all events after ``last_seq``, neighbouring pieces of a text joined; ``None`` if some are lost."""
        if last_seq < self._lost_seq:
            return None
        missing: list[NumberedEvent] = []
        for entry in self._entries:
            if isinstance(entry, _Run):
                missing.extend(entry.after(last_seq))
            elif (entry[0].seq or 0) > last_seq:
                missing.append(entry[0])
        return missing

    def disable(self) -> None:
        """Forget all events, and keep none until ``enable``."""
        self._forget_all(self._last_seq)
        self._disabled = True

    def enable(self) -> None:
        """Keep events again."""
        self._disabled = False

    def _forget_all(self, last_seq: int) -> None:
        self._entries.clear()
        self._bytes = 0
        self._lost_seq = last_seq

    def _add_text(self, event: Text) -> None:
        last = self._entries[-1] if self._entries else None
        if not isinstance(last, _Run) or not last.takes(event):
            last = _Run(event)
            self._entries.append(last)
        text = event.content if type(event) is Token else text_of(event)
        last.add(event, text)
        self._bytes += _token_bytes(text, event.logprobs)

    def _forget_oldest(self) -> None:
        oldest = self._entries[0]
        if isinstance(oldest, _Run):
            self._lost_seq = oldest.first_seq
            self._bytes -= oldest.drop_first()
            if oldest.contents:
                return
        else:
            self._lost_seq = oldest[0].seq or 0
            self._bytes -= oldest[1]
        self._entries.popleft()


def _token_bytes(content: str, logprobs: tuple[TokenLogprobs, ...] | None) -> int:
    """Return about how much memory a token takes, which is more than its text."""
    n_probabilities = sum(1 + len(entry.top) for entry in logprobs or ())
    return _TOKEN_BYTES + len(content.encode()) + n_probabilities * _LOGPROB_BYTES


ReplayLoss: TypeAlias = Literal["no_position", "other_epoch", "unknown_position", "too_old"]
"""Why events cannot be told again."""


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What a client has missed: the events themselves, or the reason why they cannot be told."""

    events: tuple[NumberedEvent, ...] = ()
    reason: ReplayLoss | None = None


class Subscription:
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
        replay: ReplayBuffer,
        sink: EventSink | None,
        moved: Callable[[str, EventSink | None, EventSink | None], None],
    ) -> None:
        self._session_id = session_id
        self._journal = journal
        self._replay = replay
        self._sink = sink
        self._moved = moved
        self._generation = 0
        self._replay_timer: ScheduledCall | None = None

    @property
    def sink(self) -> EventSink | None:
        """Who listens."""
        return self._sink

    def publish(self, event: NumberedEvent) -> None:
        """Keep an event, and send it to whoever listens."""
        self._replay.add(event)
        self.send(event)

    def reply(self, event: NumberedEvent, sink: EventSink) -> None:
        """Keep an event, and send it to whoever asked for it; others find it when they come back."""
        if sink is self._sink:
            self.publish(event)
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
        self.keep_replay()
        self._replay.enable()
        before, self._sink = self._sink, sink
        self._moved(self._session_id, before, sink)
        if before is not None and before is not sink:
            gone = events.SessionDetached(session_id=self._session_id, reason="resumed_elsewhere")
            self._journal.release(lambda: before.send(gone))

    def detach(self) -> None:
        """Send events to nobody."""
        before, self._sink = self._sink, None
        self._moved(self._session_id, before, None)

    def missed(self, request: ResumeSession, *, epoch: str, seq: int) -> ReplayResult:
        """Return what a client has missed whose position is that of ``request``, the session's being the others."""
        if request.epoch is None:
            return ReplayResult(reason="no_position")
        if request.epoch != epoch:
            return ReplayResult(reason="other_epoch")
        if request.last_seq > seq:
            return ReplayResult(reason="unknown_position")
        missing = self._replay.after(request.last_seq)
        return ReplayResult(reason="too_old") if missing is None else ReplayResult(tuple(missing))

    def resume(self, sink: ReplaySink, answer: events.SessionResumed, missing: tuple[NumberedEvent, ...]) -> None:
        """Send events to ``sink`` from now on, ``answer`` and the ``missing`` ones first."""
        self._generation += 1
        self.attach(sink)
        generation = self._generation

        def deliver() -> None:
            if generation == self._generation:
                sink.replay((answer, *missing))

        self._journal.release(deliver)

    def disable_replay_later(
        self, delay_s: float, call_later: Callable[[float, Callable[[], None]], ScheduledCall]
    ) -> None:
        """Keep no events from ``delay_s`` on, unless somebody comes or ``rest`` is called before."""
        self.keep_replay()
        self._replay_timer = call_later(delay_s, self._disable_replay)

    def keep_replay(self) -> None:
        """Go on as now: nothing has to be forgotten later."""
        if self._replay_timer is not None:
            self._replay_timer.cancel()
            self._replay_timer = None

    def _disable_replay(self) -> None:
        self._replay_timer = None
        self._replay.disable()


class EventLog:
    """Builds a session's events, numbers them from 1 also while nobody listens, and has them written down and sent.

    An event is numbered when it is built, and told before the next one is built.

    Args:
        session_id: The session.
        journal: Where it is written down.
        subscription: Who hears of it.
        seq: Number of the last event of an earlier daemon.
    """

    def __init__(self, session_id: str, *, journal: Journal, subscription: Subscription, seq: int = 0) -> None:
        self.seq = seq
        self._session_id = session_id
        self._journal = journal
        self._subscription = subscription

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

    def context_shifted(self, turn: Turn, shift: ContextShift) -> events.ContextShifted:
        """Say that the oldest turns are no longer read."""
        return events.ContextShifted(
            session_id=self._session_id,
            seq=self._next(),
            turn_id=turn.turn_id,
            dropped_turns=shift.dropped_turns,
            tokens=shift.dropped_tokens,
        )

    def end(self, turn: Turn, outcome: TurnOutcome) -> events.End:
        """Say that a turn is over."""
        stats = outcome.stats
        return events.End.model_validate(
            {
                "id": turn.abort_request_id,
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
            id=turn.abort_request_id or turn.request_id,
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
        self._journal.write(record, flush=type(record) is not TokensAppended)

    def publish(self, event: NumberedEvent, record: Record) -> None:
        """Send the event that was built last once ``record``, which has its number, is written."""
        self.write(record)
        self._subscription.publish(event)

    def publish_transient(self, event: TurnEvent) -> None:
        """Send the event that was built last, of which only the number is written down."""
        self.publish(
            event,
            TokensAppended(session_id=self._session_id, seq=event.seq, turn_id=event.turn_id, tokens=b"", text=""),
        )

    def publish_text(self, event: ipc.TokenDelta) -> None:
        """Pass on new text; tokens that show none are only written down.

        Not validated, since this is where the time goes.
        """
        shown = bool(event.text or event.logprobs)
        seq = self._next() if shown else self.seq
        said = TokensAppended(
            session_id=self._session_id, seq=seq, turn_id=event.turn_id, tokens=event.tokens, text=event.text
        )
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
        self.publish(token, said)

    def publish_parts(self, event: ipc.TokenDelta, utterance: OutputDelta) -> None:
        """Pass on what new text consists of; text that shows nothing yet is only written down."""
        told = [self._part_event(event.turn_id, part) for part in utterance.parts]
        if told and utterance.logprobs:
            told[0] = told[0].model_copy(update={"logprobs": tuple(map(_logprobs, utterance.logprobs))})
        self.write(
            TokensAppended(
                session_id=self._session_id,
                seq=self.seq,
                turn_id=event.turn_id,
                tokens=event.tokens,
                text=event.text,
                parts=utterance.parts,
            )
        )
        for spoken in told:
            self._subscription.publish(spoken)

    def reply(self, event: SessionEvent, record: Record, sink: EventSink) -> None:
        """Send the event that was built last to whoever asked for it; see ``tell``."""
        self.write(record)
        self._subscription.reply(event, sink)

    def resend(self, event: events.End, *, request_id: str | None) -> None:
        """Repeat the end of a turn, with the number it had."""
        self._subscription.send(event.model_copy(update={"id": request_id}))

    def _part_event(self, turn_id: str, part: Part) -> events.Token | events.Reasoning | events.ToolCall:
        told: dict[str, Any] = {
            "id": None,
            "session_id": self._session_id,
            "seq": self._next(),
            "turn_id": turn_id,
            "logprobs": None,
        }
        match part:
            case parts.TextDelta(text):
                return events.Token.model_construct(op="token", content=text, **told)
            case parts.ReasoningDelta(text):
                return events.Reasoning.model_construct(op="reasoning", content=text, **told)
            case parts.ToolCallStart(index, name):
                told |= {"index": index, "name": name, "arguments": ""}
            case parts.ArgumentsDelta(index, text):
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


SessionEventHandler: TypeAlias = "Callable[[str, Event, tuple[EventSink | None, ...]], None]"
"""Called with a client, an event, and those of its sinks that know already."""


class SessionNotifier:
    """Tells whoever reads it, once what it says is safe. Of stateless sessions there are none: nobody lists them."""

    def __init__(self) -> None:
        self._readers: list[SessionEventHandler] = []

    def subscribe(self, reader: SessionEventHandler) -> None:
        """Tell ``reader`` from now on."""
        self._readers.append(reader)

    def notify_metadata(self, session: LiveSession, *, by: EventSink | None) -> None:
        """Tell what metadata a session has; ``by`` knows."""
        config = session.config
        self._notify(session, events.MetadataSet(session_id=config.session_id, metadata=config.metadata), by)

    def notify_closed(self, session: LiveSession, *, but: tuple[EventSink | None, ...]) -> None:
        """Tell that a session is no more; those of ``but`` know."""
        self._notify(session, events.SessionClosed(session_id=session.config.session_id), *but)

    def _notify(self, session: LiveSession, event: Event, *knowing: EventSink | None) -> None:
        if session.config.stateless:
            return
        for reader in self._readers:
            session.journal.release(partial(reader, session.config.client_id, event, knowing))

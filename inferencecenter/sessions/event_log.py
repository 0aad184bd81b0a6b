"""A session's numbered events: committed, published to one subscriber, and replayed after a reconnect.

``EventLog`` numbers each event with the session's next ``seq``, writes its journal record, and sends the event to the
socket that subscribes. The journal holds back delivery until the record is committed (commit before publish), so a
client never sees an event that a crash of the process could revoke. The ``ReplayBuffer`` keeps the latest events up to
a limit of bytes; adjacent deltas of one text are stored as runs and replayed joined. A reconnecting client sends its
epoch and the number of its last event: it is replayed exactly the events after it, or receives the reason and the whole
state if the buffer no longer holds them. The epoch names one history of events; it changes after an unclean stop, since
a power loss may have revoked tokens and their numbers are then given to other events. Invariant: within an epoch no
number is used for two events, and a subscriber receives the events in order, each once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import structlog

from inferencecenter.core.errors import ERRORS, ErrorCode
from inferencecenter.protocol import events
from inferencecenter.protocol.events import (
    MAX_JOINED_BYTES,
    Reasoning,
    Token,
    ToolCall,
    continues_text,
    text_of,
    with_text,
)
from inferencecenter.protocol.values import TokenLogprobs, TokenProbability, Usage
from inferencecenter.sessions.journal import TokensAppended
from inferencecenter.sessions.output_parsing import parts
from inferencecenter.sessions.output_parsing.assembler import call_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from inferencecenter.ipc import messages as ipc
    from inferencecenter.mcp.gateway import ToolOutcome
    from inferencecenter.protocol.base import Event, SessionEvent, TurnEvent
    from inferencecenter.protocol.events import Error, Text
    from inferencecenter.protocol.requests import ResumeSession
    from inferencecenter.protocol.values import McpCallStatus
    from inferencecenter.sessions.context import EventSink, ReplaySink, ScheduledCall
    from inferencecenter.sessions.journal import Journal, Record
    from inferencecenter.sessions.output_parsing.assembler import OutputDelta
    from inferencecenter.sessions.output_parsing.parts import Part
    from inferencecenter.sessions.prompt.plan import ContextShift
    from inferencecenter.sessions.session import LiveSession
    from inferencecenter.sessions.turn import Turn, TurnOutcome


NumberedEvent: TypeAlias = "SessionEvent | Error"
"""An event with a number; an error has one if it ends a turn."""
_EVENT_BYTES: Final = 512
"""An event without text; its longest fields are ids and warnings."""
_TOKEN_BYTES: Final = 64
_LOGPROB_BYTES: Final = 64

_log = structlog.get_logger(__name__)


class _Run:
    """Consecutive deltas of one text, stored without their event objects because there are many."""

    __slots__ = ("contents", "first", "first_seq", "logprobs", "plain_turn")

    def __init__(self, event: Text, text: str) -> None:
        self.first = event
        self.plain_turn = event.turn_id if type(event) is Token else None
        self.first_seq = event.seq
        self.contents = deque([text])
        self.logprobs = None if event.logprobs is None else deque([event.logprobs])

    def take(self, event: Text, text: str) -> bool:
        """Append the ``text`` of an event; return ``False`` if the event does not continue this run."""
        # Fast path: most deltas are tokens.
        is_plain = self.plain_turn is not None and type(event) is Token
        if (
            not (event.turn_id == self.plain_turn if is_plain else continues_text(self.first, event))
            or event.seq != self.first_seq + len(self.contents)
            or (event.logprobs is None) != (self.logprobs is None)
        ):
            return False
        self.contents.append(text)
        if self.logprobs is not None and event.logprobs is not None:
            self.logprobs.append(event.logprobs)
        return True

    def drop_first(self) -> int:
        self.first_seq += 1
        content = self.contents.popleft()
        return _token_bytes(content, self.logprobs.popleft() if self.logprobs is not None else None)

    def events_after(self, last_seq: int) -> Iterator[Text]:
        """Yield the events after ``last_seq``, joined up to ``MAX_JOINED_BYTES``."""
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
    """Keeps the latest numbered events up to a number of bytes; the oldest are dropped first.

    Args:
        limit_bytes: Approximate limit of their size.
        seq: Number of the last event that is already lost.
    """

    def __init__(self, limit_bytes: int, *, seq: int = 0) -> None:
        self._limit_bytes = limit_bytes
        self._bytes = 0
        self._entries: deque[_Run | NumberedEvent] = deque()
        self._lost_seq = seq
        self._last_seq = seq
        self._disabled = False

    def __repr__(self) -> str:
        return f"<ReplayBuffer {self._lost_seq + 1}..{self._last_seq}, {self._bytes} bytes>"

    @property
    def size_bytes(self) -> int:
        """Approximate size of the buffer in bytes."""
        return self._bytes

    def add(self, event: NumberedEvent) -> None:
        """Append an event; its number follows the last one.

        If an internal error prevented the publication of a numbered event, a gap remains. All events before the gap are
        then dropped, so clients with an older position receive the state of the session instead.
        """
        assert event.seq is not None, "a buffered event has a number"
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
            self._entries.append(event)
            self._bytes += _event_bytes(event)
        while self._bytes > self._limit_bytes:
            self._forget_oldest()

    def events_after(self, last_seq: int) -> list[NumberedEvent] | None:
        """Return all events after ``last_seq``, adjacent deltas of a text joined; ``None`` if some are lost."""
        if last_seq < self._lost_seq:
            return None
        missing: list[NumberedEvent] = []
        for entry in self._entries:
            if isinstance(entry, _Run):
                missing.extend(entry.events_after(last_seq))
            elif (entry.seq or 0) > last_seq:
                missing.append(entry)
        return missing

    def disable(self) -> None:
        """Drop all events, and keep none until ``enable``."""
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
        text = event.content if type(event) is Token else text_of(event)
        last = self._entries[-1] if self._entries else None
        if not isinstance(last, _Run) or not last.take(event, text):
            self._entries.append(_Run(event, text))
        self._bytes += _token_bytes(text, event.logprobs)

    def _forget_oldest(self) -> None:
        oldest = self._entries[0]
        if isinstance(oldest, _Run):
            self._lost_seq = oldest.first_seq
            self._bytes -= oldest.drop_first()
            if oldest.contents:
                return
        else:
            self._lost_seq = oldest.seq or 0
            self._bytes -= _event_bytes(oldest)
        self._entries.popleft()


def _event_bytes(event: NumberedEvent) -> int:
    return _EVENT_BYTES + (len((event.content or "").encode()) if isinstance(event, events.McpCall) else 0)


def _token_bytes(content: str, logprobs: tuple[TokenLogprobs, ...] | None) -> int:
    """Return the approximate memory of a token, which exceeds the size of its text."""
    n_bytes = _TOKEN_BYTES + len(content.encode())
    if logprobs is not None:
        n_bytes += sum(1 + len(entry.top) for entry in logprobs) * _LOGPROB_BYTES
    return n_bytes


ReplayLoss: TypeAlias = Literal["no_position", "other_epoch", "unknown_position", "too_old"]
"""Why events cannot be replayed."""


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The events that a client has missed, or the reason why they cannot be replayed."""

    events: tuple[NumberedEvent, ...] = ()
    reason: ReplayLoss | None = None


class EventLog:
    """Builds a session's events, numbers them from 1, commits them, and delivers them to at most one subscriber.

    Events are numbered and kept for replay also without a subscriber. An event must be published before the next one is
    built. One that is still held back by the journal when a client resumes is delivered to that client only.

    Args:
        session_id: The session.
        journal: Where records are written; it releases deliveries after the commit.
        replay_bytes: Approximate limit of the buffer for replay.
        sink: The initial subscriber.
        on_sink_changed: Called with the session's id, the old and the new subscriber when the subscriber changes.
        seq: Number of the last event of an earlier daemon.
    """

    def __init__(  # noqa: PLR0913 - keyword-only
        self,
        session_id: str,
        *,
        journal: Journal,
        replay_bytes: int,
        sink: EventSink | None,
        on_sink_changed: Callable[[str, EventSink | None, EventSink | None], None],
        seq: int = 0,
    ) -> None:
        self.seq = seq
        self._session_id = session_id
        self._journal = journal
        self._replay = ReplayBuffer(replay_bytes, seq=seq)
        self._sink = sink
        self._on_sink_changed = on_sink_changed
        self._generation = 0
        self._replay_timer: ScheduledCall | None = None

    # The subscriber.

    @property
    def sink(self) -> EventSink | None:
        """The current subscriber."""
        return self._sink

    def attach(self, sink: EventSink) -> None:
        """Make ``sink`` the subscriber; the previous one receives ``session_detached`` after its last event."""
        self.keep_replay()
        self._replay.enable()
        before, self._sink = self._sink, sink
        self._on_sink_changed(self._session_id, before, sink)
        if before is not None and before is not sink:
            gone = events.SessionDetached(session_id=self._session_id, reason="resumed_elsewhere")
            self._journal.release(lambda: before.send(gone))

    def detach(self) -> None:
        """Remove the subscriber."""
        before, self._sink = self._sink, None
        self._on_sink_changed(self._session_id, before, None)

    def missed_events(self, request: ResumeSession, *, epoch: str) -> ReplayResult:
        """Return the events after the position in ``request``; ``epoch`` is that of the session."""
        if request.epoch is None:
            return ReplayResult(reason="no_position")
        if request.epoch != epoch:
            return ReplayResult(reason="other_epoch")
        if request.last_seq > self.seq:
            return ReplayResult(reason="unknown_position")
        missing = self._replay.events_after(request.last_seq)
        return ReplayResult(reason="too_old") if missing is None else ReplayResult(tuple(missing))

    def resume(self, sink: ReplaySink, answer: events.SessionResumed, missing: tuple[NumberedEvent, ...]) -> None:
        """Make ``sink`` the subscriber and send it ``answer`` and the ``missing`` events first."""
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
        """Disable the replay buffer after ``delay_s``, unless a client attaches or ``keep_replay`` is called before."""
        self.keep_replay()
        self._replay_timer = call_later(delay_s, self._disable_replay)

    def keep_replay(self) -> None:
        """Cancel ``disable_replay_later``."""
        if self._replay_timer is not None:
            self._replay_timer.cancel()
            self._replay_timer = None

    # Building events; each takes the next number.

    def queued(self, turn: Turn, *, eta_ms: float | None, request_id: str | None = None) -> events.Queued:
        """Return the acknowledgment of a turn, or its changed position."""
        return events.Queued(
            id=request_id,
            session_id=self._session_id,
            seq=self._next(),
            turn_id=turn.turn_id,
            position=turn.position,
            eta_ms=eta_ms,
        )

    def progress(self, event: ipc.PrefillProgress) -> events.Progress:
        return events.Progress(
            session_id=self._session_id,
            seq=self._next(),
            turn_id=event.turn_id,
            done=event.done,
            total=event.total,
        )

    def context_shifted(self, turn: Turn, shift: ContextShift) -> events.ContextShifted:
        """Return the event that the oldest turns were dropped from the context."""
        return events.ContextShifted(
            session_id=self._session_id,
            seq=self._next(),
            turn_id=turn.turn_id,
            dropped_turns=shift.dropped_turns,
            tokens=shift.dropped_tokens,
        )

    def end(self, turn: Turn, outcome: TurnOutcome) -> events.End:
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
        return events.Appended(id=request_id, session_id=self._session_id, seq=self._next(), messages=n_messages)

    def rewound(self, turn: str, n_messages: int, *, request_id: str | None) -> events.SessionRewound:
        """Return the reply to ``rewind_session``."""
        return events.SessionRewound(
            id=request_id, session_id=self._session_id, seq=self._next(), turn=turn, messages=n_messages
        )

    def mcp_call(
        self,
        status: McpCallStatus,
        *,
        outcome: ToolOutcome | None,
        request_id: str | None = None,
    ) -> events.McpCall:
        """Return the event that a tool call runs, or has ended with ``outcome``."""
        is_done = outcome is not None and outcome.state == "done"
        return events.McpCall(
            id=request_id,
            session_id=self._session_id,
            seq=self._next(),
            call_id=status.call_id,
            server=status.server,
            tool=status.tool,
            call_state="running" if outcome is None else outcome.state,
            content=outcome.text if outcome is not None and is_done else None,
            is_error=outcome.is_error if outcome is not None and is_done else None,
            detail="" if outcome is None else outcome.detail,
        )

    def expired(self) -> events.SessionExpired:
        return events.SessionExpired(session_id=self._session_id, seq=self._next())

    # Publishing.

    def write(self, record: Record) -> None:
        """Write a record before everything that is published after it."""
        self._journal.write(record, flush=type(record) is not TokensAppended)

    def publish(self, event: NumberedEvent, record: Record) -> None:
        """Publish the event that was built last after the commit of ``record``, which contains its number."""
        self.write(record)
        self._publish(event)

    def publish_transient(self, event: TurnEvent) -> None:
        """Publish the event that was built last; only its number is recorded."""
        self.publish(
            event,
            TokensAppended(session_id=self._session_id, seq=event.seq, turn_id=event.turn_id, tokens=b"", text=""),
        )

    def publish_text(self, event: ipc.TokenDelta) -> None:
        """Publish new text; tokens without visible text are only recorded.

        The event is not validated, and nothing is called that is not needed: this is the hot path.
        """
        shown = bool(event.text or event.logprobs)
        if shown:
            self.seq += 1
        self._journal.write(
            TokensAppended(
                session_id=self._session_id, seq=self.seq, turn_id=event.turn_id, tokens=event.tokens, text=event.text
            ),
            flush=False,
        )
        if not shown:
            return
        self._publish(
            events.Token.model_construct(
                op="token",
                id=None,
                session_id=self._session_id,
                seq=self.seq,
                turn_id=event.turn_id,
                content=event.text,
                logprobs=tuple(map(_logprobs, event.logprobs)) if event.logprobs else None,
            )
        )

    def publish_parts(self, event: ipc.TokenDelta, delta: OutputDelta) -> None:
        """Publish the parts of new text; text without visible parts is only recorded."""
        part_events = [self._part_event(event.turn_id, part) for part in delta.parts]
        if part_events and delta.logprobs:
            part_events[0] = part_events[0].model_copy(update={"logprobs": tuple(map(_logprobs, delta.logprobs))})
        self.write(
            TokensAppended(
                session_id=self._session_id,
                seq=self.seq,
                turn_id=event.turn_id,
                tokens=event.tokens,
                text=event.text,
                parts=delta.parts,
            )
        )
        for part_event in part_events:
            self._publish(part_event)

    def reply(self, event: SessionEvent, record: Record, sink: EventSink) -> None:
        """Commit ``record`` and send the event that was built last to the requester.

        The subscriber, if another, receives it by replay.
        """
        self.write(record)
        if sink is self._sink:
            self._publish(event)
        else:
            self._replay.add(event)
            self._journal.release(lambda: sink.send(event))

    def resend(self, event: events.End, *, request_id: str | None) -> None:
        """Send the end of a turn again with its original number."""
        self._send(event.model_copy(update={"id": request_id}))

    def _publish(self, event: NumberedEvent) -> None:
        self._replay.add(event)
        self._send(event)

    def _send(self, event: Event) -> None:
        """Send an event to the subscriber after the commit of what was written, without keeping it for replay."""
        if (sink := self._sink) is None:
            return
        generation = self._generation

        def deliver() -> None:
            if generation == self._generation:
                sink.send(event)

        self._journal.release(deliver)

    def _disable_replay(self) -> None:
        self._replay_timer = None
        self._replay.disable()

    def _part_event(self, turn_id: str, part: Part) -> events.Token | events.Reasoning | events.ToolCall:
        fields: dict[str, Any] = {
            "id": None,
            "session_id": self._session_id,
            "seq": self._next(),
            "turn_id": turn_id,
            "logprobs": None,
        }
        match part:
            case parts.TextDelta(text):
                return events.Token.model_construct(op="token", content=text, **fields)
            case parts.ReasoningDelta(text):
                return events.Reasoning.model_construct(op="reasoning", content=text, **fields)
            case parts.ToolCallStart(index, name):
                fields |= {"index": index, "name": name, "arguments": ""}
            case parts.ArgumentsDelta(index, text):
                fields |= {"index": index, "name": None, "arguments": text}
        return events.ToolCall.model_construct(op="tool_call", call_id=call_id(turn_id, part.index), **fields)

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
"""Called with a client id, an event, and the sinks that already have it."""


class SessionNotifier:
    """Notifies other sockets of a client about its sessions, after the commit; stateless sessions are not announced."""

    def __init__(self) -> None:
        self._handlers: list[SessionEventHandler] = []

    def subscribe(self, handler: SessionEventHandler) -> None:
        self._handlers.append(handler)

    def notify_metadata(self, session: LiveSession, *, by: EventSink | None) -> None:
        """Announce a session's metadata to all sinks but ``by``."""
        config = session.config
        self._notify(session, events.MetadataSet(session_id=config.session_id, metadata=config.metadata), by)

    def notify_model(self, session: LiveSession, change: events.ModelSet, *, by: EventSink | None) -> None:
        """Announce a session's model to all sinks but ``by``."""
        self._notify(session, change, by)

    def notify_closed(self, session: LiveSession, *, exclude: tuple[EventSink | None, ...]) -> None:
        """Announce the end of a session to all sinks but those in ``exclude``."""
        self._notify(session, events.SessionClosed(session_id=session.config.session_id), *exclude)

    def notify_deleted(self, session_id: str, client_id: str, *, journal: Journal) -> None:
        """Announce the end of an archived session to all sinks."""
        for reader in self._handlers:
            journal.release(partial(reader, client_id, events.SessionClosed(session_id=session_id), ()))

    def notify_client(self, client_id: str, event: Event, *, journal: Journal, by: EventSink | None) -> None:
        """Announce what concerns no session to all sinks of a client but ``by``."""
        for reader in self._handlers:
            journal.release(partial(reader, client_id, event, (by,)))

    def _notify(self, session: LiveSession, event: Event, *excluded: EventSink | None) -> None:
        if session.config.stateless:
            return
        for reader in self._handlers:
            session.journal.release(partial(reader, session.config.client_id, event, excluded))

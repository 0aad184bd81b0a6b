"""One conversation: its state and history, its subscriber, and the operations of clients.

A session owns a ``History`` that changes only at the end of a turn, by ``append`` or by ``rewind``; a turn that fails
leaves it unchanged. At most one turn runs at a time: while a ``TurnRunner`` is set the state is ``busy`` and every
other operation on the history is refused. A change of the history is one journal record and one numbered event, handed
to the ``EventLog`` together, so that a client sees an event only after its record is committed. After a restart
``LiveSession.restored`` rebuilds the session from its records; ``recover`` then resubmits its pending turn with the
tokens generated so far, and the answer continues at the exact character. Invariant: memory, journal and every client's
view are prefixes of the same event sequence, with memory ahead of the journal and the journal ahead of the client.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.mcp.gateway import ToolOutcome
from inferencecenter.protocol import events
from inferencecenter.protocol.values import ChatMessage, SessionSummary
from inferencecenter.sessions.context import check_model
from inferencecenter.sessions.event_log import EventLog
from inferencecenter.sessions.history import HistorySize, HistoryView, TurnFailure, TurnLog, plain_messages
from inferencecenter.sessions.journal import (
    ConfigChanged,
    HistoryChanged,
    McpCallsChanged,
    NullJournal,
    SessionArchived,
    SessionDeleted,
    SessionOpened,
    TurnEnded,
    TurnFailed,
    UsageRecorded,
    check_writable,
)
from inferencecenter.sessions.mcp_calls import McpCalls
from inferencecenter.sessions.prompt.plan import messages_of, n_kept
from inferencecenter.sessions.states import SESSION, SessionChange, SessionState
from inferencecenter.sessions.turn import Turn, new_turn_spec
from inferencecenter.sessions.turn_runner import TurnRunner

if TYPE_CHECKING:
    from inferencecenter.config.limits import AccessLimits
    from inferencecenter.ipc.messages import Failed
    from inferencecenter.protocol.base import SessionEvent
    from inferencecenter.protocol.params import Params
    from inferencecenter.protocol.requests import Abort, Append, CallMcpTool, Infer, ResumeSession, RewindSession
    from inferencecenter.protocol.values import McpCallStatus, Usage
    from inferencecenter.sessions.context import EventSink, Principal, Quota, ReplaySink, SessionConfig, SessionServices
    from inferencecenter.sessions.event_log import ReplayLoss
    from inferencecenter.sessions.history import History
    from inferencecenter.sessions.journal import Journal, StoredSession
    from inferencecenter.sessions.mcp_calls import ToolCallRunner
    from inferencecenter.sessions.turn import TurnOutcome


@dataclass(frozen=True, slots=True)
class TurnSnapshot:
    """A turn as seen from outside: the messages ``before`` it, its own ``input_messages``, and its ``answer``.

    ``note`` is the private text of the requester, ``ended_at`` is in Unix seconds, and unknown for turns of older
    versions. A ``running`` turn has no answer or usage yet, and a ``finish_reason`` only if its end is being forced. A
    discarded turn has no messages; a failed turn has its ``failure``.
    """

    turn_id: str
    note: str
    before: tuple[ChatMessage, ...]
    input_messages: tuple[ChatMessage, ...]
    answer: ChatMessage | None = None
    finish_reason: str | None = None
    usage: Usage | None = None
    running: bool = False
    failure: events.Error | None = None
    ended_at: float | None = None


@dataclass(frozen=True, slots=True)
class SessionSnapshot:
    """The session at one moment: ``seq`` is the number of its last event, ``last_used_at`` is in Unix seconds.

    ``model`` is the name of the model that serves the session now. ``n_ctx`` is the context size of that model, or of
    the first model while it is unknown.
    """

    config: SessionConfig
    model: str
    n_ctx: int
    state: SessionState
    seq: int
    last_used_at: float
    history: History
    turn_log: TurnLog
    mcp_calls: tuple[McpCallStatus, ...] = ()

    def describe(self, params: Params) -> events.Session:
        """Return the full description of the session with its effective params; a running turn is not included."""
        config, history = self.config, self.history
        return events.Session(
            session_id=config.session_id,
            epoch=config.epoch,
            seq=self.seq,
            state=self.state.value,
            model=self.model,
            n_ctx=self.n_ctx,
            n_tokens=history.n_tokens,
            on_full=config.on_full,
            dropped_messages=history.view.n_dropped,
            params=params.model_dump(mode="json"),
            metadata=config.metadata,
            transcript=history.messages,
            turns=self.turn_log.turns,
            usage=self.turn_log.usage,
            mcp_calls=self.mcp_calls or None,
        )

    def summary(self) -> SessionSummary:
        """Return the session's entry in a list of sessions."""
        config, history = self.config, self.history
        return SessionSummary(
            session_id=config.session_id,
            state=self.state.value,
            mode=config.mode,
            model=self.model,
            messages=len(history.messages),
            tokens=history.n_tokens,
            created_at=config.created_at,
            last_used_at=self.last_used_at,
            metadata=config.metadata,
        )

    def turn(self, turn_id: str) -> TurnSnapshot:
        """Return a turn that has ended.

        Raises:
            InferenceCenterError: ``turn_not_found``.
        """
        if (failed := self.turn_log.failure(turn_id)) is not None:
            return TurnSnapshot(
                turn_id, failed.note, before=self.history.messages, input_messages=(), failure=failed.error
            )
        if (known := self.turn_log.turn(turn_id)) is None:
            raise InferenceCenterError(ErrorCode.TURN_NOT_FOUND)
        listed, note = known
        messages = self.history.messages
        mark = next((mark for mark in self.history.turns if mark.turn_id == turn_id), None)
        begin, end = (listed.messages, listed.messages) if mark is None else (mark.n_before, mark.n_messages)
        turn_messages = messages[begin:end]
        return TurnSnapshot(
            turn_id=turn_id,
            note=note,
            before=messages[:begin],
            input_messages=turn_messages[:-1],
            answer=turn_messages[-1] if turn_messages else None,
            finish_reason=listed.finish_reason,
            usage=listed.usage,
            ended_at=listed.ended_at,
        )

    def resumed(self, lost: ReplayLoss | None, *, turn: Turn | None, request_id: str | None) -> events.SessionResumed:
        """Return the reply to a reconnecting client.

        Args:
            lost: Why the missed events cannot be replayed; the reply then contains the whole transcript.
            turn: The running turn.
            request_id: The id of the request frame.
        """
        input_messages = turn.messages if turn else ()
        assembler = turn.assembler if turn else None
        return events.SessionResumed(
            id=request_id,
            session_id=self.config.session_id,
            resumed=lost is None,
            reason=lost,
            state=self.state.value,
            epoch=self.config.epoch,
            seq=self.seq,
            turn_id=turn.turn_id if turn else None,
            content=turn.content if turn and lost else None,
            reasoning=(assembler.reasoning or None) if assembler and lost else None,
            tool_calls=(assembler.calls or None) if assembler and lost else None,
            transcript=self.history.messages + input_messages if lost else None,
            turns=self.turn_log.turns if lost else None,
            n_ctx=self.n_ctx if lost else None,
            n_tokens=self.history.n_tokens if lost else None,
            dropped_messages=self.history.view.n_dropped if lost else None,
            mcp_calls=(self.mcp_calls or None) if lost else None,
        )


_INCOMPLETE_WARNING: Final = "Part of this session could not be stored and may be missing after a restart."


class LiveSession:
    """A conversation of one client.

    ``_change`` is the only writer of its state.

    Args:
        config: Its configuration.
        services: The services of the daemon.
        history: Its initial history.
        turn_log: The turns of that history.
        sink: The initial subscriber.
        seq: Number of the last event published by an earlier daemon.
        last_used_at: Unix seconds of the last use before this daemon started.
    """

    def __init__(  # noqa: PLR0913 - keyword-only
        self,
        config: SessionConfig,
        *,
        services: SessionServices,
        history: History,
        turn_log: TurnLog,
        sink: EventSink | None = None,
        seq: int = 0,
        last_used_at: float | None = None,
    ) -> None:
        self.config = config
        own = services.journal.of_client(config.client_id)
        self.journal: Journal = own if config.store else NullJournal()
        self._client_journal = own
        self._services = services
        self._events = EventLog(
            config.session_id,
            journal=self.journal,
            replay_bytes=services.settings.replay_kib * 1024,
            sink=sink,
            on_sink_changed=services.sink_changed,
            seq=seq,
        )
        self._state = SessionState.IDLE
        self._history = history
        self._turn_log = turn_log
        self._runner: TurnRunner | None = None
        self._mcp_calls = McpCalls()
        self._counted_chars = 0
        self._last_used_at = config.created_at if last_used_at is None else last_used_at
        # The wall clock is read once: a clock change while the daemon runs expires nothing.
        unused_s = 0.0 if last_used_at is None else max(0.0, services.clock() - last_used_at)
        self._loaded = services.monotonic()
        self._last_used = self._loaded - unused_s

    @classmethod
    def restored(
        cls, stored: StoredSession, config: SessionConfig, *, services: SessionServices, sink: EventSink | None = None
    ) -> LiveSession:
        """Return a session restored from the store; ``recover`` resubmits its pending turn."""
        session = cls(
            config,
            services=services,
            history=stored.history,
            turn_log=TurnLog(stored.turns, stored.ends, stored.notes, stored.failures),
            sink=sink,
            seq=stored.seq,
            last_used_at=stored.last_used_at,
        )
        session._mcp_calls = McpCalls.restored(stored.mcp_calls, stored.history.messages)
        session._update_counted_chars()
        if (pending_turn := stored.pending_turn) is not None:
            now = services.monotonic()
            since = now - max(0.0, services.clock() - pending_turn.spec.submitted_at)
            spec = pending_turn.spec
            turn = Turn(spec, messages_of(spec.request), submitted_at=since, now=now, restored=pending_turn)
            session._new_runner(turn, services.quota_of(config.client_id, spec.token_id))
            session._change(SessionChange.TURN_QUEUED)
        return session

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.config.session_id}, {self._state.value}, turn={self._runner!r})"

    @property
    def state(self) -> SessionState:
        return self._state

    @property
    def sink(self) -> EventSink | None:
        """The subscriber of its events; ``None`` while the session is detached."""
        return self._events.sink

    @property
    def idle_s(self) -> float:
        """Seconds since the last use; 0 while a turn or a tool call runs."""
        return 0.0 if self._runner or self.runs_mcp_calls else self._services.monotonic() - self._last_used

    @property
    def unused_s(self) -> float:
        """Seconds since the last use, or since it was loaded."""
        return min(self.idle_s, self._services.monotonic() - self._loaded)

    @property
    def runs_mcp_calls(self) -> bool:
        """Whether the daemon runs tool calls of the session."""
        return self._mcp_calls.n_running > 0

    @property
    def snapshot(self) -> SessionSnapshot:
        """The session as it is now; a running turn is not included."""
        engines = self._services.models
        return SessionSnapshot(
            config=self.config,
            model=engines.name(self.config.chosen_model),
            n_ctx=engines.n_ctx(self.config),
            state=self._state,
            seq=self._events.seq,
            last_used_at=self._last_used_at,
            history=self._history,
            turn_log=self._turn_log,
            mcp_calls=self._mcp_calls.statuses,
        )

    def turn_snapshot(self, turn_id: str) -> TurnSnapshot:
        """Return a turn, running or ended.

        Raises:
            InferenceCenterError: ``turn_not_found``.
        """
        turn = self._runner.turn if self._runner else None
        if turn is None or turn.turn_id != turn_id:
            return self.snapshot.turn(turn_id)
        return TurnSnapshot(
            turn_id,
            turn.spec.note,
            before=self._history.messages,
            input_messages=turn.messages,
            finish_reason=turn.forced_finish,
            running=True,
        )

    @property
    def history(self) -> History:
        """The messages so far; a running turn is not included."""
        return self._history

    @property
    def n_chars(self) -> int:
        """Characters held: messages and notes of turns."""
        return self._history.size.n_chars + self._turn_log.n_note_chars

    @property
    def is_archivable(self) -> bool:
        """Whether the store has everything of the session, so that it can leave memory."""
        return (
            self._state is SessionState.IDLE
            and not self.runs_mcp_calls
            and self.config.store
            and self.config.on_disconnect == "detach"
            and self.journal.fault is None
            and not self.journal.is_incomplete(self.config.session_id)
        )

    # Client operations.

    def open(self, *, parent: str | None = None) -> None:
        """Record the new session, as a fork of ``parent`` where one is given."""
        self._update_counted_chars()
        record = SessionOpened(
            config=self.config,
            history=self._history,
            turns=self._turn_log.all_turns,
            last_used_at=self._last_used_at,
            notes=self._turn_log.notes,
            parent=parent,
        )
        self._events.write(record)

    def infer(self, request: Infer, client: Principal, sink: EventSink, *, note: str = "") -> None:
        """Start a turn, or attach to the turn that already has the request's ``turn_key``.

        If the turn with this key is running, ``queued`` is sent again; if it has ended, ``end`` is sent again with its
        original number. A failed turn leaves nothing behind, so its key starts a new turn.

        Args:
            request: The messages and options of the turn.
            client: The owner of the session.
            sink: The requester, which becomes the subscriber of the session.
            note: Private text kept with the turn.

        Raises:
            InferenceCenterError: ``session_busy``, ``context_full``, ``storage_unavailable``, ``overloaded``,
                ``model_not_found``, see ``new_turn_spec``, or the error of the template or the engine.
        """
        runner = self._runner
        if runner is not None:
            if request.turn_key is None or request.turn_key != runner.turn.turn_key:
                raise InferenceCenterError(
                    ErrorCode.SESSION_BUSY, hint="Wait for the end of its turn, abort it, or use another session."
                )
            self._events.attach(sink)
            runner.resend_queued(request_id=request.id)
        elif (ended := self._turn_log.find_end(request.turn_key)) is not None:
            self._events.attach(sink)
            self._events.resend(ended, request_id=request.id)
        else:
            self._begin(request, client, sink, note=note)

    def resume(self, request: ResumeSession, sink: ReplaySink) -> None:
        """Make ``sink`` the subscriber and replay the events it has missed.

        If some of them are lost, the reply contains the state of the session instead.
        """
        missed = self._events.missed_events(request, epoch=self.config.epoch)
        turn = self._runner.turn if self._runner else None
        answer = self.snapshot.resumed(missed.reason, turn=turn, request_id=request.id)
        self._events.resume(sink, answer, missed.events)

    def abort(self, request: Abort) -> None:
        """Request the end of the running turn, or of the running tool calls; what ends answers the request.

        Raises:
            InferenceCenterError: ``nothing_to_abort`` or ``turn_not_found``.
        """
        if (runner := self._runner) is None:
            if self.runs_mcp_calls and request.turn_id is None:
                self._mcp_calls.stop()
                return
            raise InferenceCenterError(ErrorCode.NOTHING_TO_ABORT)
        runner.abort(request)

    def call_mcp_tool(self, request: CallMcpTool, sink: EventSink, run: ToolCallRunner) -> None:
        """Run a tool call of the last answer; its result becomes a message. ``sink`` becomes the subscriber.

        The call is sent once its record is committed, so that a restart finds every call that may have run.

        Raises:
            InferenceCenterError: ``session_busy``, ``storage_unavailable`` or ``invalid_request``.
        """
        if self._runner is not None:
            raise InferenceCenterError(ErrorCode.SESSION_BUSY, hint="Call it after its turn has ended.")
        check_writable(self.journal)
        call, status = self._mcp_calls.begin(request, self._history.messages)
        self._touch()
        self._events.attach(sink)
        event = self._events.mcp_call(status, outcome=None, request_id=request.id)
        self._events.publish(event, self._mcp_calls_record(event.seq))
        on_end = partial(self._mcp_call_ended, call.call_id, request.id)

        def start() -> None:
            if not self._mcp_calls.send(call.call_id, lambda: run.start(call.arguments, on_end)):
                run.release()
                on_end(ToolOutcome("failed", detail="the call was stopped before it was sent"))

        self.journal.release(start)

    def append(self, request: Append, sink: EventSink) -> None:
        """Add messages to the history without generating; the template validates them at the next turn.

        Raises:
            InferenceCenterError: ``session_busy``, ``storage_unavailable`` or ``context_full``.
        """
        self._check_idle("Append")
        check_writable(self.journal)
        history = self._history.appended(plain_messages(request.messages), limits=self._services.history_limits())
        self._check_text_quota(history.size.n_chars - self._history.size.n_chars)
        self._history = history
        self._update_counted_chars()
        self._publish_change(self._events.appended(len(self._history.messages), request_id=request.id), sink)

    def hide_messages(self, n_messages: int) -> None:
        """Leave the first messages out of the model's context, but for the system prompt; the transcript keeps them.

        Raises:
            InferenceCenterError: ``session_busy`` or ``storage_unavailable``.
        """
        self._check_idle("Shorten its context")
        check_writable(self.journal)
        view = HistoryView(n_kept(self._history.messages, 0), n_messages)
        self._history = replace(self._history, view=view)
        self._touch()
        self._events.write(self._history_record(self._events.seq))

    def fork(self, config: SessionConfig, *, turn: str | None, sink: EventSink) -> LiveSession:
        """Return a new session with a copy of this one's history.

        Args:
            config: The configuration of the new session.
            turn: The last turn to copy, or ``START``; ``None`` copies everything.
            sink: The subscriber of the new session.

        Raises:
            InferenceCenterError: ``session_busy``, ``storage_unavailable`` or ``turn_not_found``.
        """
        self._check_idle("Fork it")
        check_writable(self.journal)
        history = self._history if turn is None else self._history.until(turn)
        forked = LiveSession(
            config, services=self._services, history=history, turn_log=self._turn_log.until(turn), sink=sink
        )
        self._services.images.share(config.client_id, config.session_id, by=self.config.session_id)
        self._touch()
        return forked

    def rewind(self, request: RewindSession, sink: EventSink) -> None:
        """Remove everything after a turn, or after ``START``.

        Raises:
            InferenceCenterError: ``session_busy``, ``storage_unavailable`` or ``turn_not_found``.
        """
        self._check_idle("Rewind it")
        check_writable(self.journal)
        self._history = self._history.until(request.turn)
        self._turn_log.rewind(request.turn)
        self._update_counted_chars()
        n_messages = len(self._history.messages)
        self._publish_change(self._events.rewound(request.turn, n_messages, request_id=request.id), sink)

    def set_metadata(self, metadata: dict[str, str]) -> events.MetadataSet:
        """Replace the metadata, also while a turn runs; this does not count as a use of the session.

        Raises:
            InferenceCenterError: ``storage_unavailable``.
        """
        check_writable(self.journal)
        self.config = replace(self.config, metadata=dict(metadata))
        self._events.write(ConfigChanged(config=self.config))
        return events.MetadataSet(session_id=self.config.session_id, metadata=self.config.metadata)

    def set_model(self, model: str | None, limits: AccessLimits) -> events.ModelSet:
        """Answer with another model from the next turn on; ``None`` follows the default model.

        Raises:
            InferenceCenterError: ``session_busy``, ``storage_unavailable``, ``model_not_found``, ``forbidden``, or
                ``invalid_request`` for a model that generates no text.
        """
        self._check_idle("Change its model")
        check_writable(self.journal)
        engines = self._services.models
        name = engines.resolve(model).name
        check_model(name, limits)
        self.config = replace(self.config, chosen_model=model)
        self._events.write(ConfigChanged(config=self.config))
        return events.ModelSet(session_id=self.config.session_id, model=name, n_ctx=engines.n_ctx(self.config))

    def close(self) -> events.SessionClosed:
        """Close the session: abort its running turn and release its KV cache in the engines."""
        if (runner := self._runner) is not None:
            runner.cancel()
        self._mcp_calls.stop()
        self._finish(SessionChange.CLOSE)
        self._events.write(self._deletion_record())
        return events.SessionClosed(session_id=self.config.session_id)

    # Calls of the manager and the turn runner.

    def recover(self) -> None:
        """Resubmit the turn left pending by an earlier daemon, if there is one."""
        if (runner := self._runner) is not None:
            self._limit_replay()
            runner.recover()

    def detach(self) -> None:
        """Remove the subscriber; after ``detached_turn_s`` a running turn keeps its text but not its events."""
        self._events.detach()
        self._limit_replay()

    def expire(self) -> None:
        """End the session at its idle limit."""
        self._finish(SessionChange.EXPIRE)
        self._events.publish(self._events.expired(), self._deletion_record())

    def archive(self) -> SessionArchived:
        """Leave memory; the session stays stored, and engines keep its KV.

        A subscriber is not told: its position stays valid, and it is the subscriber again when the session is loaded.
        """
        record = SessionArchived(
            session_id=self.config.session_id,
            n_messages=len(self._history.messages),
            n_tokens=self._history.n_tokens,
            n_chars=self.n_chars,
            ttl_s=self.config.ttl_s,
        )
        self._change(SessionChange.ARCHIVE)
        self._set_counted_chars(0)
        self._events.detach()
        self._events.write(record)
        return record

    def prefill_started(self, turn: Turn, *, prompt_tokens: int, cached_tokens: int) -> None:
        """Record the usage of a prompt when it is prefilled, so that it survives a crash whatever the outcome."""
        self._count_usage(replace(self._usage_record(turn), prompt_tokens=prompt_tokens, cached_tokens=cached_tokens))

    def answer_counted(self, turn: Turn) -> None:
        """Record the usage of an answer in steps of ``COUNTED_TOKENS`` where no other record holds it.

        A crash then loses at most one step per turn. A stored answer needs no such record: the next daemon resumes it.
        """
        if self._client_journal.fault is None:
            n_tokens = turn.n_tokens - turn.counted_tokens
            self._count_usage(replace(self._usage_record(turn), completion_tokens=n_tokens))
            turn.counted_tokens = turn.n_tokens

    def turn_ended(self, turn: Turn, history: History, outcome: TurnOutcome) -> None:
        """Commit the history with the turn that ended, and publish its ``end``."""
        if self.journal.is_incomplete(self.config.session_id):
            outcome = replace(outcome, warnings=(*outcome.warnings, _INCOMPLETE_WARNING))
        end = self._events.end(turn, outcome)
        self._end_turn()
        self._history = history
        note = turn.spec.note
        listed = self._turn_log.record_end(
            turn.turn_key, end, n_messages=len(history.messages), note=note, ended_at=self._services.clock()
        )
        self._update_counted_chars()
        record = TurnEnded(
            session_id=self.config.session_id,
            client_id=self.config.client_id,
            seq=end.seq,
            last_used_at=self._last_used_at,
            history=history,
            turn=listed,
            turn_key=turn.turn_key,
            end=end,
            token_id=turn.spec.token_id,
            note=note,
            prompt_tokens=turn.prompt_usage[0],
            cached_tokens=turn.prompt_usage[1],
            completion_tokens=turn.counted_tokens,
        )
        self._events.publish(end, record)
        self._prune_mcp_calls()
        if not self.config.store:
            self._count_usage(record.remaining_usage())
        self._services.metrics.turn_ended(
            outcome.record(self.config, turn.turn_id, model=turn.spec.model, node=turn.node)
        )

    def turn_broken(self, turn: Turn, failure: Failed, outcome: TurnOutcome) -> None:
        """Return to idle after a turn that an internal error ended, and publish its failure."""
        if self._runner is not None and self._runner.turn is turn:
            self._end_turn()
        self.turn_failed(turn, failure, outcome)

    def turn_failed(self, turn: Turn, failure: Failed, outcome: TurnOutcome) -> None:
        """Publish the failure of the running turn, which leaves the history unchanged."""
        if self._runner is not None:
            self._end_turn()
        error = self._events.failed(turn, failure)
        remembered = TurnFailure(error, turn.spec.note)
        self._turn_log.record_failure(turn.turn_id, remembered)
        spent = replace(self._usage_record(turn), completion_tokens=turn.n_tokens - turn.counted_tokens)
        record = TurnFailed(
            session_id=self.config.session_id,
            seq=self._events.seq,
            last_used_at=self._last_used_at,
            turn_id=turn.turn_id,
            failure=remembered,
            usage=spent,
        )
        self._events.publish(error, record)
        if not self.config.store:
            self._count_usage(spent)
        self._services.metrics.turn_ended(
            outcome.record(self.config, turn.turn_id, model=turn.spec.model, node=turn.node)
        )

    def _usage_record(self, turn: Turn) -> UsageRecorded:
        return UsageRecorded(client_id=self.config.client_id, token_id=turn.spec.token_id, at=self._services.clock())

    def _count_usage(self, spent: UsageRecorded) -> None:
        """Record usage. A session that is not stored does not wait for a faulty store."""
        if self.config.store or self._client_journal.fault is None:
            self._client_journal.write(spent, flush=False)

    # State changes.

    def _begin(self, request: Infer, client: Principal, sink: EventSink, *, note: str) -> None:
        services, config = self._services, self.config
        self._mcp_calls.check_free("Wait for mcp_call, or abort it.")
        check_writable(self.journal)
        services.admit()
        messages = messages_of(request)
        if not messages and (not self._history.messages or self._history.messages[-1].role not in ("user", "tool")):
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST,
                "there is no message to answer: the history does not end with one from user or tool",
                field="prompt",
                hint="Give prompt or messages.",
            )
        self._history.check_tool_results(messages)
        size = HistorySize.of(messages)
        services.history_limits(note_chars=self._turn_log.n_note_chars + len(note)).check(self._history.size + size)
        self._check_text_quota(size.n_chars)
        serving = services.models.resolve(config.chosen_model)
        quota = services.quota_of(config.client_id, client.token_id)
        spec, loaded = new_turn_spec(
            request, client, note=note, serving=serving, limits=quota.limits, config=config, services=services
        )
        now = services.monotonic()
        runner = self._new_runner(Turn(spec, messages, submitted_at=now, now=now), quota)
        try:
            runner.submit(serving, loaded)
        except BaseException:
            # Whatever the exception, a session without a turn must not be busy.
            self._runner = None
            raise
        self._change(SessionChange.TURN_QUEUED)
        self._touch()
        self._events.attach(sink)
        runner.send_queued(request_id=request.id)

    def _new_runner(self, turn: Turn, quota: Quota) -> TurnRunner:
        self._runner = TurnRunner(
            turn,
            quota=quota,
            history=self._history,
            listener=self,
            event_log=self._events,
            config=self.config,
            services=self._services,
        )
        return self._runner

    def _end_turn(self) -> None:
        self._runner = None
        self._events.keep_replay()
        self._change(SessionChange.TURN_ENDED)
        self._touch()

    def _deletion_record(self) -> SessionDeleted:
        return SessionDeleted(session_id=self.config.session_id, n_chars=self.n_chars)

    def _finish(self, change: SessionChange) -> None:
        self._change(change)
        self._set_counted_chars(0)
        self._services.models.release(self.config.session_id)
        self._services.images.release(self.config.client_id, self.config.session_id)

    def _change(self, change: SessionChange) -> None:
        before, self._state = self._state, SESSION.next(self._state, change)
        busier = (self._state is SessionState.BUSY) - (before is SessionState.BUSY)
        if busier:
            self._services.active_turns.add(busier, client_id=self.config.client_id, stateless=self.config.stateless)

    def _check_text_quota(self, n_chars: int) -> None:
        if not self.config.stateless:
            self._services.make_text_room(self.config.session_id, n_chars)

    def _update_counted_chars(self) -> None:
        if not self.config.stateless:
            self._set_counted_chars(self.n_chars)

    def _set_counted_chars(self, n_chars: int) -> None:
        self._services.text_quota.add(n_chars - self._counted_chars, client_id=self.config.client_id)
        self._counted_chars = n_chars

    def _touch(self) -> None:
        self._last_used = self._services.monotonic()
        self._last_used_at = self._services.clock()

    def _mcp_call_ended(self, call_id: str, request_id: str | None, outcome: ToolOutcome) -> None:
        """Add the result of a tool call to the history, or publish why there is none."""
        if self._state is not SessionState.IDLE:
            return  # it was closed meanwhile
        history = self._history
        if outcome.state == "done":
            message = ChatMessage(role="tool", content=outcome.text, tool_call_id=call_id)
            try:
                history = history.appended((message,), limits=self._services.history_limits())
                self._check_text_quota(history.size.n_chars - self._history.size.n_chars)
            except InferenceCenterError as error:
                outcome = ToolOutcome("unknown", detail=f"its result cannot be stored: {error.message}")
                history = self._history
        status = self._mcp_calls.end(call_id, is_known=outcome.state != "unknown")
        assert status is not None, "no other change forgets a call that runs"
        self._touch()
        event = self._events.mcp_call(status, outcome=outcome, request_id=request_id)
        if outcome.state == "done":
            self._history = history
            self._update_counted_chars()
            # First the result: if only this is committed, the mark that is left is dropped when it is loaded.
            self._events.write(self._history_record(event.seq))
        self._events.publish(event, self._mcp_calls_record(event.seq))

    def _prune_mcp_calls(self) -> None:
        """Forget the unknown calls that a change of the history answered or removed."""
        if self._mcp_calls.prune(self._history.messages):
            self._events.write(self._mcp_calls_record(self._events.seq))

    def _mcp_calls_record(self, seq: int) -> McpCallsChanged:
        return McpCallsChanged(
            session_id=self.config.session_id,
            seq=seq,
            last_used_at=self._last_used_at,
            calls=self._mcp_calls.statuses,
        )

    def _publish_change(self, event: SessionEvent, sink: EventSink) -> None:
        self._touch()
        record = self._history_record(event.seq, rewound=isinstance(event, events.SessionRewound))
        self._events.reply(event, record, sink)
        self._prune_mcp_calls()

    def _history_record(self, seq: int, *, rewound: bool = False) -> HistoryChanged:
        return HistoryChanged(
            session_id=self.config.session_id,
            seq=seq,
            last_used_at=self._last_used_at,
            history=self._history,
            turns=self._turn_log.all_turns,
            rewound=rewound,
        )

    def _check_idle(self, action: str) -> None:
        if self._runner is not None:
            raise InferenceCenterError(ErrorCode.SESSION_BUSY, hint=f"{action} after its turn has ended.")
        self._mcp_calls.check_free(f"{action} after it has ended, or abort it.")

    def _limit_replay(self) -> None:
        if self._runner is not None:
            self._events.disable_replay_later(self._services.settings.detached_turn_s, self._services.call_later)

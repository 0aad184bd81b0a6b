"""One conversation: what was said, and the turn that is being answered."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.messages import Delta, Failed, Finished, Position, Progress, Started, Submit
from inferencecenter.protocol import events
from inferencecenter.protocol.params import cross_check, encode, merge
from inferencecenter.protocol.values import ChatMessage, SessionSummary
from inferencecenter.sessions.client import PRIORITY_RANK
from inferencecenter.sessions.ledger import Ledger
from inferencecenter.sessions.prompt import TOKEN_BYTES, History, after_turn, next_prompt
from inferencecenter.sessions.states import SESSION, SessionChange, SessionState, TurnChange, TurnState
from inferencecenter.sessions.stream import EventStream
from inferencecenter.sessions.totals import TurnRecord
from inferencecenter.sessions.turn import Turn

if TYPE_CHECKING:
    from inferencecenter.ipc import messages as ipc
    from inferencecenter.protocol.params import Params
    from inferencecenter.protocol.requests import Abort, Append, Infer
    from inferencecenter.protocol.values import Priority
    from inferencecenter.sessions.client import EventSink
    from inferencecenter.sessions.facts import SessionFacts, Surroundings
    from inferencecenter.sessions.template import Renderer
    from inferencecenter.sessions.turn import Outcome

_log = structlog.get_logger(__name__)


class Session:
    """A conversation of one client.

    Its history changes only when a turn ends: a turn that fails leaves it as it was. ``_change`` is the only writer of
    its state.
    """

    def __init__(
        self, facts: SessionFacts, *, system: str | None, renderer: Renderer, around: Surroundings, sink: EventSink
    ) -> None:
        self.facts = facts
        self._renderer = renderer
        self._around = around
        self._stream = EventStream(facts.session_id, sink)
        self._state = SessionState.IDLE
        self._history = History()
        self._turn: Turn | None = None
        self._ledger = Ledger()
        self._last_used_at = facts.created_at
        self._last_used = around.monotonic()
        if system is not None:
            self._extend_history((ChatMessage(role="system", content=system),))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.facts.session_id}, {self._state.value}, turn={self._turn!r})"

    @property
    def state(self) -> SessionState:
        """Where the session is in its life."""
        return self._state

    @property
    def sink(self) -> EventSink | None:
        """Where its events go; none while the session is detached."""
        return self._stream.sink

    @property
    def idle_s(self) -> float:
        """Seconds since the session was last used; 0 while it answers."""
        return 0.0 if self._turn else self._around.monotonic() - self._last_used

    # What clients ask for.

    def infer(self, request: Infer, *, overlay: Params, priority: Priority, sink: EventSink) -> None:
        """Start a turn, or attach to the turn that has the request's ``turn_key`` already.

        A turn of that key which runs is acknowledged again; of one that has ended, ``end`` is sent again with its own
        number. A turn that failed left nothing behind, so its key starts a new one.

        Args:
            request: What to say.
            overlay: The turn's own parameters.
            priority: The turn's class.
            sink: Who asks; the session's events go there from now on.

        Raises:
            InferenceCenterError: ``session_busy``, ``context_full``, what the template says against the conversation,
                or what the engine says.
        """
        turn = self._turn
        if turn is not None and (turn.turn_key is None or turn.turn_key != request.turn_key):
            raise InferenceCenterError(
                ErrorCode.SESSION_BUSY, hint="Wait for the end of its turn, abort it, or use another session."
            )
        ended = self._ledger.find(request.turn_key)
        if ended is None and turn is None:
            turn = self._submit(request, overlay=overlay, priority=priority)
        self._stream.sink = sink
        if turn is not None:
            self._stream.queued(turn, eta_ms=self._around.eta_ms(turn.position), request_id=request.id)
        elif ended is not None:
            self._stream.again(ended, request_id=request.id)

    def abort(self, request: Abort) -> None:
        """Ask for the end of the running turn; its ``end`` answers the request.

        Raises:
            InferenceCenterError: ``nothing_to_abort`` or ``turn_not_found``.
        """
        turn = self._turn
        if turn is None:
            raise InferenceCenterError(ErrorCode.NOTHING_TO_ABORT)
        if request.turn_id not in (None, turn.turn_id):
            raise InferenceCenterError(ErrorCode.TURN_NOT_FOUND, f"the running turn is {turn.turn_id}", field="turn_id")
        if turn.abort_request is not None:
            raise InferenceCenterError(ErrorCode.NOTHING_TO_ABORT, "the turn is being aborted already")
        turn.abort_request = request
        self._around.engine.abort(turn.turn_id)

    def append(self, request: Append) -> events.Appended:
        """Add messages to the history without answering; a template that minds them says so at the next turn.

        Raises:
            InferenceCenterError: ``session_busy`` or ``context_full``.
        """
        if self._turn is not None:
            raise InferenceCenterError(ErrorCode.SESSION_BUSY, hint="Append when its turn has ended.")
        self._extend_history(tuple(request.messages))
        self._touch()
        return self._stream.appended(len(self._history.messages))

    def detach(self) -> None:
        """Go on without a socket."""
        self._stream.sink = None

    def close(self) -> events.SessionClosed:
        """End the session, its running turn as aborted, and let the engine forget it."""
        if (turn := self._turn) is not None:
            self._around.engine.abort(turn.turn_id)
            self._end(turn, turn.cut_short(now=self._around.monotonic()))
        self._leave(SessionChange.CLOSE)
        return events.SessionClosed(session_id=self.facts.session_id)

    def expire(self) -> None:
        """End the idle session because nobody used it."""
        self._leave(SessionChange.EXPIRE)
        self._stream.expired()

    def describe(self) -> events.Session:
        """Return everything about the session; a running turn is not yet part of it."""
        facts = self.facts
        return events.Session(
            session_id=facts.session_id,
            epoch=facts.epoch,
            seq=self._stream.seq,
            state=self._state.value,
            model=facts.model,
            n_ctx=facts.n_ctx,
            n_tokens=self._history.n_tokens,
            params=facts.params.model_dump(mode="json"),
            metadata=facts.metadata,
            transcript=self._history.messages,
            turns=self._ledger.turns,
            usage=self._ledger.usage,
        )

    def summary(self) -> SessionSummary:
        """Return what a list of sessions shows."""
        facts = self.facts
        return SessionSummary(
            session_id=facts.session_id,
            state=self._state.value,
            mode=facts.mode,
            model=facts.model,
            messages=len(self._history.messages),
            tokens=self._history.n_tokens,
            created_at=facts.created_at,
            last_used_at=self._last_used_at,
            metadata=facts.metadata,
        )

    # What the engine says.

    def _hear(self, turn: Turn, event: ipc.TurnEvent) -> None:
        """Take an event of ``turn``; whatever comes after the turn's end is late and means nothing."""
        if turn.state.is_terminal:
            return
        if isinstance(event, Failed):
            self._fail(turn, event)
        elif isinstance(event, Finished):
            self._finish(turn, event)
        elif turn.state is TurnState.QUEUED:
            self._hear_queued(turn, event)
        else:
            self._hear_running(turn, event)

    def _hear_queued(self, turn: Turn, event: ipc.TurnEvent) -> None:
        if isinstance(event, Started):
            turn.start(event, now=self._around.monotonic())
        elif not isinstance(event, Position):
            _log.warning("engine_event_before_start", engine_event=type(event).__name__, turn=turn.turn_id)
        elif event.position != turn.position:
            turn.position = event.position
            self._stream.queued(turn, eta_ms=self._around.eta_ms(turn.position))

    def _hear_running(self, turn: Turn, event: ipc.TurnEvent) -> None:
        if isinstance(event, Delta):
            now = self._around.monotonic()
            turn.extend(event, now=now)
            self._around.meter.add(len(event.tokens) // TOKEN_BYTES, now=now)
            if event.text or event.logprobs:
                self._stream.token(event)
        elif isinstance(event, Progress):
            self._stream.progress(event)
        else:
            _log.warning("engine_event_after_start", engine_event=type(event).__name__, turn=turn.turn_id)

    # How it changes.

    def _submit(self, request: Infer, *, overlay: Params, priority: Priority) -> Turn:
        new = _messages_of(request)
        self._check_room(new)
        around = self._around
        prompt = next_prompt(self._history, new, renderer=self._renderer, now=around.local_time())
        params = merge(self.facts.params, overlay)
        warnings = cross_check(params, given=self.facts.chosen | overlay.model_fields_set)
        turn = Turn(around.new_id("t_"), request, prompt=prompt, warnings=warnings, now=around.monotonic())
        if params.seed is None:
            params = params.model_copy(update={"seed": around.new_seed()})
        turn.position = around.engine.submit(
            Submit(
                turn_id=turn.turn_id,
                session_id=self.facts.session_id,
                client_id=self.facts.client_id,
                priority=PRIORITY_RANK[priority],
                tokens=prompt.tokens,
                pieces=prompt.pieces,
                params_json=encode(params),
            ),
            lambda event: self._hear(turn, event),
        )
        self._turn = turn
        self._change(SessionChange.TURN_QUEUED)
        self._touch()
        return turn

    def _finish(self, turn: Turn, end: Finished) -> None:
        if turn.abort_request is None or not turn.abort_request.discard:
            self._history = after_turn(
                self._history, turn.prompt, answer=turn.answer, end=end, keeps_end=self._renderer.keeps_end
            )
        self._end(turn, turn.reported(end))

    def _end(self, turn: Turn, outcome: Outcome) -> None:
        turn.change(TurnChange.ABORT if outcome.finish == "aborted" else TurnChange.FINISH)
        self._turn_is_over()
        event = self._stream.end(turn, outcome)
        self._ledger.record(turn.turn_key, event)
        self._report(turn, outcome)

    def _fail(self, turn: Turn, failure: Failed) -> None:
        turn.change(TurnChange.FAIL)
        self._turn_is_over()
        self._stream.failed(turn, failure)
        self._report(turn, turn.failed(failure, now=self._around.monotonic()))

    def _report(self, turn: Turn, outcome: Outcome) -> None:
        stats = outcome.stats
        self._around.turn_ended(
            TurnRecord(
                client_id=self.facts.client_id,
                session_id=self.facts.session_id,
                turn_id=turn.turn_id,
                finish=outcome.finish,
                queue_ms=stats.queue_ms,
                ttft_ms=stats.ttft_ms,
                total_ms=stats.total_ms,
                prompt_tokens=stats.prompt_tokens,
                cached_tokens=stats.cached_tokens,
                tokens=stats.tokens,
                tps=stats.tps,
            )
        )

    def _turn_is_over(self) -> None:
        self._turn = None
        self._change(SessionChange.TURN_ENDED)
        self._touch()

    def _leave(self, change: SessionChange) -> None:
        self._change(change)
        self._around.engine.release(self.facts.session_id)

    def _change(self, change: SessionChange) -> None:
        self._state = SESSION.after(self._state, change)

    def _touch(self) -> None:
        self._last_used = self._around.monotonic()
        self._last_used_at = self._around.clock()

    def _extend_history(self, new: tuple[ChatMessage, ...]) -> None:
        self._check_room(new)
        self._history = self._history.appended(new)

    def _check_room(self, new: tuple[ChatMessage, ...]) -> None:
        n_chars = self._history.n_chars + sum(len(message.content) for message in new)
        if n_chars > self._around.max_transcript_chars:
            raise InferenceCenterError(
                ErrorCode.CONTEXT_FULL,
                f"the session's history would hold {n_chars} characters; "
                f"{self._around.max_transcript_chars} are allowed",
                hint="Open a new session.",
            )


def _messages_of(request: Infer) -> tuple[ChatMessage, ...]:
    if request.messages is not None:
        return tuple(request.messages)
    assert request.prompt is not None, "the request model demands one of the two"
    return (ChatMessage(role="user", content=request.prompt),)

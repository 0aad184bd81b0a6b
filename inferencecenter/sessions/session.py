"""One conversation: what was said, and the turn that is being answered."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import structlog

from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.messages import Delta, Failed, Finished, Overflowed, Position, Progress, Started
from inferencecenter.protocol import events
from inferencecenter.protocol.params import merge
from inferencecenter.sessions.client import PRIORITY_RANK
from inferencecenter.sessions.description import Standing
from inferencecenter.sessions.history import TOKEN_BYTES, History
from inferencecenter.sessions.ledger import Ledger
from inferencecenter.sessions.prompt import after_turn, messages_of, next_prompt, whole_prompt
from inferencecenter.sessions.shift import plan_shift
from inferencecenter.sessions.states import SESSION, SessionChange, SessionState, TurnChange, TurnState
from inferencecenter.sessions.stream import EventStream
from inferencecenter.sessions.submission import never_began, submission
from inferencecenter.sessions.turn import Turn

if TYPE_CHECKING:
    from inferencecenter.ipc import messages as ipc
    from inferencecenter.protocol.params import Params
    from inferencecenter.protocol.requests import Abort, Append, Infer
    from inferencecenter.protocol.values import Priority
    from inferencecenter.sessions.client import EventSink
    from inferencecenter.sessions.facts import SessionFacts, Surroundings
    from inferencecenter.sessions.prompt import Prompt
    from inferencecenter.sessions.template import Renderer
    from inferencecenter.sessions.turn import Outcome

_log = structlog.get_logger(__name__)


class Session:
    """A conversation of one client.

    Its history changes only when a turn ends: a turn that fails leaves it as it was. ``_change`` is the only writer of
    its state.
    """

    def __init__(  # noqa: PLR0913 - keyword-only
        self,
        facts: SessionFacts,
        *,
        renderer: Renderer,
        around: Surroundings,
        sink: EventSink,
        history: History,
        ledger: Ledger,
    ) -> None:
        self.facts = facts
        self._renderer = renderer
        self._around = around
        self._stream = EventStream(facts.session_id, sink)
        self._state = SessionState.IDLE
        self._history = history
        self._turn: Turn | None = None
        self._ledger = ledger
        self._last_used_at = facts.created_at
        self._last_used = around.monotonic()

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
        if (turn := self._turn) is None:
            raise InferenceCenterError(ErrorCode.NOTHING_TO_ABORT)
        turn.take_abort(request)
        self._around.engine.abort(turn.turn_id)

    def append(self, request: Append) -> events.Appended:
        """Add messages to the history without answering; a template that minds them says so at the next turn.

        Raises:
            InferenceCenterError: ``session_busy`` or ``context_full``.
        """
        self._check_idle("Append")
        self._history = self._history.appended(tuple(request.messages), max_chars=self._around.max_transcript_chars)
        self._touch()
        return self._stream.appended(len(self._history.messages))

    def fork(self, facts: SessionFacts, *, turn: str | None, sink: EventSink) -> Session:
        """Return another session that begins as this one does.

        Args:
            facts: What holds for the new one.
            turn: Its last turn, or ``START``; without it everything is taken over.
            sink: Where its events go.

        Raises:
            InferenceCenterError: ``session_busy`` or ``turn_not_found``.
        """
        self._check_idle("Fork it")
        history = self._history if turn is None else self._history.until(turn)
        forked = Session(
            facts,
            renderer=self._renderer,
            around=self._around,
            sink=sink,
            history=history,
            ledger=self._ledger.until(turn),
        )
        self._touch()
        return forked

    def rewind(self, turn: str) -> events.SessionRewound:
        """Forget all that came after a turn, or after ``START``.

        Raises:
            InferenceCenterError: ``session_busy`` or ``turn_not_found``.
        """
        self._check_idle("Rewind it")
        self._history = self._history.until(turn)
        self._ledger.rewind(turn)
        self._touch()
        return self._stream.rewound(turn, len(self._history.messages))

    def detach(self) -> None:
        """Go on without a socket."""
        self._stream.sink = None

    def close(self) -> events.SessionClosed:
        """End the session, its running turn as aborted, and let the engine forget it."""
        if (turn := self._turn) is not None:
            self._around.engine.abort(turn.turn_id)
            self._end(turn, turn.cut_short("aborted", now=self._around.monotonic()))
        self._leave(SessionChange.CLOSE)
        return events.SessionClosed(session_id=self.facts.session_id)

    def expire(self) -> None:
        """End the idle session because nobody used it."""
        self._leave(SessionChange.EXPIRE)
        self._stream.expired()

    @property
    def standing(self) -> Standing:
        """The session as it stands; a running turn is not yet part of it."""
        return Standing(
            facts=self.facts,
            state=self._state,
            seq=self._stream.seq,
            last_used_at=self._last_used_at,
            history=self._history,
            ledger=self._ledger,
        )

    # What the engine says.

    def _hear(self, turn: Turn, event: ipc.TurnEvent) -> None:
        """Take an event of ``turn``; whatever comes after the turn's end is late and means nothing."""
        state = turn.state
        if state.is_terminal:
            return
        match event:
            case Delta() if state is TurnState.RUNNING:
                self._tell(turn, event)
            case Progress() if state is TurnState.RUNNING:
                self._stream.progress(event)
            case Position() if state is TurnState.QUEUED:
                self._move(turn, event.position)
            case Started() if state is TurnState.QUEUED:
                turn.start(event, now=self._around.monotonic())
            case Overflowed():
                self._overflow(turn, event)
            case Finished():
                self._finish(turn, event)
            case Failed():
                self._fail(turn, event)
            case _:
                _log.warning("engine_event_misplaced", engine_event=type(event).__name__, turn=turn.turn_id)

    def _tell(self, turn: Turn, event: Delta) -> None:
        now = self._around.monotonic()
        turn.extend(event, now=now)
        self._around.meter.add(len(event.tokens) // TOKEN_BYTES, now=now)
        if event.text or event.logprobs:
            self._stream.token(event)

    def _move(self, turn: Turn, position: int) -> None:
        if position != turn.position:
            turn.position = position
            self._stream.queued(turn, eta_ms=self._around.eta_ms(position))

    # How it changes.

    def _submit(self, request: Infer, *, overlay: Params, priority: Priority) -> Turn:
        new = messages_of(request)
        around = self._around
        self._history.check_room(new, max_chars=around.max_transcript_chars)
        params = merge(self.facts.params, overlay)
        prompt = next_prompt(self._history, new, renderer=self._renderer, now=around.local_time(), n_keep=params.n_keep)
        warnings = self.facts.warnings(params, chosen=self.facts.chosen | overlay.model_fields_set)
        if params.seed is None:
            params = params.model_copy(update={"seed": around.new_seed()})
        turn = Turn(
            around.new_id("t_"),
            request,
            prompt=prompt,
            params=params,
            rank=PRIORITY_RANK[priority],
            warnings=warnings,
            now=around.monotonic(),
        )
        turn.position = self._hand_over(turn, prompt)
        self._turn = turn
        self._change(SessionChange.TURN_QUEUED)
        self._touch()
        return turn

    def _hand_over(self, turn: Turn, prompt: Prompt) -> int:
        """Submit the turn, or what is left of it, and return its place in the queue."""
        return self._around.engine.submit(
            submission(turn, prompt, facts=self.facts, around=self._around), lambda event: self._hear(turn, event)
        )

    def _overflow(self, turn: Turn, event: Overflowed) -> None:
        """Let the turn go on with a shorter prompt, or end it if it cannot."""
        refusal = None
        if turn.abort_request is None:
            try:
                if self._shift(turn, event):
                    return
            except InferenceCenterError as error:
                refusal = error
        self._end_overflowed(turn, event, refusal)

    def _shift(self, turn: Turn, event: Overflowed) -> bool:
        """Submit the turn again without the oldest ones; ``False`` if there are none to give up."""
        n_ctx = self.facts.n_ctx
        shift = plan_shift(self._history, turn.prompt, total=event.n_tokens, answered=turn.n_tokens, n_ctx=n_ctx)
        if shift is None:
            return False
        now = self._around.local_time()
        prompt = whole_prompt(turn.prompt.messages, shift.view, renderer=self._renderer, now=now)
        position = self._hand_over(turn, prompt)
        turn.shift(prompt, event, now=self._around.monotonic())
        self._stream.context_shifted(turn, shift)
        self._move(turn, position)
        return True

    def _end_overflowed(self, turn: Turn, event: Overflowed, refusal: InferenceCenterError | None) -> None:
        """End a turn whose context is full: what was said of it stays; one that said nothing fails."""
        aborted = turn.abort_request is not None
        if event.end is None and not turn.n_tokens and not aborted:
            self._fail(turn, never_began(event, refusal, n_ctx=self.facts.n_ctx))
            return
        if text := turn.take_held_back(event):
            self._tell(turn, Delta(turn.turn_id, b"", text))
        if event.end is None:
            self._keep(turn, None)
            self._end(turn, turn.cut_short("aborted" if aborted else "context_full", now=self._around.monotonic()))
            return
        reason = "aborted" if aborted else event.end.reason
        warnings = event.end.warnings
        if refusal is not None:
            warnings = (*warnings, f"The context could not be shifted: {refusal.message}")
        self._finish(turn, msgspec.structs.replace(event.end, reason=reason, warnings=warnings))

    def _finish(self, turn: Turn, end: Finished) -> None:
        self._keep(turn, end)
        self._end(turn, turn.reported(end, now=self._around.monotonic()))

    def _keep(self, turn: Turn, end: Finished | None) -> None:
        if turn.abort_request is None or not turn.abort_request.discard:
            self._history = after_turn(
                self._history, turn.prompt, answer=turn.answer, end=end, keeps_end=self._renderer.keeps_end
            )

    def _end(self, turn: Turn, outcome: Outcome) -> None:
        turn.change(TurnChange.ABORT if outcome.finish == "aborted" else TurnChange.FINISH)
        self._turn_is_over()
        event = self._stream.end(turn, outcome)
        self._ledger.record(turn.turn_key, event)
        self._around.turn_ended(outcome.record(self.facts, turn.turn_id))

    def _fail(self, turn: Turn, failure: Failed) -> None:
        turn.change(TurnChange.FAIL)
        self._turn_is_over()
        self._stream.failed(turn, failure)
        outcome = turn.failed(failure, now=self._around.monotonic())
        self._around.turn_ended(outcome.record(self.facts, turn.turn_id))

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

    def _check_idle(self, doing: str) -> None:
        if self._turn is not None:
            raise InferenceCenterError(ErrorCode.SESSION_BUSY, hint=f"{doing} when its turn has ended.")

"""Runs a turn: submits it to the engine and handles all engine events.

A turn outlives the engine process and the daemon. Its ``TurnSpec`` (request, parameters with the seed, rendering time)
is committed with ``queued``, and each batch of generated tokens is committed before its text is published. If the
engine is lost, the turn returns to ``queued`` and is submitted again with the tokens generated so far; a restarted
daemon does the same from its records. An answer that has begun continues only on a model of the same fingerprint; a
turn without tokens may move to another model. If the turn can no longer run (its model is gone, or the engine refuses
it), its partial answer is kept and ends as ``aborted``. Invariant: a turn has exactly one terminal event, and text that
was published is never revised.

An unexpected exception ends only the turn that raised it: every call from the engine side runs in ``_contain``, which
fails the turn with ``internal``, returns its session to idle and aborts the turn in the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
import structlog

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.messages import (
    Cancelled,
    ContextFull,
    Failed,
    Finished,
    PrefillProgress,
    QueuePosition,
    Started,
    TokenDelta,
)
from inferencecenter.sessions.client import check_model
from inferencecenter.sessions.history import TOKEN_BYTES
from inferencecenter.sessions.journal import TurnQueued
from inferencecenter.sessions.observability import end_trace, trace_turn
from inferencecenter.sessions.prompt.plan import (
    after_turn,
    messages_of,
    plan_context_shift,
    prompt_of,
    unrendered_prompt,
)
from inferencecenter.sessions.states import TurnChange, TurnState
from inferencecenter.sessions.turn_spec import (
    check_fits,
    failure_of,
    prompt_too_long,
    render_input,
    spec_for_model,
    submission,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferencecenter.ipc.messages import Submit, TurnEvent
    from inferencecenter.protocol.requests import Abort
    from inferencecenter.sessions.event_log import EventLog
    from inferencecenter.sessions.history import History
    from inferencecenter.sessions.journal import TurnSpec
    from inferencecenter.sessions.model_router import ServedModel
    from inferencecenter.sessions.prompt.plan import PromptPlan
    from inferencecenter.sessions.prompt.renderer import RenderResult
    from inferencecenter.sessions.session_config import SessionConfig, SessionServices
    from inferencecenter.sessions.turn import Turn, TurnOutcome

_FORCED_FINISHES: Final = ("aborted", "quota_exceeded")

_log = structlog.get_logger(__name__)


class TurnListener(Protocol):
    """What a running turn requires of its session."""

    def prefill_started(self, turn: Turn, *, prompt_tokens: int, cached_tokens: int) -> None:
        """Record the usage of a prompt that is about to be prefilled, with its cached tokens."""

    def tokens_appended(self, turn: Turn) -> None:
        """Handle new tokens of the answer."""

    def turn_ended(self, turn: Turn, history: History, outcome: TurnOutcome) -> None:
        """Commit the history after the turn and publish its end."""

    def turn_failed(self, turn: Turn, failure: Failed, outcome: TurnOutcome) -> None:
        """Publish the failure of the turn, which leaves the history unchanged."""

    def turn_broken(self, turn: Turn, failure: Failed, outcome: TurnOutcome) -> None:
        """Publish the failure after an internal error, at any point of the turn's end."""


class TurnRunner:
    """Implements ``ipc.port.EngineTurn`` for a turn of a session.

    Args:
        turn: The turn to run.
        history: The history before the turn; it does not change until the turn ends.
        listener: Receives the turn's usage and its end.
        event_log: The event log of the session.
        config: The configuration of the session.
        services: The services of the daemon.
    """

    def __init__(  # noqa: PLR0913 - keyword-only
        self,
        turn: Turn,
        *,
        history: History,
        listener: TurnListener,
        event_log: EventLog,
        config: SessionConfig,
        services: SessionServices,
    ) -> None:
        self.turn = turn
        self._history = history
        self._listener = listener
        self._events = event_log
        self._config = config
        self._services = services
        self._cannot_resume = False
        # Whether the context was shifted and the shortened prompt is not prefilled yet.
        self._shifted = False
        self._rendering: _Rendering | None = None
        self._is_counted = False
        self._has_ended = False
        self._quota = services.quota_of(config.client_id, turn.spec.token_id)
        # Set when the turn is submitted.
        self._serving: ServedModel | None = None
        turn.trace = trace_turn(services.tracer, config, turn.spec, restored_tokens=turn.n_tokens)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.turn!r})"

    @property
    def turn_id(self) -> str:
        """The turn's id."""
        return self.turn.turn_id

    @property
    def client_id(self) -> str:
        """The client that owns the turn."""
        return self._config.client_id

    @property
    def n_tokens(self) -> int:
        """Tokens generated so far."""
        return self.turn.n_tokens

    # Calls of the engine port.

    def prepare(self, then: Callable[[], None]) -> bool:
        """Return whether the prompt is rendered for the serving model; if not, render it and then call ``then``.

        Raises:
            InferenceCenterError: ``model_not_found`` when the answer was begun by another model, ``nothing_to_abort``
                for a turn that has ended, or the error of the template.
        """
        try:
            return self._ensure_prompt(then)
        except InferenceCenterError:
            self._cannot_resume = self.turn.n_tokens > 0
            raise

    def submission(self) -> Submit:
        """Return the submission of the turn, or of its remainder.

        Raises:
            InferenceCenterError: See ``prepare``.
        """
        prepared = self.prepare(_noop)
        assert prepared, "the engine requests it after prepare() returned True"
        assert self.turn.prompt is not None
        return submission(self.turn, self.turn.prompt, config=self._config, services=self._services)

    def on_engine_event(self, event: TurnEvent) -> None:
        """Handle an event; events after the end of the turn are late and ignored."""
        if not self.turn.state.is_terminal:
            self._contain(lambda: self._dispatch(event))

    def _dispatch(self, event: TurnEvent) -> None:
        turn, state = self.turn, self.turn.state
        match event:
            case TokenDelta():
                self._append(event)
            case PrefillProgress() if state is TurnState.RUNNING:
                self._events.publish_transient(self._events.progress(event))
            case QueuePosition() if state is TurnState.QUEUED:
                self._set_position(event.position)
            case Started() if state is TurnState.QUEUED:
                self._start(event)
            case ContextFull():
                self._on_context_full(event)
            case Finished():
                self._finish(event)
            case Cancelled():
                self._end_early(turn.forced_finish or "aborted")
            case Failed():
                self._fail(event)
            case _:
                _log.warning("engine_event_misplaced", engine_event=type(event).__name__, turn=turn.turn_id)

    def on_delay(self, seconds: float) -> None:
        """Publish the minimum delay until the turn's model can be loaded."""
        if self.turn.state is TurnState.QUEUED:
            self._contain(lambda: self._events.publish_transient(self._events.queued(self.turn, eta_ms=1000 * seconds)))

    def on_engine_lost(self) -> None:
        """Return to the queue after the loss of the engine."""
        if not self.turn.state.is_terminal:
            self._contain(lambda: self.turn.interrupt(now=self._services.monotonic()))

    def resubmit(self) -> None:
        """Submit the turn again, to the engine that serves its model now, and publish its position."""
        self._contain(self._recall)

    def _recall(self) -> None:
        if not self.turn.state.is_terminal:
            self.turn.recall(now=self._services.monotonic())
            self._submit_again()
        if not self.turn.state.is_terminal:
            self._publish_queued(request_id=None)

    # Calls of the session.

    def submit(self) -> None:
        """Submit a new turn; it is not published yet.

        Raises:
            InferenceCenterError: See ``prepare`` and ``Quota.check_turn``, or the error of the engine.
        """
        self._quota.check_turn()
        self._serving = self._choose_model()
        try:
            self.prepare(_noop)  # also while no engine is running
            self.turn.position = self._serving.engine.submit(self)
        except InferenceCenterError:
            self._cancel_rendering()
            raise
        self._quota.begin_turn()
        self._is_counted = True

    def send_queued(self, *, request_id: str | None) -> None:
        """Commit the turn and acknowledge it."""
        self._contain(lambda: self._publish_queued(request_id=request_id))

    def _publish_queued(self, *, request_id: str | None) -> None:
        queued = self._events.queued(self.turn, eta_ms=self._eta_ms(), request_id=request_id)
        self._events.publish(queued, self._queued_record(queued.seq))

    def recover(self) -> None:
        """Resubmit a turn left pending by an earlier daemon."""
        self._quota.resume_turn(self.turn.n_tokens)
        self._is_counted = True
        self._contain(self._submit_again)

    def _submit_again(self) -> None:
        """Submit the turn again; if the engine refuses it, the partial answer is kept."""
        try:
            self._serving = self._choose_model()
            self.turn.position = self._serving.engine.submit(self)
        except InferenceCenterError as error:
            self._cannot_resume = self.turn.n_tokens > 0
            self._fail(failure_of(self.turn_id, error))

    def resend_queued(self, *, request_id: str | None) -> None:
        """Publish the position of the turn again."""
        self._events.publish_transient(self._events.queued(self.turn, eta_ms=self._eta_ms(), request_id=request_id))

    def abort(self, request: Abort) -> None:
        """Abort the turn in the engine; its ``end`` answers the request.

        Raises:
            InferenceCenterError: See ``Turn.request_abort``.
        """
        self.turn.request_abort(request)
        self._model.engine.abort(self.turn_id)

    def cancel(self) -> None:
        """End the turn without waiting for the engine; the history stays unchanged."""
        self._contain(
            lambda: self._complete(self._history, self.turn.forced_outcome("aborted", now=self._services.monotonic()))
        )
        self._model.engine.abort(self.turn_id)

    # Prompt.

    def _ensure_prompt(self, then: Callable[[], None]) -> bool:
        turn, serving = self.turn, self._model
        if turn.state.is_terminal:
            raise InferenceCenterError(ErrorCode.NOTHING_TO_ABORT, f"turn {turn.turn_id} has ended")
        model_fingerprint = serving.fingerprint()
        if turn.prompt is not None and turn.spec.model_fingerprint == model_fingerprint:
            return True
        if turn.n_tokens and turn.spec.model_fingerprint != model_fingerprint:
            raise InferenceCenterError(ErrorCode.MODEL_NOT_FOUND, "The model that began this answer is not loaded.")
        rendering = self._rendering
        if rendering is None or not rendering.matches(turn.spec, model_fingerprint):
            self._cancel_rendering()
            rendering = self._rendering = self._render(serving, model_fingerprint)
        rendering.then = then
        if rendering.result is None:
            return False
        self._set_prompt(rendering, rendering.result)
        return True

    def _render(self, serving: ServedModel, model_fingerprint: str) -> _Rendering:
        requested_spec = self.turn.spec
        spec = spec_for_model(self.turn, serving, config=self._config, services=self._services)
        history = self._history.for_model(model_fingerprint)
        plan, conversation = render_input(spec, history)
        check_fits(plan, serving.model(), may_shift=self._config.on_full == "shift")
        renderer = serving.renderer(self._config.mode)
        rendering = _Rendering(requested_spec, model_fingerprint, spec, history, plan, renderer.implied_bos)
        rendering.cancel = renderer.render(conversation, client_id=self._config.client_id, done=rendering.finish)
        return rendering

    def _set_prompt(self, rendering: _Rendering, result: RenderResult) -> None:
        if isinstance(result, InferenceCenterError):
            raise result
        prompt = prompt_of(rendering.history, rendering.plan, result, implied_bos=rendering.implied_bos)
        self.turn.set_prompt(prompt, rendering.spec, capabilities=result.capabilities)
        self._history = rendering.history
        self._rendering = None
        if rendering.spec != rendering.requested_spec:
            self._events.write(self._queued_record(self._events.seq))

    def _cancel_rendering(self) -> None:
        rendering, self._rendering = self._rendering, None
        if rendering is not None:
            rendering.cancel()

    # Model.

    @property
    def _model(self) -> ServedModel:
        assert self._serving is not None, "the turn was submitted"
        return self._serving

    def _choose_model(self) -> ServedModel:
        """Return the model that began the answer, or the session's current model if there is no answer yet.

        Raises:
            InferenceCenterError: ``model_not_found``, or ``forbidden`` if the token may not use the current model.
        """
        name = self.turn.spec.model
        if self.turn.n_tokens:
            return self._services.models.resolve(name or None)
        serving = self._services.models.resolve(self._config.chosen_model)
        if serving.name != name:
            check_model(serving.name, self._quota.limits)
        return serving

    # Progress and end.

    def _start(self, event: Started) -> None:
        turn, self._shifted = self.turn, False
        before = turn.prompt_usage
        n_tokens = turn.start(event, now=self._services.monotonic())
        read, cached = (now - then for now, then in zip(turn.prompt_usage, before, strict=True))
        if read:
            self._listener.prefill_started(turn, prompt_tokens=read, cached_tokens=cached)
        self._count_tokens(n_tokens)

    def _append(self, event: TokenDelta) -> None:
        now, n_tokens = self._services.monotonic(), len(event.tokens) // TOKEN_BYTES
        turn = self.turn
        turn.extend(event, now=now)
        self._services.meter.add(n_tokens, now=now)
        if turn.assembler is None:
            self._events.publish_text(event)
        else:
            self._events.publish_parts(event, turn.assembler.feed(event))
        self._listener.tokens_appended(turn)
        self._count_tokens(n_tokens)

    def _count_tokens(self, n_tokens: int) -> None:
        """Count used tokens; the last token of the daily quota ends the turn."""
        if n_tokens and not self._quota.use(n_tokens) and self.turn.forced_finish is None:
            self.turn.out_of_quota = True
            self._model.engine.abort(self.turn_id)

    def _set_position(self, position: int) -> None:
        if position != self.turn.position:
            self.turn.position = position
            self.resend_queued(request_id=None)

    def _on_context_full(self, event: ContextFull) -> None:
        """Shift the context and continue, or end the turn if that is not possible."""
        refusal = None
        if self.turn.forced_finish is None:
            try:
                if self._shift(event):
                    return
            except InferenceCenterError as error:
                refusal = error
        self._end_context_full(event, refusal)

    def _shift(self, event: ContextFull) -> bool:
        """Submit the turn again without its oldest turns; return ``False`` if there are none to drop."""
        turn, services, prompt = self.turn, self._services, self.turn.prompt
        assert prompt is not None, "the turn was submitted with a prompt"
        engine, n_ctx = self._model.engine, self._model.model().n_ctx
        shift = plan_context_shift(self._history, prompt, total=event.n_tokens, answered=turn.n_tokens, n_ctx=n_ctx)
        if shift is None:
            return False
        before = turn.spec
        turn.spec = replace(before, rendered_at=services.local_time().isoformat(), view=shift.view)
        turn.prompt = None
        try:
            position = engine.submit(self)
        except InferenceCenterError:
            turn.spec, turn.prompt = before, prompt
            raise
        self._shifted = True
        turn.shift(event, now=services.monotonic())
        shifted = self._events.context_shifted(turn, shift)
        self._events.publish(shifted, self._queued_record(shifted.seq))
        self._set_position(position)
        return True

    def _end_context_full(self, event: ContextFull, refusal: InferenceCenterError | None) -> None:
        """End a turn whose context is full: a partial answer is kept, a turn without one fails."""
        turn, cut = self.turn, self.turn.forced_finish
        if event.end is None and not turn.n_tokens and cut is None:
            self._fail(prompt_too_long(event, refusal, n_ctx=self._model.model().n_ctx))
            return
        if event.end is None:
            self._end_early(cut or "context_full")
            return
        if event.text:
            self._append(TokenDelta(turn.turn_id, b"", event.text))
        reason, warnings = cut or event.end.reason, event.end.warnings
        if refusal is not None:
            warnings = (*warnings, f"The context could not be shifted: {refusal.message}")
        self._finish(msgspec.structs.replace(event.end, reason=reason, warnings=warnings))

    def _finish(self, end: Finished) -> None:
        self._flush()
        self.turn.trace.add_stages(end.stages)
        self._complete(self._final_history(end), self.turn.finished_outcome(end, now=self._services.monotonic()))

    def _end_early(self, finish: str, *warnings: str) -> None:
        """End the turn with its partial answer, without a final report of the engine."""
        self._flush()
        self._complete(
            self._final_history(None),
            self.turn.forced_outcome(finish, now=self._services.monotonic(), warnings=warnings),
        )

    def _fail(self, failure: Failed) -> None:
        """Fail the turn; a partial answer is kept only if the turn was being ended anyway or cannot be retried."""
        turn = self.turn
        if self._cannot_resume and self._shifted:
            self._end_early("context_full", f"The context could not be shifted: {failure.message}")
        elif self._cannot_resume:
            self._end_early("aborted", f"The answer could not be continued: {failure.message}")
        elif turn.forced_finish is not None:
            self._end_early(turn.forced_finish)
        else:
            turn.change(TurnChange.FAIL)
            outcome = turn.failed_outcome(failure, now=self._services.monotonic())
            turn.trace.add_stages(failure.stages)
            end_trace(turn, outcome, failed=True)
            self._release()
            self._listener.turn_failed(turn, failure, outcome)
            self._has_ended = True

    def _complete(self, history: History, outcome: TurnOutcome) -> None:
        self.turn.change(TurnChange.ABORT if outcome.finish in _FORCED_FINISHES else TurnChange.FINISH)
        end_trace(self.turn, outcome)
        self._release()
        self._listener.turn_ended(self.turn, history, outcome)
        self._has_ended = True

    def _release(self) -> None:
        self._cancel_rendering()
        if self._is_counted:
            self._is_counted = False
            self._quota.end_turn()

    # Containment of internal errors.

    def _contain(self, work: Callable[[], None]) -> None:
        """Run a part of the turn; an exception ends this turn and no other."""
        try:
            work()
        except Exception:  # noqa: BLE001 - the border between the turns
            _log.exception("turn_broken", turn=self.turn_id, session=self._config.session_id)
            try:
                self._end_broken()
            except Exception:  # noqa: BLE001 - the session is idle all the same
                _log.exception("turn_end_untold", turn=self.turn_id, session=self._config.session_id)

    def _end_broken(self) -> None:
        """Fail the turn with ``internal``, unless its end was published, and abort it in the engine."""
        if self._has_ended:
            return
        self._has_ended = True
        self._cancel_rendering()
        turn = self.turn
        if not turn.state.is_terminal:
            turn.change(TurnChange.FAIL)
        self._release()
        failure = failure_of(self.turn_id, InferenceCenterError(ErrorCode.INTERNAL))
        try:
            self._listener.turn_broken(turn, failure, turn.failed_outcome(failure, now=self._services.monotonic()))
        finally:
            if self._serving is not None:
                self._serving.engine.abort(self.turn_id)

    def _flush(self) -> None:
        """Publish the remaining text of a turn that ends.

        While the turn waits to resume, the engine has not repeated the text it held back; and an incomplete marker
        turns out to be plain text.
        """
        if text := self.turn.take_held_back():
            self._append(TokenDelta(self.turn_id, b"", text))
        if self.turn.assembler is not None and (rest := self.turn.assembler.finish()).parts:
            self._events.publish_parts(TokenDelta(self.turn_id, b"", ""), rest)

    def _final_history(self, end: Finished | None) -> History:
        turn = self.turn
        if turn.abort_request is not None and turn.abort_request.discard:
            return self._history
        prompt = turn.prompt
        if prompt is None:
            prompt = unrendered_prompt(self._history, messages_of(turn.spec.request), turn.spec.view)
        keeps_end = self._config.mode != "raw"
        return after_turn(self._history, prompt, answer=turn.answer, end=end, keeps_end=keeps_end)

    def _queued_record(self, seq: int) -> TurnQueued:
        return TurnQueued(
            session_id=self._config.session_id, seq=seq, last_used_at=self._services.clock(), spec=self.turn.spec
        )

    def _eta_ms(self) -> float | None:
        return self._services.eta_ms(self._model, self.turn.position)


@dataclass(slots=True)
class _Rendering:
    """A prompt being rendered for the turn spec ``requested_spec`` by the model ``model_fingerprint``.

    It becomes the prompt of ``spec`` on top of ``history``. ``then`` is called when the ``result`` arrives later than
    the call.
    """

    requested_spec: TurnSpec
    model_fingerprint: str
    spec: TurnSpec
    history: History
    plan: PromptPlan
    implied_bos: str
    then: Callable[[], None] | None = None
    result: RenderResult | None = None
    cancel: Callable[[], None] = lambda: None

    def matches(self, spec: TurnSpec, model_fingerprint: str) -> bool:
        return self.requested_spec is spec and self.model_fingerprint == model_fingerprint

    def finish(self, result: RenderResult) -> None:
        self.result = result
        if self.then is not None:
            self.then()


def _noop() -> None:
    pass

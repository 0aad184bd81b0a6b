"""Runs a turn: submits it to the engine and handles all engine events.

A turn outlives the engine process and the daemon. Its ``TurnSpec`` (request, parameters with the seed, rendering time)
is committed with ``queued``, and each batch of generated tokens is committed before its text is published. If the
engine is lost, the turn returns to ``queued`` and is submitted again with the tokens generated so far; a restarted
daemon does the same from its records. An answer that has begun continues only on a model of the same fingerprint; a
turn without tokens may move to another model. If the turn can no longer run (its model is gone, or the engine refuses
it), its partial answer is kept and ends as ``aborted``. Invariant: a turn has exactly one terminal event, and text that
was published is never revised.

An unexpected exception ends only the turn that raised it: calls from the engine side are ``_contained``:
one that raises fails the turn with ``internal``, returns its session to idle and aborts the turn in the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, Final, ParamSpec, Protocol

import msgspec
import structlog

from inferencecenter.core.errors import ErrorCode, InferenceCenterError, prompt_too_long
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
from inferencecenter.ipc.port import SessionKv
from inferencecenter.sessions.context import check_model
from inferencecenter.sessions.history import TOKEN_BYTES
from inferencecenter.sessions.journal import TurnQueued
from inferencecenter.sessions.observability import end_trace, trace_turn
from inferencecenter.sessions.prompt.plan import (
    after_turn,
    check_fits,
    check_sees,
    plan_context_shift,
    plan_prompt,
    prompt_of,
    unrendered_prompt,
)
from inferencecenter.sessions.states import TurnChange, TurnState
from inferencecenter.sessions.turn import spec_for_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferencecenter.ipc.messages import Submit, TurnEvent
    from inferencecenter.protocol.requests import Abort, Infer
    from inferencecenter.sessions.context import Quota, SessionConfig, SessionServices
    from inferencecenter.sessions.event_log import EventLog
    from inferencecenter.sessions.history import History
    from inferencecenter.sessions.model_router import LoadedModel, ServedModel
    from inferencecenter.sessions.prompt.plan import PromptPlan
    from inferencecenter.sessions.prompt.renderer import RenderResult
    from inferencecenter.sessions.turn import Turn, TurnOutcome, TurnSpec

COUNTED_TOKENS: Final = 256
"""Tokens of an answer after which the usage of a session that is not stored is recorded."""
_FORCED_FINISHES: Final = ("aborted", "quota_exceeded")
_P = ParamSpec("_P")

_log = structlog.get_logger(__name__)


class TurnListener(Protocol):
    """What a running turn requires of its session."""

    def prefill_started(self, turn: Turn, *, prompt_tokens: int, cached_tokens: int) -> None:
        """Record the usage of a prompt that is about to be prefilled, with its cached tokens."""

    def answer_counted(self, turn: Turn) -> None:
        """Record the usage of another ``COUNTED_TOKENS`` of an answer that is not stored."""

    def turn_ended(self, turn: Turn, history: History, outcome: TurnOutcome) -> None:
        """Commit the history after the turn and publish its end."""

    def turn_failed(self, turn: Turn, failure: Failed, outcome: TurnOutcome) -> None:
        """Publish the failure of the turn, which leaves the history unchanged."""

    def turn_broken(self, turn: Turn, failure: Failed, outcome: TurnOutcome) -> None:
        """Publish the failure after an internal error, at any point of the turn's end."""


def _contained(call: Callable[Concatenate[TurnRunner, _P], None]) -> Callable[Concatenate[TurnRunner, _P], None]:
    """Have an exception of a call end its turn and no other."""

    @wraps(call)
    def contained(runner: TurnRunner, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            call(runner, *args, **kwargs)
        except Exception:  # noqa: BLE001 - the border between the turns
            runner._end_broken()

    return contained


class TurnRunner:
    """Implements ``ipc.port.EngineTurn`` for a turn of a session.

    Args:
        turn: The turn to run.
        quota: The rate limits and quota of its token.
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
        quota: Quota,
        history: History,
        listener: TurnListener,
        event_log: EventLog,
        config: SessionConfig,
        services: SessionServices,
    ) -> None:
        self.turn = turn
        self.turn_id = turn.turn_id
        self.client_id = config.client_id
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
        self._quota = quota
        # Set when the turn is submitted.
        self._serving: ServedModel | None = None
        turn.trace = trace_turn(services.tracer, config, turn.spec, restored_tokens=turn.n_tokens)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.turn!r})"

    @property
    def n_tokens(self) -> int:
        """Tokens generated so far."""
        return self.turn.n_tokens

    @property
    def session_kv(self) -> SessionKv:
        """The KV of the session, or of its parent."""
        n_tokens = self._history.n_tokens + self.turn.n_tokens
        return SessionKv(self._config.session_id, n_tokens, self._config.forked_from)

    # Calls of the engine port.

    def submission(self, then: Callable[[], None]) -> Submit | None:
        """Return the turn, or its remainder, for the model that serves it; ``None`` while its prompt is rendered.

        Raises:
            InferenceCenterError: ``model_not_found`` when the answer was begun by another model, ``nothing_to_abort``
                for a turn that has ended, or the error of the template.
        """
        try:
            if not self._is_rendered(then):
                return None
        except InferenceCenterError:
            self._cannot_resume = self.turn.n_tokens > 0
            raise
        services = self._services
        return self.turn.submission(
            self._config, shared_prompts=services.settings.shared_prompts, now=services.monotonic()
        )

    @_contained
    def on_engine_event(self, event: TurnEvent) -> None:
        """Handle an event; events after the end of the turn are late and ignored."""
        if self._has_ended:
            return
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
                self._fail(_with_field(event, turn.spec.request))
            case _:
                _log.warning("engine_event_misplaced", engine_event=type(event).__name__, turn=turn.turn_id)

    @_contained
    def on_placed(self, node: str) -> None:
        """Record the machine of the engine that is to run the turn."""
        self.turn.place(node)

    @_contained
    def on_delay(self, seconds: float) -> None:
        """Publish the minimum delay until the turn's model can be loaded."""
        if self.turn.state is TurnState.QUEUED:
            self._events.publish_transient(self._events.queued(self.turn, eta_ms=1000 * seconds))

    @_contained
    def on_engine_lost(self) -> None:
        """Return to the queue after the loss of the engine."""
        if not self._has_ended:
            self.turn.interrupt(now=self._services.monotonic())

    @_contained
    def resubmit(self) -> None:
        """Submit the turn again, to the engine that serves its model now, and publish its position."""
        if not self._has_ended:
            self.turn.recall(now=self._services.monotonic())
            self._submit_again()
        if not self._has_ended:
            self._publish_queued(request_id=None)

    # Calls of the session.

    def submit(self, serving: ServedModel, loaded: LoadedModel) -> None:
        """Submit a new turn to the model that its spec was made for; it is not published yet.

        Raises:
            InferenceCenterError: See ``submission`` and ``Quota.check_turn``, or the error of the engine.
        """
        self._quota.check_turn()
        self._serving = serving
        try:
            self._take_prompt(self._render(loaded))  # also while no engine is running
            self.turn.position = serving.engine.submit(self)
        except InferenceCenterError:
            self._cancel_rendering()
            raise
        self._quota.begin_turn()
        self._is_counted = True

    @_contained
    def send_queued(self, *, request_id: str | None) -> None:
        """Commit the turn and acknowledge it."""
        self._publish_queued(request_id=request_id)

    def _publish_queued(self, *, request_id: str | None) -> None:
        queued = self._events.queued(self.turn, eta_ms=self._eta_ms(), request_id=request_id)
        self._events.publish(queued, self._queued_record(queued.seq))

    @_contained
    def recover(self) -> None:
        """Resubmit a turn left pending by an earlier daemon."""
        self._quota.resume_turn(self.turn.n_tokens)
        self._is_counted = True
        self._submit_again()

    def _submit_again(self) -> None:
        """Submit the turn again; if the engine refuses it, the partial answer is kept."""
        try:
            self._serving = self._choose_model()
            self.turn.position = self._serving.engine.submit(self)
        except InferenceCenterError as error:
            self._cannot_resume = self.turn.n_tokens > 0
            self._fail(_failure_of(self.turn_id, error))

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

    @_contained
    def cancel(self) -> None:
        """End the turn without waiting for the engine; the history stays unchanged."""
        self._complete(self._history, self.turn.forced_outcome("aborted", now=self._services.monotonic()))
        self._model.engine.abort(self.turn_id)

    # Prompt.

    def _is_rendered(self, then: Callable[[], None]) -> bool:
        """Return whether the prompt is rendered for the model; if not, render it and then call ``then``."""
        if self._has_ended:
            raise InferenceCenterError(ErrorCode.NOTHING_TO_ABORT, f"turn {self.turn_id} has ended")
        turn, loaded = self.turn, self._model.loaded()
        is_its_model = turn.spec.model_fingerprint == loaded.fingerprint
        if turn.prompt is not None and is_its_model:
            return True
        if turn.n_tokens and not is_its_model:
            raise InferenceCenterError(ErrorCode.MODEL_NOT_FOUND, "The model that began this answer is not loaded.")
        rendering = self._rendering
        if rendering is None or not rendering.matches(turn.spec, loaded.fingerprint):
            self._cancel_rendering()
            rendering = self._render(loaded)
        rendering.then = then
        return self._take_prompt(rendering)

    def _render(self, loaded: LoadedModel) -> _Rendering:
        """Start to render the prompt for a model."""
        turn, config, name = self.turn, self._config, self._model.name
        spec = turn.spec
        if spec.model_fingerprint != loaded.fingerprint:
            spec = spec_for_model(spec, name, loaded.fingerprint, config=config, services=self._services)
        elif spec.model != name:
            spec = replace(spec, model=name)
        history = self._history.for_model(loaded.fingerprint)
        plan, conversation = plan_prompt(history, turn.messages, spec)
        check_sees(conversation, loaded.info, seeing=self._services.models.seeing)
        check_fits(conversation, loaded.info, kept=plan.view.kept, may_shift=config.on_full == "shift")
        renderer = loaded.renderer(config.mode)
        rendering = _Rendering(turn.spec, loaded.fingerprint, spec, history, plan, renderer.implied_bos)
        rendering.cancel = renderer.render(conversation, client_id=config.client_id, done=rendering.finish)
        self._rendering = rendering
        return rendering

    def _take_prompt(self, rendering: _Rendering) -> bool:
        """Set the prompt of the turn; return ``False`` while it is rendered.

        Raises:
            InferenceCenterError: The error of the template, or see ``Turn.set_prompt``.
        """
        if (result := rendering.result) is None:
            return False
        if isinstance(result, InferenceCenterError):
            raise result
        prompt = prompt_of(
            rendering.history,
            rendering.plan,
            result,
            implied_bos=rendering.implied_bos,
            prefix=rendering.spec.request.prefix or "",
        )
        self.turn.set_prompt(prompt, rendering.spec, capabilities=result.capabilities)
        self._history = rendering.history
        self._rendering = None
        if rendering.spec is not rendering.requested_spec:
            self._events.write(self._queued_record(self._events.seq))
        return True

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
        self._services.metrics.meter.add(n_tokens, now=now)
        if turn.assembler is None:
            self._events.publish_text(event)
        else:
            self._events.publish_parts(event, turn.assembler.feed(event))
        if not self._config.store and turn.n_tokens - turn.counted_tokens >= COUNTED_TOKENS:
            self._listener.answer_counted(turn)
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
        engine, n_ctx = self._model.engine, self._model.loaded().info.n_ctx
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
            self._fail(_prompt_too_long(event, refusal, n_ctx=self._model.loaded().info.n_ctx))
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

    def _end_broken(self) -> None:
        """End the turn after an internal error, which is logged with the exception that is being handled.

        It fails with ``internal``, unless its end was published, and is aborted in the engine.
        """
        _log.exception("turn_broken", turn=self.turn_id, session=self._config.session_id)
        if self._has_ended:
            return
        self._has_ended = True
        try:
            self._cancel_rendering()
            turn = self.turn
            if not turn.state.is_terminal:
                turn.change(TurnChange.FAIL)
            self._release()
            failure = _failure_of(self.turn_id, InferenceCenterError(ErrorCode.INTERNAL))
            try:
                self._listener.turn_broken(turn, failure, turn.failed_outcome(failure, now=self._services.monotonic()))
            finally:
                if self._serving is not None:
                    self._serving.engine.abort(self.turn_id)
        except Exception:  # noqa: BLE001 - the session is idle all the same
            _log.exception("turn_end_untold", turn=self.turn_id, session=self._config.session_id)

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
            prompt = unrendered_prompt(self._history, turn.messages, turn.spec.view)
        keeps_end = self._config.mode != "raw"
        return after_turn(self._history, prompt, answer=turn.answer, end=end, keeps_end=keeps_end)

    def _queued_record(self, seq: int) -> TurnQueued:
        return TurnQueued(
            session_id=self._config.session_id, seq=seq, last_used_at=self._services.clock(), spec=self.turn.spec
        )

    def _eta_ms(self) -> float | None:
        return self._services.metrics.eta_ms(self._model, self.turn.position)


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
    then: Callable[[], None] = lambda: None
    result: RenderResult | None = None
    cancel: Callable[[], None] = lambda: None

    def matches(self, spec: TurnSpec, model_fingerprint: str) -> bool:
        return self.requested_spec is spec and self.model_fingerprint == model_fingerprint

    def finish(self, result: RenderResult) -> None:
        self.result = result
        self.then()


def _failure_of(turn_id: str, error: InferenceCenterError) -> Failed:
    return Failed(turn_id=turn_id, code=error.code.value, message=error.message, hint=error.hint, field=error.field)


def _with_field(failure: Failed, request: Infer) -> Failed:
    """Return a failure with the field of the grammar that the engine refused, if only one can have been."""
    forms = [name for name in ("json_schema", "regex", "grammar") if getattr(request, name) is not None]
    fields = ["tools", *forms] if request.tools else forms
    if failure.code != ErrorCode.INVALID_GRAMMAR or failure.field is not None or len(fields) != 1:
        return failure
    return msgspec.structs.replace(failure, field=fields[0])


def _prompt_too_long(event: ContextFull, refusal: InferenceCenterError | None, *, n_ctx: int) -> Failed:
    """Return the failure of a turn whose prompt does not fit and cannot be shortened.

    Args:
        event: The report of the engine.
        refusal: Why the shortened prompt was refused, if it was.
        n_ctx: Maximum tokens of prompt and answer.
    """
    error = refusal or prompt_too_long(f"{event.n_tokens} tokens and cannot be made shorter", n_ctx=n_ctx)
    return Failed(turn_id=event.turn_id, code=error.code.value, message=error.message, hint=error.hint)

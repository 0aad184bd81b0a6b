"""A turn as its session keeps it: the spec that is stored, and the state from acceptance to the terminal event.

A ``TurnSpec`` is everything required to run the turn, or the rest of it, on any engine of any daemon: ``new_turn_spec``
resolves it once from the request, the client's limits and the model. ``submission`` builds the engine's request from
both.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.images import ImageRef
from inferencecenter.ipc.messages import Submit
from inferencecenter.models.registry import LOCAL_NODE
from inferencecenter.protocol.params import Params, encode, merge, parse_params
from inferencecenter.protocol.values import TurnStats
from inferencecenter.sessions.context import PRIORITY_RANK, bound_max_tokens, check_model
from inferencecenter.sessions.history import TOKEN_BYTES
from inferencecenter.sessions.observability import NullTracer, TurnRecord
from inferencecenter.sessions.output_parsing.assembler import ResponseAssembler, assembler_for
from inferencecenter.sessions.output_parsing.output_spec import (
    EnforceableSchemas,
    OutputSpec,
    enforceable_schemas,
    output_spec,
)
from inferencecenter.sessions.prompt.plan import GeneratedAnswer
from inferencecenter.sessions.states import TURN, TurnChange, TurnState

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from inferencecenter.config.limits import AccessLimits
    from inferencecenter.ipc.messages import ContextFull, Failed, Finished, Started, TokenDelta
    from inferencecenter.protocol.requests import Abort, Infer
    from inferencecenter.protocol.values import ChatMessage
    from inferencecenter.sessions.context import Principal, SessionConfig, SessionServices
    from inferencecenter.sessions.history import HistoryView
    from inferencecenter.sessions.journal import PendingTurn
    from inferencecenter.sessions.model_router import LoadedModel, ServedModel
    from inferencecenter.sessions.observability import TurnSpan
    from inferencecenter.sessions.output_parsing.call_format import TemplateCapabilities
    from inferencecenter.sessions.prompt.plan import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSpec:
    """Everything required to run a turn, or the rest of it, that has not ended.

    ``warnings`` concern its parameters; ``rank`` is its priority in the order of the engine. ``submitted_at`` is Unix
    seconds. ``rendered_at`` is the local time given to the template, in ISO 8601 with offset. ``model`` is the name of
    the model, empty in old records, and ``model_fingerprint`` identifies its tokens. ``view`` selects the messages in
    the context once it was shifted. ``token_id`` is the access token charged for the turn, empty for a client with a
    key. ``note`` is private text of the requester. ``schemas`` are derived from the request; a spec that was loaded has
    none.
    """

    turn_id: str
    request: Infer
    params: Params
    rank: int
    warnings: tuple[str, ...]
    submitted_at: float
    rendered_at: str
    model: str
    model_fingerprint: str
    view: HistoryView | None = None
    token_id: str = ""
    note: str = ""
    schemas: EnforceableSchemas | None = field(default=None, repr=False, compare=False)


def new_turn_spec(  # noqa: PLR0913 - keyword-only
    request: Infer,
    client: Principal,
    *,
    note: str,
    serving: ServedModel,
    limits: AccessLimits,
    config: SessionConfig,
    services: SessionServices,
) -> tuple[TurnSpec, LoadedModel]:
    """Return the spec of a new turn within the limits of its token, and the model that it was made for.

    Raises:
        InferenceCenterError: ``invalid_request`` for conflicting or excessive parameters and for ``infill`` in a chat,
            ``model_loading``, ``engine_unavailable`` or ``forbidden``, and see ``enforceable_schemas``.
    """
    own = turn_params(request)
    if request.infill is not None and config.mode != "raw":
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST, 'only sessions with mode "raw" support infill', field="infill"
        )
    priority = client.allow_priority(request.priority, otherwise=config.priority)
    check_model(serving.name, limits)
    loaded = serving.loaded(config.client_id)
    below = services.models.params(config, serving.name)
    overlay = bound_max_tokens(own, limits, session=below, chosen=config.chosen)
    params = merge(below, overlay)
    schemas = enforceable_schemas(request, services.schemas)
    warnings = (*schemas.warnings, *config.warnings(params, chosen=config.chosen | overlay.model_fields_set))
    if params.seed is None:
        params = params.model_copy(update={"seed": services.new_seed()})
    spec = TurnSpec(
        turn_id=services.new_id("t_"),
        request=request,
        params=params,
        rank=PRIORITY_RANK[priority],
        warnings=warnings,
        submitted_at=services.clock(),
        rendered_at=services.local_time().isoformat(),
        model=serving.name,
        model_fingerprint=loaded.fingerprint,
        token_id=client.token_id,
        note=note,
        schemas=schemas,
    )
    return spec, loaded


def turn_params(request: Infer) -> Params:
    """Return the turn's own parameters.

    Raises:
        InferenceCenterError: ``invalid_request``.
    """
    params = parse_params(request.params or {})
    if request.n_probs is None:
        return params
    if "n_probs" in params.model_fields_set:
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST, "n_probs is set twice: here and in params", field="n_probs"
        )
    return merge(params, Params(n_probs=request.n_probs))


def spec_for_model(
    spec: TurnSpec, name: str, model_fingerprint: str, *, config: SessionConfig, services: SessionServices
) -> TurnSpec:
    """Return the spec of a turn without tokens for another model than before.

    The session's parameters are resolved again, and the turn's own parameters stay.

    Raises:
        InferenceCenterError: ``invalid_request`` for conflicting parameters.
    """
    before = services.models.params(config, spec.model or config.model)
    now = services.models.params(config, name)
    spec = replace(spec, model=name, model_fingerprint=model_fingerprint)
    if now == before:
        return spec
    own_fields = turn_params(spec.request).model_fields_set
    own = {name: getattr(spec.params, name) for name in Params.model_fields}
    own = {name: value for name, value in own.items() if name in own_fields or value != getattr(before, name)}
    params = now.model_copy(update=own)
    schemas = spec.schemas or enforceable_schemas(spec.request, services.schemas)
    warnings = (*schemas.warnings, *config.warnings(params, chosen=config.chosen | own_fields))
    return replace(spec, params=params, warnings=warnings, schemas=schemas)


def _without_choice(spec: TurnSpec) -> TurnSpec:
    """Return the spec of a turn whose choice of thinking the template does not offer, with a warning.

    Raises:
        InferenceCenterError: ``invalid_request`` if the choice is required.
    """
    reason = "the model's chat template does not support the choice of thinking"
    if spec.request.thinking_required:
        raise InferenceCenterError(ErrorCode.INVALID_REQUEST, reason, field="thinking")
    warning = f"thinking has no effect: {reason}"
    return spec if warning in spec.warnings else replace(spec, warnings=(*spec.warnings, warning))


@dataclass(frozen=True, slots=True)
class TurnOutcome:
    """How a turn ended; ``finish`` is the wire's ``finish_reason``, or the error code of a turn that failed."""

    finish: str
    stats: TurnStats
    stop: str | None = None
    warnings: tuple[str, ...] = ()

    def record(self, config: SessionConfig, turn_id: str, *, model: str, node: str) -> TurnRecord:
        """Return the record of the ended turn for metrics and the log."""
        return TurnRecord(
            client_id=config.client_id,
            session_id=config.session_id,
            turn_id=turn_id,
            model=model,
            finish=self.finish,
            stats=self.stats,
            node=node,
        )


class Turn:
    """The state of a turn. ``change`` is the only writer of ``state``.

    Args:
        spec: The request, parameters and model of the turn.
        messages: The messages of the request.
        submitted_at: Monotonic seconds of the submission.
        now: Monotonic seconds at which it enters the queue.
        restored: The turn as an earlier daemon stored it.

    Attributes:
        turn_id: Its id, which no change of ``spec`` changes.
        counted_tokens: Tokens of the answer whose usage is recorded before the end of the turn.
        node: The machine of its last engine.
    """

    def __init__(
        self,
        spec: TurnSpec,
        messages: tuple[ChatMessage, ...],
        *,
        submitted_at: float,
        now: float,
        restored: PendingTurn | None = None,
    ) -> None:
        tokens, text = (restored.tokens, restored.text) if restored is not None else (b"", "")
        self.turn_id = spec.turn_id
        self.spec = spec
        self.messages = messages
        self.prompt: Prompt | None = None
        self.output_spec = OutputSpec()
        self.assembler: ResponseAssembler | None = None
        if restored is not None and restored.parts is not None:
            self.assembler = ResponseAssembler.restored(spec.turn_id, restored.parts)
        self.position = 0
        self.abort_request: Abort | None = None
        self.out_of_quota = False
        self.counted_tokens = 0
        self.trace: TurnSpan = NullTracer()
        self.node = LOCAL_NODE
        self._state = TurnState.QUEUED
        self._measured_here = restored is not None
        self._texts = [text] if text else []
        self._tokens = bytearray(tokens)
        self._n_restored = len(tokens) // TOKEN_BYTES
        self._held_back = ""
        self._prompt_tokens: bytes | None = None
        self._prompt_counted = False
        self._n_prompt_tokens = 0
        self._cached_tokens = 0
        self._preempted = 0
        self._submitted_at = submitted_at
        self._queued_at: float | None = now
        self._queue_s = 0.0
        self._first_token_at: float | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.turn_id}, {self._state.value}, tokens={self.n_tokens})"

    @property
    def turn_key(self) -> str | None:
        """The client's idempotency key for the turn."""
        return self.spec.request.turn_key

    @property
    def request_id(self) -> str | None:
        return self.spec.request.id

    @property
    def state(self) -> TurnState:
        return self._state

    @property
    def n_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self._tokens) // TOKEN_BYTES

    @property
    def answer(self) -> GeneratedAnswer:
        """The answer so far."""
        return GeneratedAnswer(
            turn_id=self.turn_id,
            text=self._text,
            tokens=bytes(self._tokens),
            prompt_tokens=self._prompt_tokens,
            message=self.assembler.message() if self.assembler is not None else None,
        )

    @property
    def prompt_usage(self) -> tuple[int, int]:
        """Prompt tokens prefilled since this daemon started, and how many of them were cached."""
        return self._n_prompt_tokens, self._cached_tokens

    @property
    def content(self) -> str:
        """The answer's text so far, without reasoning and tool calls."""
        return self._text if self.assembler is None else self.assembler.content

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the reasoning; estimated from its share of the text if the assembler did not count them."""
        if self.assembler is None or not self.assembler.reasoning:
            return 0
        if self.assembler.has_parser:
            return self.assembler.reasoning_tokens
        return min(self.n_tokens, round(self.n_tokens * len(self.assembler.reasoning) / len(self._text)))

    @property
    def abort_request_id(self) -> str | None:
        """The id of the ``abort`` frame that the turn's terminal event answers, if there is one."""
        return self.abort_request.id if self.abort_request else None

    @property
    def forced_finish(self) -> str | None:
        """The ``finish_reason`` of a turn whose end is forced, by an abort or a used-up quota."""
        if self.abort_request is not None:
            return "aborted"
        return "quota_exceeded" if self.out_of_quota else None

    def change(self, change: TurnChange) -> None:
        """Apply a transition.

        Raises:
            IllegalTransitionError: The transition table has no such row.
        """
        self._state = TURN.next(self._state, change)

    def set_prompt(self, prompt: Prompt, spec: TurnSpec, *, capabilities: TemplateCapabilities) -> None:
        """Set the prompt to submit and its spec; ``capabilities`` of the template determine how output is parsed.

        Raises:
            InferenceCenterError: ``invalid_request`` if the template does not offer a choice that the request requires,
                and see ``output_spec``.
        """
        if spec.request.thinking is not None and not capabilities.chooses_thinking:
            spec = _without_choice(spec)
        schemas = spec.schemas or enforceable_schemas(spec.request)
        self.output_spec = output_spec(spec.request, schemas=schemas, capabilities=capabilities, prompt=prompt.text)
        self.spec, self.prompt = spec, prompt
        self.assembler = assembler_for(
            self.output_spec, self.assembler, turn_id=self.turn_id, text=self._text, n_tokens=self.n_tokens
        )

    def place(self, node: str) -> None:
        """Record the machine of the engine that is to run the turn."""
        self.node = node
        self.trace.set_node(node)

    def start(self, event: Started, *, now: float) -> int:
        """Handle the assignment of a slot; ``event`` contains the tokens of the prompt.

        Returns:
            Tokens to prefill that are not counted yet; 0 if the same prompt is prefilled again.
        """
        self.change(TurnChange.START)
        self._leave_queue(now)
        self._held_back = ""
        self._prompt_tokens = event.tokens
        self.trace.add_stages(event.stages)
        if self._prompt_counted:
            return 0
        n_tokens = len(event.tokens) // TOKEN_BYTES
        self._prompt_counted = True
        self._n_prompt_tokens += n_tokens
        self._cached_tokens += event.cached_tokens
        return n_tokens - event.cached_tokens

    def shift(self, event: ContextFull, *, now: float) -> None:
        """Return to the queue with a shorter prompt."""
        self._wait_again(TurnChange.SHIFT, now=now)
        self._prompt_counted = False
        self.trace.add_event("shifted", {"inferencecenter.tokens": event.n_tokens})
        if event.end is not None:
            self.trace.add_stages(event.end.stages)
            self._held_back = event.text
            self._preempted += event.end.preempted

    def interrupt(self, *, now: float) -> None:
        """Return to the queue after the loss of the engine."""
        self._wait_again(TurnChange.INTERRUPT, now=now)
        self.trace.add_event("interrupted", {"inferencecenter.tokens": self.n_tokens})

    def recall(self, *, now: float) -> None:
        """Return to the queue to be submitted to another engine."""
        self._wait_again(TurnChange.INTERRUPT, now=now)

    def extend(self, event: TokenDelta, *, now: float) -> None:
        """Append generated tokens and text."""
        if self._first_token_at is None:
            self._first_token_at = now
        self._held_back = ""
        self._texts.append(event.text)
        self._tokens += event.tokens

    def take_held_back(self) -> str:
        """Return and clear the text that the engine held back at the last interruption."""
        held_back, self._held_back = self._held_back, ""
        return held_back

    def request_abort(self, request: Abort) -> None:
        """Set the abort request of a client.

        Raises:
            InferenceCenterError: ``turn_not_found`` if the request names another turn, ``nothing_to_abort`` if the turn
                is being aborted already.
        """
        if request.turn_id not in (None, self.turn_id):
            raise InferenceCenterError(ErrorCode.TURN_NOT_FOUND, f"the running turn is {self.turn_id}", field="turn_id")
        if self.abort_request is not None:
            raise InferenceCenterError(ErrorCode.NOTHING_TO_ABORT, "the turn is being aborted already")
        self.abort_request = request

    def submission(self, config: SessionConfig, *, shared_prompts: Collection[str], now: float) -> Submit:
        """Return the engine's request for the turn, or for its remainder; its prompt is set."""
        prompt = self.prompt
        assert prompt is not None, "a turn is submitted with a prompt"
        # Tools are rendered with the system prompt and are private, so such a prompt is not shared.
        system = prompt.messages[0].content if prompt.shared_pieces and not self.spec.request.tools else None
        return Submit(
            turn_id=self.turn_id,
            session_id=config.session_id,
            client_id=config.client_id,
            priority=self.spec.rank,
            tokens=prompt.tokens,
            pieces=prompt.pieces,
            params_json=encode(self._params_left(now)),
            shared_pieces=prompt.shared_pieces,
            public=system in shared_prompts,
            answer=bytes(self._tokens),
            shown_chars=len(self._text),
            may_shift=config.on_full == "shift",
            durable=config.store,
            traced=self.trace.wanted,
            grammar=self.output_spec.grammar,
            markers=self.output_spec.markers,
            images=_images_of(prompt.messages),
        )

    def finished_outcome(self, end: Finished, *, now: float) -> TurnOutcome:
        """Return the outcome that the engine reports; its figures cover the time since the last submission."""
        warnings = (*self.spec.warnings, *end.warnings)
        finish = self.forced_finish if self.forced_finish is not None and end.reason == "aborted" else end.reason
        if finish == "stop" and self.assembler is not None and self.assembler.complete_calls:
            finish = "tool_calls"
        if self._measured_here:
            stats = self._measured_stats(now=now, preempted=self._preempted + end.preempted)
            return TurnOutcome(finish, stats, stop=end.stop, warnings=warnings)
        stats = TurnStats(
            ttft_ms=round(end.ttft_ms, 2),
            total_ms=round(end.total_ms, 2),
            tokens=end.generated_tokens,
            tps=round(end.tokens_per_s, 2),
            prompt_tokens=end.prompt_tokens,
            cached_tokens=end.cached_tokens,
            queue_ms=round(end.queue_ms, 2),
            preempted=end.preempted,
        )
        return TurnOutcome(finish, stats, stop=end.stop, warnings=warnings)

    def forced_outcome(self, finish: str, *, now: float, warnings: tuple[str, ...] = ()) -> TurnOutcome:
        """Return the outcome of a turn that ends without a report of the engine."""
        stats = self._measured_stats(now=now, preempted=self._preempted)
        return TurnOutcome(finish, stats, warnings=(*self.spec.warnings, *warnings))

    def failed_outcome(self, failure: Failed, *, now: float) -> TurnOutcome:
        return TurnOutcome(failure.code, self._measured_stats(now=now, preempted=self._preempted))

    def _params_left(self, now: float) -> Params:
        """Return the parameters with the remaining time; the engine measures it from each submission."""
        limit_ms = self.spec.params.max_time_ms
        if limit_ms is None:
            return self.spec.params
        left_ms = max(1, limit_ms - round((now - self._submitted_at) * 1000))
        return self.spec.params.model_copy(update={"max_time_ms": left_ms})

    @property
    def _text(self) -> str:
        return "".join(self._texts)

    def _wait_again(self, change: TurnChange, *, now: float) -> None:
        self.change(change)
        self._measured_here = True
        self._prompt_tokens = None
        self._leave_queue(now)
        self._queued_at = now

    def _leave_queue(self, now: float) -> None:
        if self._queued_at is not None:
            self._queue_s += now - self._queued_at
            self._queued_at = None

    def _measured_stats(self, *, now: float, preempted: int) -> TurnStats:
        """Return the figures measured in this process; the speed covers the tokens of this process."""
        first = self._first_token_at
        generating_s = now - first if first is not None else 0.0
        waiting_s = now - self._queued_at if self._queued_at is not None else 0.0
        return TurnStats(
            ttft_ms=_ms(first - self._submitted_at) if first is not None else 0.0,
            total_ms=_ms(now - self._submitted_at),
            tokens=self.n_tokens,
            tps=round(max(0, self.n_tokens - self._n_restored - 1) / generating_s, 2) if generating_s > 0 else 0.0,
            prompt_tokens=self._n_prompt_tokens,
            cached_tokens=self._cached_tokens,
            queue_ms=_ms(self._queue_s + waiting_s),
            preempted=preempted,
        )


def _images_of(messages: Iterable[ChatMessage]) -> tuple[ImageRef, ...]:
    images = {image.digest: image for message in messages for image in message.images or ()}
    return tuple(ImageRef(image.digest, image.width, image.height) for image in images.values())


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 2)

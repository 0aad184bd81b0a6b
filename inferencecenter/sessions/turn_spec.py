"""Builds the spec of a turn, its render input, and its submission to the engine. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Final

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.messages import Failed, Submit
from inferencecenter.protocol.params import Params, encode, merge, parse_params
from inferencecenter.sessions.client import PRIORITY_RANK, bound_max_tokens, check_model
from inferencecenter.sessions.journal import TurnSpec
from inferencecenter.sessions.prompt.plan import PromptPlan, messages_of, min_tokens, next_view
from inferencecenter.sessions.prompt.renderer import RenderInput

if TYPE_CHECKING:
    from inferencecenter.ipc.messages import ContextFull, ModelInfo
    from inferencecenter.protocol.requests import Infer
    from inferencecenter.protocol.values import Priority
    from inferencecenter.sessions.client import Principal
    from inferencecenter.sessions.history import History
    from inferencecenter.sessions.model_router import ServedModel
    from inferencecenter.sessions.prompt.plan import Prompt
    from inferencecenter.sessions.session_config import SessionConfig, SessionServices
    from inferencecenter.sessions.turn import Turn


_SHORTEN: Final = "Shorten the prompt, start a new session, or serve the model with a larger n_ctx."
MAX_NOTE_CHARS: Final = 256 * 1024
"""Maximum length of the requester's private note on a turn."""


@dataclass(frozen=True, slots=True)
class TurnOptions:
    """Options of a turn besides its messages: its own parameters, its priority, and the token charged for it.

    ``note`` is private text of the requester.
    """

    params: Params
    priority: Priority
    token_id: str = ""
    note: str = ""


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


def turn_options(request: Infer, client: Principal, config: SessionConfig, *, note: str) -> TurnOptions:
    """Return the options of a requested turn.

    Raises:
        InferenceCenterError: ``invalid_request`` or ``forbidden``.
    """
    if len(note) > MAX_NOTE_CHARS:
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST,
            f"the note of the turn has {len(note)} characters; {MAX_NOTE_CHARS} are allowed",
        )
    params = turn_params(request)
    priority = client.allow_priority(request.priority, otherwise=config.priority)
    return TurnOptions(params, priority=priority, token_id=client.token_id, note=note)


def new_turn_spec(
    request: Infer, options: TurnOptions, *, config: SessionConfig, services: SessionServices
) -> TurnSpec:
    """Return the spec of a new turn within the limits of its token.

    Raises:
        InferenceCenterError: ``invalid_request`` for conflicting or excessive parameters, ``model_loading``,
            ``engine_unavailable``, ``model_not_found`` or ``forbidden``.
    """
    serving = services.models.resolve(config.chosen_model)
    limits = services.quota_of(config.client_id, options.token_id).limits
    check_model(serving.name, limits)
    serving.model(config.client_id)
    model_fingerprint = serving.fingerprint()
    below = services.models.params(config, serving.name)
    overlay = bound_max_tokens(options.params, limits, session=below, chosen=config.chosen)
    params = merge(below, overlay)
    warnings = config.warnings(params, chosen=config.chosen | overlay.model_fields_set)
    if params.seed is None:
        params = params.model_copy(update={"seed": services.new_seed()})
    return TurnSpec(
        turn_id=services.new_id("t_"),
        request=request,
        params=params,
        rank=PRIORITY_RANK[options.priority],
        warnings=warnings,
        submitted_at=services.clock(),
        rendered_at=services.local_time().isoformat(),
        model=serving.name,
        model_fingerprint=model_fingerprint,
        token_id=options.token_id,
        note=options.note,
    )


def spec_for_model(turn: Turn, serving: ServedModel, *, config: SessionConfig, services: SessionServices) -> TurnSpec:
    """Return a turn's spec for the model that serves it now; an answer that has begun keeps its parameters.

    For another model than before, the session's parameters are resolved again, and the turn's own parameters stay.

    Raises:
        InferenceCenterError: ``invalid_request`` for conflicting parameters.
    """
    spec = turn.spec
    if turn.n_tokens or spec.model_fingerprint == serving.fingerprint():
        return replace(spec, model=serving.name)
    before = services.models.params(config, spec.model or config.model)
    now = services.models.params(config, serving.name)
    spec = replace(spec, model=serving.name, model_fingerprint=serving.fingerprint())
    if now == before:
        return spec
    own_fields = turn_params(spec.request).model_fields_set
    own = {name: getattr(spec.params, name) for name in Params.model_fields}
    own = {name: value for name, value in own.items() if name in own_fields or value != getattr(before, name)}
    params = now.model_copy(update=own)
    return replace(spec, params=params, warnings=config.warnings(params, chosen=config.chosen | own_fields))


def render_input(spec: TurnSpec, history: History) -> tuple[PromptPlan, RenderInput]:
    """Return the prompt plan of a turn on top of a history, and the conversation to render."""
    request = spec.request
    messages = history.messages + messages_of(request)
    view = next_view(history, messages, n_keep=spec.params.n_keep) if spec.view is None else spec.view
    conversation = RenderInput(
        view.of(messages),
        datetime.fromisoformat(spec.rendered_at),
        tools=tuple(request.tools or ()),
        thinking=request.thinking,
    )
    return PromptPlan(messages, view, rerender=spec.view is not None), conversation


def check_fits(plan: PromptPlan, model: ModelInfo, *, may_shift: bool) -> None:
    """Reject a prompt that cannot fit the context, before it is rendered.

    Raises:
        InferenceCenterError: ``prompt_too_long``.
    """
    if not model.max_token_bytes:
        return
    n_tokens = min_tokens(plan, max_token_bytes=model.max_token_bytes, may_shift=may_shift)
    if n_tokens >= model.n_ctx:
        raise InferenceCenterError(
            ErrorCode.PROMPT_TOO_LONG,
            f"The prompt has at least {n_tokens} tokens; the context holds {model.n_ctx}, answer included.",
            hint=_SHORTEN,
        )


def submission(turn: Turn, prompt: Prompt, *, config: SessionConfig, services: SessionServices) -> Submit:
    """Return the submission of the turn or of its remainder."""
    # Tools are rendered with the system prompt and are private, so such a prompt is not shared.
    system = prompt.messages[0].content if prompt.shared_pieces and not turn.spec.request.tools else None
    answer = turn.answer
    return Submit(
        turn_id=turn.turn_id,
        session_id=config.session_id,
        client_id=config.client_id,
        priority=turn.spec.rank,
        tokens=prompt.tokens,
        pieces=prompt.pieces,
        params_json=encode(turn.params_left(now=services.monotonic())),
        shared_pieces=prompt.shared_pieces,
        public=system in services.shared_prompts,
        answer=answer.tokens,
        shown_chars=len(answer.text),
        may_shift=config.on_full == "shift",
        durable=config.store,
        traced=turn.trace.wanted,
        grammar=turn.output_spec.grammar,
        markers=turn.output_spec.markers,
    )


def failure_of(turn_id: str, error: InferenceCenterError) -> Failed:
    """Return the failure of a turn that could not be submitted."""
    return Failed(turn_id=turn_id, code=error.code.value, message=error.message, hint=error.hint, field=error.field)


def prompt_too_long(event: ContextFull, refusal: InferenceCenterError | None, *, n_ctx: int) -> Failed:
    """Return the failure of a turn whose prompt does not fit and cannot be shortened.

    Args:
        event: The report of the engine.
        refusal: Why the shortened prompt was refused, if it was.
        n_ctx: Maximum tokens of prompt and answer.
    """
    error = refusal or InferenceCenterError(
        ErrorCode.PROMPT_TOO_LONG,
        f"The prompt has {event.n_tokens} tokens and cannot be made shorter; "
        f"the context holds {n_ctx}, answer included.",
        hint=_SHORTEN,
    )
    return Failed(turn_id=event.turn_id, code=error.code.value, message=error.message, hint=error.hint)

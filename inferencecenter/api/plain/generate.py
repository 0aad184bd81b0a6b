"""``POST /generate``: a prompt is answered, whole or piece by piece."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import orjson
from pydantic import BaseModel, Field, StringConstraints

from inferencecenter.api import sse
from inferencecenter.api.body import RequestModel, checked
from inferencecenter.api.endpoint import TURN_ERRORS, Call, Document, Operation, Reply, Stream
from inferencecenter.api.request_turns import RequestTurns
from inferencecenter.api.session_match import ConversationRequest, resolve_session
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol import events
from inferencecenter.protocol.params_model import MAX_SEED, MAX_STOP_CHARS, MAX_STOPS, MAX_TOKENS
from inferencecenter.protocol.requests import MAX_GRAMMAR_CHARS, Infer, ModelName, RawParams
from inferencecenter.protocol.values import ChatMessage, FinishReason, Mode, Priority, TurnStats, Usage

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from inferencecenter.protocol.base import Event

_SHORT: Final = ("stop", "max_tokens", "temperature", "seed")
_HANDED_ON: Final = ("json_schema", "regex", "grammar", "thinking", "priority")

_Stop = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARS)]
_Form = Annotated[str, StringConstraints(min_length=1, max_length=MAX_GRAMMAR_CHARS)]


class Generate(RequestModel):
    """What is to be answered, and how."""

    prompt: str = Field(min_length=1, description="What the user says; in mode `raw` the text that goes on.")
    system: str | None = Field(default=None, description="System prompt.")
    mode: Mode = Field(default="chat", description="`chat` applies the model's template, `raw` continues plain text.")
    model: ModelName | None = Field(default=None, description="Name of a model; without it the daemon's choice.")
    stream: bool = Field(default=False, description="Whether the answer comes piece by piece, as server-sent events.")
    params: RawParams | None = Field(
        default=None, description="Parameters, as in `infer` of the daemon's own protocol."
    )
    stop: _Stop | Annotated[list[_Stop], Field(max_length=MAX_STOPS, fail_fast=True)] | None = Field(
        default=None, description="Short for `params.stop`: texts that end the answer where they begin."
    )
    max_tokens: int | None = Field(
        default=None, ge=1, le=MAX_TOKENS, description="Short for `params.max_tokens`: tokens to generate at most."
    )
    temperature: float | None = Field(default=None, ge=0, le=5, description="Short for `params.temperature`.")
    seed: int | None = Field(default=None, ge=0, le=MAX_SEED, description="Short for `params.seed`.")
    json_schema: dict[str, Any] | bool | None = Field(
        default=None, description="The answer is JSON that this JSON Schema accepts."
    )
    regex: _Form | None = Field(default=None, description="This expression matches the whole answer.")
    grammar: _Form | None = Field(
        default=None, description="This grammar spells the answer: GBNF where its rules have `::=`, else Lark."
    )
    thinking: bool | None = Field(
        default=None, description="Whether the model thinks before it answers, where its template lets one choose."
    )
    priority: Priority | None = Field(default=None, description="Class of the turn; raising it needs the scope.")


class Generated(BaseModel):
    """The answer."""

    text: str = Field(description="What the model said.")
    reasoning: str | None = Field(default=None, description="What it thought before; absent where it did not.")
    finish_reason: FinishReason = Field(description="Why it is over.")
    stop: str | None = Field(default=None, description="The stop string or pattern that matched.")
    warnings: tuple[str, ...] = Field(default=(), description="Legal parameters of which one had no effect.")
    usage: Usage = Field(description="Tokens of the turn.")
    stats: TurnStats = Field(description="How it went.")


class GeneratedPart(BaseModel):
    """A piece of the answer; the last one has no text and says why the answer is over."""

    text: str | None = Field(default=None, description="What the model said after the piece before.")
    reasoning: str | None = Field(default=None, description="What it thought after the piece before.")
    finish_reason: FinishReason | None = Field(default=None, description="Why the answer is over; only in the last.")
    stop: str | None = Field(default=None, description="The stop string or pattern that matched.")
    warnings: tuple[str, ...] = Field(default=(), description="Legal parameters of which one had no effect.")
    usage: Usage | None = Field(default=None, description="Tokens of the turn; only in the last.")
    stats: TurnStats | None = Field(default=None, description="How it went; only in the last.")


async def generate(call: Call) -> Reply:
    """Have a prompt answered by a session that is kept for its computed state alone."""
    body: Generate = call.body
    request, conversation = _asked(body), _conversation(body)
    place = resolve_session(call.context.sessions, call.caller.client, conversation)
    request = request.model_copy(
        update={"session_id": place.session_id, "prompt": None, "messages": list(place.remaining)}
    )
    return Stream(_parts(call, request)) if body.stream else Document(await _whole(call, request))


def _asked(body: Generate) -> Infer:
    """Return the turn; whose session it is comes later."""
    params = dict(body.params or {})
    for name in _SHORT:
        value = getattr(body, name)
        if value is None:
            continue
        if name in params:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST, f"{name} stands there twice, also in params", field=name
            )
        params[name] = value
    handed_on = {name: getattr(body, name) for name in _HANDED_ON}
    return checked(Infer, {"op": "infer", "session_id": "-", "prompt": body.prompt, "params": params, **handed_on})


def _conversation(body: Generate) -> ConversationRequest:
    question = ChatMessage(role="user", content=body.prompt)
    before = () if body.system is None else (ChatMessage(role="system", content=body.system),)
    return ConversationRequest(messages=(*before, question), model=body.model, mode=body.mode)


async def _whole(call: Call, request: Infer) -> bytes:
    said: list[str] = []
    thought: list[str] = []
    end: GeneratedPart | None = None
    with RequestTurns(call.context, call.request_context) as turns:
        turns.begin(request)
        async for batch in turns.batches():
            for _, event in batch:
                if (part := _part(event)) is None:
                    continue
                said.append(part.text or "")
                thought.append(part.reasoning or "")
                end = part
    assert end is not None, "a turn that did not fail has an end"
    fields = end.model_dump(exclude_none=True) | {"text": "".join(said), "reasoning": "".join(thought) or None}
    return orjson.dumps(Generated(**fields).model_dump(exclude_none=True))


async def _parts(call: Call, request: Infer) -> AsyncGenerator[bytes, None]:
    with RequestTurns(call.context, call.request_context) as turns:
        turns.begin(request)
        async for batch in turns.batches():
            if not batch:
                yield sse.KEEPALIVE
            parts = [part for _, event in batch if (part := _part(event)) is not None]
            if parts:
                yield b"".join(sse.event(orjson.dumps(part.model_dump(exclude_defaults=True))) for part in parts)


def _part(event: Event) -> GeneratedPart | None:
    """Return what an event adds to the answer, ``None`` if that is nothing.

    Raises:
        InferenceCenterError: The turn failed.
    """
    match event:
        case events.Token():
            return GeneratedPart(text=event.content)
        case events.Reasoning():
            return GeneratedPart(reasoning=event.content)
        case events.End():
            return GeneratedPart(
                finish_reason=event.finish_reason,
                stop=event.stop,
                warnings=event.warnings,
                usage=event.usage,
                stats=event.stats,
            )
        case events.Error():
            raise InferenceCenterError(
                ErrorCode(event.code),
                event.message,
                hint=event.hint,
                field=event.field,
                retry_after_ms=event.retry_after_ms,
            )
        case events.SessionClosed() | events.SessionExpired() | events.SessionDetached():
            raise InferenceCenterError(ErrorCode.SESSION_NOT_FOUND, "the session was closed before its answer was over")
        case _:
            return None


OPERATION: Final = Operation(
    method="POST",
    path="/generate",
    summary="Have a prompt answered.",
    handler=generate,
    body=Generate,
    answer=Generated,
    event=GeneratedPart,
    errors=TURN_ERRORS,
)

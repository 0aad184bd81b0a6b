"""``POST /generate``: answers a prompt, as a document or a stream."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final

import orjson
from pydantic import BaseModel, Field, StringConstraints

from inferencecenter.api import sse
from inferencecenter.api.body import RequestModel, checked
from inferencecenter.api.endpoint import TURN_ERRORS, Call, Operation, Reply, collect_turns, stream_turns
from inferencecenter.api.errors import OWN_ERRORS
from inferencecenter.api.request_turns import RequestTurns
from inferencecenter.api.session_match import ConversationRequest, resolve_session
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol import events
from inferencecenter.protocol.params_model import MAX_SEED, MAX_STOP_CHARS, MAX_STOPS, MAX_TOKENS
from inferencecenter.protocol.requests import MAX_GRAMMAR_CHARS, Infer, ModelName, RawParams
from inferencecenter.protocol.values import ChatMessage, FinishReason, Mode, Priority, TurnStats, Usage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from inferencecenter.protocol.base import Event

_SHORT: Final = ("stop", "max_tokens", "temperature", "seed")
_HANDED_ON: Final = ("json_schema", "regex", "grammar", "thinking", "priority")

_Stop = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARS)]
_Form = Annotated[str, StringConstraints(min_length=1, max_length=MAX_GRAMMAR_CHARS)]


class Generate(RequestModel):
    """A prompt and its parameters."""

    prompt: str = Field(min_length=1, description="Message of the user; in mode `raw` the text to continue.")
    system: str | None = Field(default=None, description="System prompt.")
    mode: Mode = Field(default="chat", description="`chat` applies the model's template, `raw` continues plain text.")
    model: ModelName | None = Field(default=None, description="Name of a model; if absent, the daemon's default.")
    stream: bool = Field(default=False, description="Whether the result is streamed as server-sent events.")
    params: RawParams | None = Field(
        default=None, description="Parameters, as in `infer` of the daemon's own protocol."
    )
    stop: _Stop | Annotated[list[_Stop], Field(max_length=MAX_STOPS, fail_fast=True)] | None = Field(
        default=None, description="Short for `params.stop`: texts that end the generation where they begin."
    )
    max_tokens: int | None = Field(
        default=None,
        ge=1,
        le=MAX_TOKENS,
        description="Short for `params.max_tokens`: maximum number of generated tokens.",
    )
    temperature: float | None = Field(default=None, ge=0, le=5, description="Short for `params.temperature`.")
    seed: int | None = Field(default=None, ge=0, le=MAX_SEED, description="Short for `params.seed`.")
    json_schema: dict[str, Any] | bool | None = Field(default=None, description="JSON Schema of the output.")
    regex: _Form | None = Field(default=None, description="Regular expression that the whole output matches.")
    grammar: _Form | None = Field(
        default=None, description="Grammar of the output: GBNF if its rules have `::=`, else Lark."
    )
    thinking: bool | None = Field(
        default=None, description="Whether the model thinks first, if its template has that option."
    )
    priority: Priority | None = Field(
        default=None, description="Priority class of the turn; raising it requires the scope."
    )


class Generated(BaseModel, defer_build=True):
    """The result."""

    text: str = Field(description="The generated text.")
    reasoning: str | None = Field(default=None, description="Reasoning before the text; absent if there is none.")
    finish_reason: FinishReason = Field(description="Reason of the end.")
    stop: str | None = Field(default=None, description="The stop string or pattern that matched.")
    warnings: tuple[str, ...] = Field(default=(), description="Valid parameters that had no effect.")
    usage: Usage = Field(description="Token usage of the turn.")
    stats: TurnStats = Field(description="Statistics of the turn.")


class GeneratedPart(BaseModel, defer_build=True):
    """A part of the result; the last one has no text, but the finish reason."""

    text: str | None = Field(default=None, description="Text to append.")
    reasoning: str | None = Field(default=None, description="Reasoning to append.")
    finish_reason: FinishReason | None = Field(default=None, description="Reason of the end; only in the last part.")
    stop: str | None = Field(default=None, description="The stop string or pattern that matched.")
    warnings: tuple[str, ...] = Field(default=(), description="Valid parameters that had no effect.")
    usage: Usage | None = Field(default=None, description="Token usage of the turn; only in the last part.")
    stats: TurnStats | None = Field(default=None, description="Statistics of the turn; only in the last part.")


async def generate(call: Call) -> Reply:
    """Answer a prompt by a stateless session, kept only for its KV."""
    body: Generate = call.body
    request, conversation = _turn_of(body), _conversation(body)
    place = resolve_session(call.context.sessions, call.caller.client, conversation)
    request = request.model_copy(
        update={"session_id": place.session_id, "prompt": None, "messages": list(place.remaining)}
    )
    turns = _turn(call, request)
    return stream_turns(turns, _write) if body.stream else await collect_turns(turns, _GenerateCollector())


def _turn_of(body: Generate) -> Infer:
    """Return the turn, still without a session."""
    params = dict(body.params or {})
    for name in _SHORT:
        value = getattr(body, name)
        if value is None:
            continue
        if name in params:
            raise InferenceCenterError(ErrorCode.INVALID_REQUEST, f"{name} is given twice: also in params", field=name)
        params[name] = value
    handed_on = {name: getattr(body, name) for name in _HANDED_ON}
    return checked(Infer, {"op": "infer", "session_id": "-", "prompt": body.prompt, "params": params, **handed_on})


def _conversation(body: Generate) -> ConversationRequest:
    question = ChatMessage(role="user", content=body.prompt)
    before = () if body.system is None else (ChatMessage(role="system", content=body.system),)
    return ConversationRequest(messages=(*before, question), model=body.model, mode=body.mode)


@contextmanager
def _turn(call: Call, request: Infer) -> Iterator[RequestTurns]:
    with RequestTurns(call.context, call.request_context) as turns:
        turns.begin(request)
        yield turns


class _GenerateCollector:
    def __init__(self) -> None:
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._end = GeneratedPart()

    def take(self, _index: int, event: Event) -> None:
        if (part := _part(event)) is not None:
            self._text.append(part.text or "")
            self._reasoning.append(part.reasoning or "")
            self._end = part

    def document(self) -> dict[str, Any]:
        whole = {"text": "".join(self._text), "reasoning": "".join(self._reasoning) or None}
        return Generated(**self._end.model_dump(exclude_none=True) | whole).model_dump(exclude_none=True)


def _write(_turn: int, event: Event) -> bytes:
    part = _part(event)
    return b"" if part is None else sse.event(orjson.dumps(part.model_dump(exclude_defaults=True)))


def _part(event: Event) -> GeneratedPart | None:
    """Return the part of the result in an event, ``None`` if there is none.

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
            raise InferenceCenterError(ErrorCode.SESSION_NOT_FOUND, "the session was closed before the end of its turn")
        case _:
            return None


OPERATION: Final = Operation(
    method="POST",
    path="/generate",
    summary="Answer a prompt.",
    handler=generate,
    body=Generate,
    answer=Generated,
    event=GeneratedPart,
    error_format=OWN_ERRORS,
    errors=TURN_ERRORS,
)

"""``/api/chat`` and ``/api/generate``: answer a conversation or a prompt, in lines or as a document."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from inferencecenter.api.body import checked, invalid_field
from inferencecenter.api.endpoint import TURN_ERRORS, Call, Operation, Stream, document
from inferencecenter.api.ollama.answers import AnswerCollector, AnswerHead, AnswerWriter, timestamp
from inferencecenter.api.ollama.chat_schemas import (
    OLLAMA_CHAT_FIELDS,
    OLLAMA_GENERATE_FIELDS,
    OllamaChatAnswer,
    OllamaChatRequest,
    OllamaGenerateAnswer,
    OllamaGenerateRequest,
    OllamaOptions,
)
from inferencecenter.api.ollama.conversations import context_of, is_begun, messages_in, messages_of
from inferencecenter.api.ollama.errors import NDJSON, OLLAMA_ERRORS
from inferencecenter.api.ollama.keep_alive import load_or_unload
from inferencecenter.api.ollama.names import allowed_model
from inferencecenter.api.openai.sampling import with_request_fields
from inferencecenter.api.session_match import ConversationRequest, run_choices
from inferencecenter.core.errors import InferenceCenterError
from inferencecenter.protocol.params import parse_params
from inferencecenter.protocol.params_model import MAX_SEED
from inferencecenter.protocol.requests import Infer
from inferencecenter.protocol.values import ChatMessage, Tool

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator, Mapping

    from inferencecenter.api.endpoint import Reply
    from inferencecenter.api.ollama.chat_schemas import AnswerRequest
    from inferencecenter.api.request_turns import RequestTurns
    from inferencecenter.api.session_match import SessionMatch
    from inferencecenter.protocol.values import OnFull

_FIELD_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {f"params.{name}": f"options.{name}" for name in OllamaOptions.model_fields}
    | {
        "params.max_tokens": "options.num_predict",
        "params.n_probs": "top_logprobs",
        "json_schema": "format",
        "thinking": "think",
        "infill": "suffix",
    }
)
"""Fields of ``infer`` by their names in this API."""


@dataclass(frozen=True, slots=True)
class _Question:
    """A conversation, its turn without a session, and the start of its answer."""

    conversation: ConversationRequest
    turn: Mapping[str, Any]
    head: AnswerHead

    def infer(self, place: SessionMatch, _choice: int) -> Infer:
        said: dict[str, Any] = {"messages": list(place.remaining)}
        if self.conversation.mode == "raw" and "infill" not in self.turn:
            said = {"prompt": place.remaining[-1].content}
        return checked(Infer, {**self.turn, **said, "session_id": place.session_id})


async def chat(call: Call) -> Reply:
    """Handle a request: answer a conversation, or load or unload a model."""
    request: OllamaChatRequest = call.body
    model = allowed_model(call, request.model)
    head = _head(call, model, "message")
    if not request.messages:
        return _load(call, model, head)
    tools = [
        Tool(name=tool.function.name, description=tool.function.description, parameters=tool.function.parameters)
        for tool in request.tools or ()
    ]
    if len({tool.name for tool in tools}) < len(tools):
        raise invalid_field("tools", "two tools have the same name")
    n_parts = sum(1 + len(message.tool_calls or ()) for message in request.messages)
    messages = await _converted(call, messages_of, request.messages, n_parts=n_parts)
    turn = {**_turn_of(request), "tools": tools or None}
    if is_begun(messages[-1]):
        turn["prefix"], messages = messages[-1].content or None, messages[:-1]
        if turn["prefix"] and turn["json_schema"] is not None:
            raise invalid_field("format", "format excludes the start of an answer")
    conversation = ConversationRequest(messages=messages, model=model, on_full=_on_full(request))
    return await _answer(call, _Question(conversation, turn, head))


async def generate(call: Call) -> Reply:
    """Handle a request: answer or continue a prompt, or load or unload a model."""
    request: OllamaGenerateRequest = call.body
    model = allowed_model(call, request.model)
    head = _head(call, model, "response")
    if not request.prompt and not request.suffix:
        return _load(call, model, head)
    question = ChatMessage(role="user", content=request.prompt)
    if request.suffix:
        conversation = ConversationRequest(messages=(question,), model=model, mode="raw")
        turn = {**_turn_of(request), "infill": {"suffix": request.suffix}}
        return await _answer(call, _Question(conversation, turn, head))
    if request.raw:
        if request.system or request.context:
            raise invalid_field("raw", "raw excludes system and context")
        conversation = ConversationRequest(messages=(question,), model=model, mode="raw")
        return await _answer(call, _Question(conversation, _turn_of(request), head))
    context = request.context or ()
    before = await _converted(call, messages_in, context, n_parts=len(context))
    if request.system:
        before = (
            ChatMessage(role="system", content=request.system),
            *(message for message in before if message.role != "system"),
        )
    messages = (*before, question)
    head = replace(head, context_of=lambda text: context_of([*messages, ChatMessage(role="assistant", content=text)]))
    conversation = ConversationRequest(messages=messages, model=model, on_full=_on_full(request))
    return await _answer(call, _Question(conversation, _turn_of(request), head))


def _on_full(request: AnswerRequest) -> OnFull:
    return "shift" if request.truncate else "stop"


_LONG: Final = 256
"""From this number on the messages and calls of a conversation take more than a millisecond to convert."""

_Sent = TypeVar("_Sent")


async def _converted(
    call: Call, convert: Callable[[_Sent], tuple[ChatMessage, ...]], sent: _Sent, *, n_parts: int
) -> tuple[ChatMessage, ...]:
    """Return a conversation; a long one is converted in a thread, round-robin over clients."""
    if n_parts < _LONG:
        return convert(sent)
    return await call.context.worker.run(call.caller.client.client_id, partial(convert, sent))


def _head(call: Call, model: str, kind: Literal["message", "response"]) -> AnswerHead:
    request: AnswerRequest = call.body
    return AnswerHead(
        model=model,
        created_at=timestamp(call.context.clock()),
        kind=kind,
        top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        warnings=call.warnings,
    )


def _load(call: Call, model: str, head: AnswerHead) -> Reply:
    """Load or unload the model; the response is a single document, which is a line too."""
    return document({**head.part(), "done": True, "done_reason": load_or_unload(call, model)})


def _turn_of(request: AnswerRequest) -> dict[str, Any]:
    """Return the turn, without a session and what is said in it.

    Raises:
        InferenceCenterError: ``invalid_request`` for options out of range.
    """
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid_field("top_logprobs", "top_logprobs needs logprobs")
    options = request.options or OllamaOptions()
    seed = options.seed
    params = {
        **options.sampler_params,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "seed": None if seed is None or seed < 0 else seed % (MAX_SEED + 1),
        "stop": options.stop,
        "max_tokens": options.num_predict if (options.num_predict or 0) > 0 else None,
        "n_probs": max(1, request.top_logprobs or 0) if request.logprobs else None,
    }
    params = {name: value for name, value in params.items() if value is not None}
    try:
        parse_params(params)
    except InferenceCenterError as error:
        raise with_request_fields(error, _FIELD_NAMES) from None
    schema = {"type": "object"} if request.format == "json" else request.format or None
    return {
        "op": "infer",
        "params": params,
        "json_schema": schema,
        "thinking": None if request.think is None else request.think is not False,
        "thinking_required": False,
    }


async def _answer(call: Call, question: _Question) -> Reply:
    if call.body.stream:
        return Stream(_lines(call, question), media_type=NDJSON)
    with _turn(call, question) as turns:
        gathered = AnswerCollector(question.head)
        await turns.take_events(lambda _, event: gathered.take(event))
    return document(gathered.document())


async def _lines(call: Call, question: _Question) -> AsyncGenerator[bytes, None]:
    with _turn(call, question) as turns:
        writer = AnswerWriter(question.head)
        async for written in turns.write_events(lambda _, event: writer.write(event), keepalive=writer.keepalive):
            yield written


@contextmanager
def _turn(call: Call, question: _Question) -> Iterator[RequestTurns]:
    """Run the turn of a request.

    Raises:
        InferenceCenterError: It cannot start; the error names the request's fields.
    """
    try:
        with run_choices(
            call.context, call.request_context, (question.conversation,), n=1, infer=question.infer
        ) as turns:
            yield turns
    except InferenceCenterError as error:
        raise with_request_fields(error, _FIELD_NAMES) from None


OPERATIONS: Final = (
    Operation(
        method="POST",
        path="/api/chat",
        summary="Answer a conversation, as Ollama does.",
        handler=chat,
        body=OllamaChatRequest,
        answer=OllamaChatAnswer,
        event=OllamaChatAnswer,
        errors=TURN_ERRORS,
        fields=OLLAMA_CHAT_FIELDS,
        error_format=OLLAMA_ERRORS,
        local_account=True,
        media_type=NDJSON,
    ),
    Operation(
        method="POST",
        path="/api/generate",
        summary="Answer a prompt, as Ollama does.",
        handler=generate,
        body=OllamaGenerateRequest,
        answer=OllamaGenerateAnswer,
        event=OllamaGenerateAnswer,
        errors=TURN_ERRORS,
        fields=OLLAMA_GENERATE_FIELDS,
        error_format=OLLAMA_ERRORS,
        local_account=True,
        media_type=NDJSON,
    ),
)

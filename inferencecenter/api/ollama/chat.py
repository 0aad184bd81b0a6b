"""``/api/chat`` and ``/api/generate``: answer a conversation or a prompt, in lines or as a document."""

from __future__ import annotations

from array import array
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import orjson

from inferencecenter.api.body import checked, invalid_field
from inferencecenter.api.endpoint import TURN_ERRORS, Call, Operation, collect_turns, document, stream_turns
from inferencecenter.api.message_images import result_message, user_message, with_stored_images
from inferencecenter.api.ollama.answers import AnswerHead, AnswerWriter, OllamaCollector, timestamp
from inferencecenter.api.ollama.chat_schemas import (
    MOST_CONTEXT,
    OLLAMA_CHAT_FIELDS,
    OLLAMA_GENERATE_FIELDS,
    OllamaChatAnswer,
    OllamaChatRequest,
    OllamaGenerateAnswer,
    OllamaGenerateRequest,
    OllamaOptions,
)
from inferencecenter.api.ollama.errors import NDJSON, OLLAMA_ERRORS
from inferencecenter.api.ollama.keep_alive import load_or_unload
from inferencecenter.api.ollama.models import allowed_model
from inferencecenter.api.openai.chat_schemas import MOST_MESSAGES
from inferencecenter.api.session_match import ConversationRequest, run_choices, with_request_fields
from inferencecenter.api.tool_calls import arguments_text, calls_of_message
from inferencecenter.core.errors import InferenceCenterError
from inferencecenter.protocol.codec import check_json_bounds
from inferencecenter.protocol.params import parse_params
from inferencecenter.protocol.params_model import MAX_SEED
from inferencecenter.protocol.requests import Infer
from inferencecenter.protocol.values import ChatMessage, MessageImagePart, MessageInParts, Tool, ToolCall
from inferencecenter.sessions.prefix_match import UNNAMED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from inferencecenter.api.endpoint import Reply
    from inferencecenter.api.ollama.chat_schemas import AnswerRequest, OllamaMessage
    from inferencecenter.api.session_match import SessionMatch
    from inferencecenter.protocol.values import OnFull


# Conversations of Ollama's requests: messages whose tool calls may lack ids, and conversations as numbers. Pure.

_NUMBER_BYTES: Final = 2
"""Bytes of text per number of a context, which is as large as a token then."""
_ROLES: Final = ("system", "user", "assistant")


def messages_of(sent: Sequence[OllamaMessage]) -> tuple[ChatMessage | MessageInParts, ...]:
    """Return the messages of a conversation; calls without an id are numbered.

    The last one may be the start of the answer.

    Raises:
        InferenceCenterError: ``invalid_request`` for fields of another role, and for results without a call.
    """
    calls = _Calls()
    converted = tuple(_message(message, f"messages.{index}", calls) for index, message in enumerate(sent))
    last = len(converted) - 1
    if is_begun(converted[last]) and last > 0:
        last -= 1
    if converted[last].role not in ("user", "tool"):
        raise invalid_field(
            f"messages.{last}.role", "the last message must have role user or tool, or be the start of an answer"
        )
    return converted


def is_begun(message: ChatMessage | MessageInParts) -> bool:
    """Return whether the last message of a conversation is the start of its answer."""
    return isinstance(message, ChatMessage) and message.role == "assistant" and not message.tool_calls


class _Calls:
    """The tool calls of a conversation, and which of them lack a result."""

    def __init__(self) -> None:
        self._n = 0
        self._known: set[str] = set()
        # All ids with the names of their tools, and the ids for each name; a plain dict takes longer for its first
        # entry with each one deleted before.
        self._open: OrderedDict[str, str] = OrderedDict()
        self._open_by_name: defaultdict[str, OrderedDict[str, None]] = defaultdict(OrderedDict)

    def add(self, call_id: str | None, name: str) -> str:
        call_id = call_id or f"{UNNAMED}{self._n}"
        self._n += 1
        self._known.add(call_id)
        self._close(call_id)
        self._open[call_id] = name
        self._open_by_name[name][call_id] = None
        return call_id

    def answered_by(self, message: OllamaMessage, where: str) -> str:
        """Return the id of the call to which a result message belongs.

        Raises:
            InferenceCenterError: ``invalid_request``.
        """
        call_id = message.tool_call_id
        if call_id is None:
            if not self._open:
                raise invalid_field(f"{where}.role", "there is no earlier tool call without a result")
            named = self._open_by_name.get(message.tool_name or "")
            call_id = next(iter(named or self._open))
        elif call_id not in self._known:
            raise invalid_field(f"{where}.tool_call_id", "tool_call_id is not that of a call in an earlier message")
        self._close(call_id)
        return call_id

    def _close(self, call_id: str) -> None:
        name = self._open.pop(call_id, None)
        if name is not None:
            del self._open_by_name[name][call_id]


def _message(message: OllamaMessage, where: str, calls: _Calls) -> ChatMessage | MessageInParts:
    role = message.role
    for name, owner in (("thinking", "assistant"), ("tool_calls", "assistant"), ("tool_call_id", "tool")):
        if role != owner and getattr(message, name):
            raise invalid_field(f"{where}.{name}", f"{name} belongs to messages of role {owner}")
    if message.images:
        parts = [*map(_image, message.images), *([message.content] if message.content else ())]
        if role == "tool":
            return result_message(parts, calls.answered_by(message, where))
        if role != "user":
            raise invalid_field(f"{where}.images", "images belong to messages of role user or tool")
        return user_message(parts)
    called = [
        ToolCall(
            call_id=calls.add(call.id, call.function.name),
            name=call.function.name,
            arguments=arguments_text(call.function.arguments, f"{where}.tool_calls.{place}.function.arguments"),
        )
        for place, call in enumerate(message.tool_calls or ())
    ]
    return ChatMessage(
        role=role,
        content=message.content,
        reasoning=message.thinking or None,
        tool_calls=calls_of_message(called, f"{where}.tool_calls"),
        tool_call_id=calls.answered_by(message, where) if role == "tool" else None,
    )


def _image(data: str) -> MessageImagePart:
    return MessageImagePart(type="image", data=data)


def context_of(messages: Sequence[ChatMessage]) -> list[int] | None:
    """Return a conversation without tool calls as numbers, from which ``messages_in`` restores it.

    A conversation with images, or that takes more numbers than a request may have, has none.
    """
    if any(message.images for message in messages):
        return None
    if sum(len(message.content) for message in messages) > MOST_CONTEXT * _NUMBER_BYTES:
        return None
    text = orjson.dumps([[message.role, message.content] for message in messages])
    if len(text) > MOST_CONTEXT * _NUMBER_BYTES:
        return None
    return array("H", text + b" " * (len(text) % _NUMBER_BYTES)).tolist()


def messages_in(context: Sequence[int]) -> tuple[ChatMessage, ...]:
    """Return the conversation in a ``context``.

    Raises:
        InferenceCenterError: ``invalid_request`` for numbers that ``context_of`` never returns, or
            ``message_too_large``.
    """
    text = array("H", context).tobytes() or b"[]"
    check_json_bounds(text)
    try:
        return tuple(_restored(orjson.loads(text)))
    except (orjson.JSONDecodeError, ValueError, TypeError):
        raise invalid_field("context", "context is not that of an answer of this daemon") from None


def _restored(pairs: Sequence[tuple[object, object]]) -> Iterator[ChatMessage]:
    if len(pairs) > MOST_MESSAGES:
        raise ValueError
    for role, content in pairs:
        if role not in _ROLES or not isinstance(content, str):
            raise ValueError
        yield ChatMessage.model_validate({"role": role, "content": content})


_FIELD_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {f"params.{name}": f"options.{name}" for name in OllamaOptions.model_fields}
    | {
        "params.max_tokens": "options.num_predict",
        "params.n_probs": "top_logprobs",
        "json_schema": "format",
        "prefix": "messages",
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
        content: dict[str, Any] = {"messages": list(place.remaining)}
        if self.conversation.mode == "raw" and "infill" not in self.turn:
            content = {"prompt": place.remaining[-1].content}
        return checked(Infer, {**self.turn, **content, "session_id": place.session_id})


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
    converted = await _converted(call, messages_of, request.messages, n_parts=n_parts)
    messages = await with_stored_images(call.context, call.caller.client, converted)
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
    if request.images and (request.raw or request.suffix):
        raise invalid_field("images", "images exclude raw and suffix")
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
    parts: list[str | MessageImagePart] = [*map(_image, request.images or ()), request.prompt]
    messages = await with_stored_images(call.context, call.caller.client, (*before, user_message(parts)))
    head = replace(head, context_of=lambda text: context_of([*messages, ChatMessage(role="assistant", content=text)]))
    conversation = ConversationRequest(messages=messages, model=model, on_full=_on_full(request))
    return await _answer(call, _Question(conversation, _turn_of(request), head))


def _on_full(request: AnswerRequest) -> OnFull:
    return "shift" if request.truncate else "stop"


_LONG: Final = 256
"""From this number on the messages and calls of a conversation take more than a millisecond to convert."""

_Sent = TypeVar("_Sent")
_Message = TypeVar("_Message", bound=ChatMessage | MessageInParts)


async def _converted(
    call: Call, convert: Callable[[_Sent], tuple[_Message, ...]], sent: _Sent, *, n_parts: int
) -> tuple[_Message, ...]:
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
    turns = run_choices(
        call.context,
        call.request_context,
        (question.conversation,),
        n=1,
        infer=question.infer,
        names=_FIELD_NAMES,
    )
    if not call.body.stream:
        return await collect_turns(turns, OllamaCollector(question.head))
    writer = AnswerWriter(question.head)
    return stream_turns(turns, writer.write, keepalive=writer.keepalive, media_type=NDJSON)


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

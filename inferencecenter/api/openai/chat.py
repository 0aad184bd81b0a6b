"""``/v1/chat/completions``: answers a conversation, as a document or a stream.

The mapping of requests to sessions, the handler, and the writers of chunks and documents.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import orjson

from inferencecenter.api.body import checked, invalid_field
from inferencecenter.api.custom_tools import InputReader, input_of
from inferencecenter.api.endpoint import TURN_ERRORS, Call, Operation, collect_turns, stream_turns
from inferencecenter.api.message_images import image_of_url, result_message, user_message, with_stored_images
from inferencecenter.api.openai.answers import (
    ChunkWriter,
    ResponseHead,
    finish_of,
    finite,
    head_fields,
    more_fields,
    raise_failure,
    usage_of,
)
from inferencecenter.api.openai.chat_schemas import (
    CHAT_FIELDS,
    ChatCompletion,
    ChatCompletionChunk,
    ChatRequest,
    ChosenFunction,
    CustomToolOffer,
    ImageUrlPart,
)
from inferencecenter.api.openai.sampling import (
    TIERS,
    form_of,
    infer_fields,
    raw_params,
    request_fields,
)
from inferencecenter.api.openai.token_fields import with_token_biases
from inferencecenter.api.session_match import ConversationRequest, run_choices
from inferencecenter.api.tool_calls import calls_of_message
from inferencecenter.protocol import events
from inferencecenter.protocol.requests import Infer
from inferencecenter.protocol.values import ChatMessage, NamedTool, ToolCall

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from inferencecenter.api.endpoint import Reply
    from inferencecenter.api.openai.chat_schemas import ChatRequestMessage
    from inferencecenter.api.session_match import SessionMatch
    from inferencecenter.protocol.base import Event
    from inferencecenter.protocol.requests import RawParams
    from inferencecenter.protocol.values import MessageInParts, Role, TokenLogprobs, TokenProbability, Tool
    from inferencecenter.protocol.values import ToolChoice as WireToolChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatHead(ResponseHead):
    """Fields common to all chunks of a response; ``top_logprobs`` is ``None`` unless requested.

    With ``legacy`` a call is a ``function_call``.
    """

    top_logprobs: int | None = None
    legacy: bool = False
    custom_tools: Collection[str] = ()


class ChatChunkWriter(ChunkWriter):
    """Encodes the chunks of a stream; those of plain text differ in few bytes."""

    def __init__(self, head: ChatHead) -> None:
        super().__init__(head, "chat.completion.chunk", n_choices=head.n)
        self._head = head
        self._begun = [False] * head.n
        self._inputs: dict[tuple[int, int], InputReader] = {}
        self._texts = [b'%b{"index":%d,"delta":{"content":' % (self._prefix, index) for index in range(head.n)]
        self._after_text = b'},"logprobs":null,"finish_reason":null}' + self._suffix

    def write(self, index: int, event: Event) -> bytes:
        """Return the chunks of an event, possibly none.

        Raises:
            InferenceCenterError: The turn failed.
        """
        if type(event) is events.Token and event.logprobs is None and self._begun[index]:
            return b"%b%b%b" % (self._texts[index], orjson.dumps(event.content), self._after_text)
        match event:
            case events.Token():
                return self._begin(index) + self._delta(index, {"content": event.content}, event.logprobs)
            case events.Reasoning():
                return self._begin(index) + self._delta(index, {"reasoning_content": event.content}, event.logprobs)
            case events.ToolCall():
                delta = self._call_delta(index, event)
                calls = {"function_call": delta["function"]} if self._head.legacy else {"tool_calls": [delta]}
                return self._begin(index) + self._delta(index, calls, event.logprobs)
            case events.End():
                choice = _increment(index, {}, finish=_finish(event, self._head))
                return self._begin(index) + self.end_choice(index, event, choice)
            case _:
                raise_failure(event)
                return b""

    def _begin(self, index: int) -> bytes:
        if self._begun[index]:
            return b""
        self._begun[index] = True
        return self._delta(index, {"role": "assistant", "content": ""}, None)

    def _call_delta(self, index: int, event: events.ToolCall) -> dict[str, Any]:
        place = index, event.index
        if event.name in self._head.custom_tools:
            self._inputs[place] = InputReader()
        if (reader := self._inputs.get(place)) is None:
            kind, payload = "function", {"arguments": event.arguments}
        else:
            kind, payload = "custom", {"input": reader.feed(event.arguments)}
        if event.name is None:
            return {"index": event.index, kind: payload}
        return {"index": event.index, "id": event.call_id, "type": kind, kind: {"name": event.name, **payload}}

    def _delta(self, index: int, delta: dict[str, Any], logprobs: Iterable[TokenLogprobs] | None) -> bytes:
        reported = None if logprobs is None else _logprobs(logprobs, self._head.top_logprobs or 0)
        return self.chunk(_increment(index, delta, logprobs=reported))


def _increment(
    index: int, delta: dict[str, Any], *, logprobs: dict[str, Any] | None = None, finish: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def _finish(end: events.End, head: ChatHead) -> str:
    finish = finish_of(end)
    return "function_call" if head.legacy and finish == "tool_calls" else finish


@dataclass(slots=True)
class _Choice:
    """One choice so far; ``calls`` are by index."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: events.End | None = None


class ChatCollector:
    """Collects a response that is sent as one document."""

    def __init__(self, head: ChatHead) -> None:
        self._head = head
        self._choices = [_Choice() for _ in range(head.n)]

    def take(self, index: int, event: Event) -> None:
        """Add an event.

        Raises:
            InferenceCenterError: The turn failed.
        """
        choice = self._choices[index]
        match event:
            case events.Token():
                choice.content.append(event.content)
                choice.logprobs += event.logprobs or ()
            case events.Reasoning():
                choice.reasoning.append(event.content)
                choice.logprobs += event.logprobs or ()
            case events.ToolCall():
                call = choice.calls.setdefault(event.index, {"id": event.call_id, "name": "", "arguments": []})
                call["name"] = event.name or call["name"]
                call["arguments"].append(event.arguments)
                choice.logprobs += event.logprobs or ()
            case events.End():
                finish_of(event)
                choice.end = event
            case _:
                raise_failure(event)

    def document(self) -> dict[str, Any]:
        """Return the whole response."""
        head = self._head
        ends = [choice.end for choice in self._choices if choice.end is not None]
        return {
            **head.common("chat.completion"),
            "choices": [self._choice(index, choice) for index, choice in enumerate(self._choices)],
            "usage": usage_of(ends, n=head.n),
            **more_fields(head.warnings, ends),
        }

    def _choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        assert choice.end is not None, "all turns have ended"
        content = "".join(choice.content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if choice.calls and not content else content,
            "refusal": None,
        }
        if choice.reasoning:
            message["reasoning_content"] = "".join(choice.reasoning)
        calls = [_call(call, self._head.custom_tools) for call in choice.calls.values()]
        if calls and self._head.legacy:
            message["function_call"] = calls[0]["function"]
        elif calls:
            message["tool_calls"] = calls
        top = self._head.top_logprobs
        return {
            "index": index,
            "message": message,
            "logprobs": None if top is None else _logprobs(choice.logprobs, top),
            "finish_reason": _finish(choice.end, self._head),
        }


def _call(call: dict[str, Any], custom_tools: Collection[str]) -> dict[str, Any]:
    name, arguments = call["name"], "".join(call["arguments"])
    if name in custom_tools:
        return {"id": call["id"], "type": "custom", "custom": {"name": name, "input": input_of(arguments)}}
    return {"id": call["id"], "type": "function", "function": {"name": name, "arguments": arguments}}


def _logprobs(entries: Iterable[TokenLogprobs], top: int) -> dict[str, Any]:
    content = [
        {**probability(entry), "top_logprobs": [probability(each) for each in entry.top[:top]]} for entry in entries
    ]
    return {"content": content, "refusal": None}


def probability(entry: TokenLogprobs | TokenProbability) -> dict[str, Any]:
    # Incomplete characters are shown as U+FFFD; their bytes are not known here.
    known = "\N{REPLACEMENT CHARACTER}" not in entry.token
    return {
        "token": entry.token,
        "logprob": finite(entry.logprob),
        "bytes": list(entry.token.encode()) if known else None,
    }


OPENAI_FIELD_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "prefix": "messages",
        "thinking": "reasoning_effort",
        "priority": "service_tier",
        "params.max_tokens": "max_tokens",
        "params.n_probs": "top_logprobs",
        "params.seed": "seed",
        "params.stop": "stop",
    }
)
"""Fields of ``infer`` by their names in this API."""


def check(request: ChatRequest) -> None:
    """Refuse contradictory fields.

    Raises:
        InferenceCenterError: ``invalid_request`` with the field.
    """
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid_field("top_logprobs", "top_logprobs needs logprobs")
    _check_tools(request)
    _check_form(request)
    _check_messages(request.messages)
    _params(request, choice=0)


def conversation_of(request: ChatRequest, messages: tuple[ChatMessage, ...]) -> ConversationRequest:
    """Return the conversation of ``messages`` to be answered.

    Raises:
        InferenceCenterError: ``invalid_request``.
    """
    ids = {name: getattr(request, name) for name in ("user", "safety_identifier", "prompt_cache_key")}
    metadata = {name: value for name, value in ids.items() if value is not None} | (request.metadata or {})
    if len(metadata) > 16:
        raise invalid_field(
            "metadata", f"metadata has {len(metadata)} entries including those of other fields; at most 16 are allowed"
        )
    if messages[-1].role == "assistant":
        messages = messages[:-1]
    return ConversationRequest(messages=messages, model=request.model, metadata=metadata)


def infer_of(request: ChatRequest, place: SessionMatch, choice: int) -> Infer:
    """Return the turn that answers in a matched session.

    Raises:
        InferenceCenterError: ``invalid_request``.
    """
    form = form_of(request)
    return checked(
        Infer,
        {
            "op": "infer",
            "session_id": place.session_id,
            "messages": list(place.remaining),
            "params": _params(request, choice=choice),
            "tools": _tools(request),
            "tool_choice": _tool_choice(request),
            "parallel_tool_calls": request.parallel_tool_calls and not request.functions,
            **infer_fields(form),
            "prefix": None if form is not None else _prefix(request),
            "thinking": _thinking(request),
            "thinking_required": False,
            "priority": TIERS[request.service_tier or "auto"],
        },
    )


def _prefix(request: ChatRequest) -> str | None:
    """Return the start of the answer: the text of an assistant's message at the end of the conversation."""
    last = request.messages[-1]
    return (last.text or None) if last.role == "assistant" else None


def _thinking(request: ChatRequest) -> bool | None:
    if request.reasoning_effort is not None:
        return request.reasoning_effort != "none"
    options = request.chat_template_kwargs
    if options is None:
        return None
    return options.thinking if options.enable_thinking is None else options.enable_thinking


def _params(request: ChatRequest, *, choice: int) -> RawParams:
    n_probs = max(1, request.top_logprobs or 0) if request.logprobs else 0
    max_tokens = request.max_completion_tokens or request.max_tokens or request.n_predict
    return raw_params(request, max_tokens=max_tokens, n_probs=n_probs, choice=choice)


_ROLES: Final[Mapping[str, Role]] = MappingProxyType(
    {
        "system": "system",
        "developer": "system",
        "user": "user",
        "assistant": "assistant",
        "tool": "tool",
        "function": "tool",
    }
)


def messages_of(request: ChatRequest) -> tuple[ChatMessage | MessageInParts, ...]:
    """Return the conversation; a legacy call, which has no id, is named after the message that made it.

    Raises:
        InferenceCenterError: ``invalid_request`` for an image that is not in the request.
    """
    messages: list[ChatMessage | MessageInParts] = []
    legacy_id = ""
    for index, message in enumerate(request.messages):
        if message.function_call is not None:
            legacy_id = f"call_{index}"
        messages.append(_wire_message(message, f"messages.{index}", legacy_id))
    return tuple(messages)


def _wire_message(message: ChatRequestMessage, where: str, legacy_id: str) -> ChatMessage | MessageInParts:
    call_id = legacy_id if message.role == "function" else message.tool_call_id
    if message.has_images:
        parts = [
            image_of_url(part.image_url.url, f"{where}.content.{number}.image_url.url")
            if isinstance(part, ImageUrlPart)
            else part.text
            for number, part in enumerate(message.content or ())
        ]
        return user_message(parts) if message.role == "user" else result_message(parts, call_id)
    calls = [call.wire_call for call in message.tool_calls or ()]
    if (function := message.function_call) is not None:
        calls.append(ToolCall(call_id=legacy_id, name=function.name, arguments=function.arguments))
    return ChatMessage(
        role=_ROLES[message.role],
        content=message.text,
        reasoning=message.reasoning_content or None,
        tool_calls=calls_of_message(calls, f"{where}.tool_calls"),
        tool_call_id=call_id,
    )


def _check_messages(messages: list[ChatRequestMessage]) -> None:
    if not messages:
        raise invalid_field(
            "messages",
            "Invalid 'messages': empty array. Expected an array with minimum length 1, but got an empty array instead.",
        )
    called: set[str] = set()
    is_called = False
    for index, message in enumerate(messages):
        where = f"messages.{index}"
        _check_message(message, where)
        is_called = is_called or message.function_call is not None
        if message.role == "tool":
            _check_result(message, where, called)
        if message.role == "function" and not is_called:
            raise invalid_field(f"{where}.role", "there is no earlier message with a function_call")
        called |= {call.id for call in message.tool_calls or ()}
    last = len(messages) - 1
    if messages[last].role == "assistant" and not messages[last].calls_tools and last > 0:
        last -= 1  # the model continues it
    if messages[last].role not in ("user", "tool", "function"):
        raise invalid_field(
            f"messages.{last}.role", "the last message must have role user or tool, or be the start of an answer"
        )


_OWNERS: Final = (
    ("reasoning_content", "assistant"),
    ("tool_calls", "assistant"),
    ("function_call", "assistant"),
    ("tool_call_id", "tool"),
)


def _check_message(message: ChatRequestMessage, where: str) -> None:
    for name, owner in _OWNERS:
        if message.role != owner and getattr(message, name):
            raise invalid_field(f"{where}.{name}", f"{name} belongs to messages of role {owner}")
    if message.has_images and _ROLES[message.role] not in ("user", "tool"):
        raise invalid_field(f"{where}.content", "images belong to messages of role user or tool")


def _check_result(message: ChatRequestMessage, where: str, called: Collection[str]) -> None:
    if message.tool_call_id is None:
        raise invalid_field(f"{where}.tool_call_id", f"{where}.tool_call_id is missing")
    if message.tool_call_id not in called:
        raise invalid_field(f"{where}.tool_call_id", "tool_call_id is not that of a call in an earlier message")


def _offered(request: ChatRequest) -> list[Tool]:
    return [each.wire_tool for each in (*(request.tools or ()), *(request.functions or ()))]


def _check_tools(request: ChatRequest) -> None:
    choice, names = request.tool_choice, [tool.name for tool in _offered(request)]
    if request.tools and request.functions:
        raise invalid_field("functions", "tools excludes functions")
    if len(set(names)) < len(names):
        raise invalid_field("tools", "two tools have the same name")
    for kind in ("function", "custom", "allowed_tools"):
        if (choice.type == kind) != (getattr(choice, kind) is not None):
            raise invalid_field("tool_choice", f"{kind} belongs to tool_choice of the type {kind}")
    if missing := [name for name in _chosen(request) if name not in names]:
        raise invalid_field("tool_choice", f"tool_choice names {missing[0]}, which is not among the tools")
    if choice.type == "required" and not names:
        raise invalid_field("tool_choice", "tool_choice is required, and there are no tools")


def _chosen(request: ChatRequest) -> list[str]:
    """Return the names of the tools that the request chooses."""
    choice, legacy = request.tool_choice, request.function_call
    chosen = [each.name for each in (choice.function, choice.custom) if each is not None]
    chosen += [] if choice.allowed_tools is None else [each.name for each in choice.allowed_tools.tools]
    return [*chosen, legacy.name] if isinstance(legacy, ChosenFunction) else chosen


def _check_form(request: ChatRequest) -> None:
    wanted = request.response_format
    if wanted is not None and wanted.type != "json_schema" and wanted.json_schema is not None:
        raise invalid_field("response_format", "json_schema belongs to response_format of the type json_schema")
    if wanted is not None and wanted.type == "json_schema" and wanted.json_schema is None and wanted.schema_ is None:
        raise invalid_field("response_format", "json_schema is missing")
    form_of(request)


def _tools(request: ChatRequest) -> list[Tool] | None:
    allowed = None if request.tool_choice.allowed_tools is None else set(_chosen(request))
    return [tool for tool in _offered(request) if allowed is None or tool.name in allowed] or None


def _tool_choice(request: ChatRequest) -> WireToolChoice:
    choice, legacy = request.tool_choice, request.function_call
    if isinstance(legacy, ChosenFunction):
        return NamedTool(name=legacy.name)
    if legacy is not None:
        return legacy
    if (named := choice.function or choice.custom) is not None:
        return NamedTool(name=named.name)
    if choice.allowed_tools is not None:
        return choice.allowed_tools.mode
    assert choice.type != "function", "checked by _check_tools"
    assert choice.type != "custom", "checked by _check_tools"
    assert choice.type != "allowed_tools", "checked by _check_tools"
    return choice.type


_MANY_PARTS: Final = 256
"""From this number on the messages of a conversation, their parts and calls take more than a millisecond to convert."""


async def create(call: Call) -> Reply:
    """Handle a request: answer a conversation."""
    call = await with_token_biases(call)
    request: ChatRequest = call.body
    conversation = await checked_conversation(call)
    if call.report is not None and _prefix(request) and form_of(request) is not None:
        call.report.add("messages", "the last message has no effect: an answer with a form is not continued")
    turns = run_choices(
        call.context,
        call.request_context,
        (conversation,),
        n=request.n,
        infer=partial(infer_of, request),
        names=request_fields(OPENAI_FIELD_NAMES, form_of(request)),
    )
    head = ChatHead(
        **head_fields(call, "chatcmpl"),
        n=request.n,
        top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        legacy=bool(request.functions),
        custom_tools=[tool.custom.name for tool in request.tools or () if isinstance(tool, CustomToolOffer)],
    )
    if not request.stream:
        return await collect_turns(turns, ChatCollector(head))
    chunks = ChatChunkWriter(head)
    return stream_turns(turns, chunks.write, last=chunks.last)


async def checked_conversation(call: Call) -> ConversationRequest:
    """Return the conversation to be answered; a long one is converted in a thread, round-robin over clients.

    Raises:
        InferenceCenterError: ``invalid_request``.
    """
    request: ChatRequest = call.body
    if sum(1 + len(each.content or ()) + len(each.tool_calls or ()) for each in request.messages) < _MANY_PARTS:
        messages = _checked(request)
    else:
        messages = await call.context.worker.run(call.caller.client.client_id, partial(_checked, request))
    stored = await with_stored_images(call.context, call.caller.client, messages, part="image_url.url")
    return conversation_of(request, stored)


def _checked(request: ChatRequest) -> tuple[ChatMessage | MessageInParts, ...]:
    check(request)
    return messages_of(request)


OPERATIONS: Final = (
    Operation(
        method="POST",
        path="/v1/chat/completions",
        summary="Create a chat completion.",
        handler=create,
        body=ChatRequest,
        answer=ChatCompletion,
        event=ChatCompletionChunk,
        errors=TURN_ERRORS,
        fields=CHAT_FIELDS,
    ),
)

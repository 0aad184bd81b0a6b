"""``/v1/messages``: answers a conversation in the form of Anthropic's API, as a document or a stream.

The mapping of requests to sessions, the handlers, and the writers of events and documents.
"""

from __future__ import annotations

import secrets
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import orjson

from inferencecenter.api import sse
from inferencecenter.api.anthropic.message_schemas import (
    MESSAGE_FIELDS,
    AnswerMessage,
    CountTokensRequest,
    ImageBlock,
    MessageError,
    MessagesQuery,
    MessagesRequest,
    MessageStreamEvent,
    MessageText,
    SearchResultBlock,
    ThinkingBlock,
    TokenCount,
    ToolResultBlock,
    ToolUseBlock,
    UrlSource,
)
from inferencecenter.api.body import checked, invalid_field
from inferencecenter.api.endpoint import TURN_ERRORS, Call, Operation, collect_turns, document, stream_turns
from inferencecenter.api.errors import ErrorFormat, status_of
from inferencecenter.api.message_images import result_message, user_message, with_stored_images
from inferencecenter.api.openai.answers import finish_of, merged_warnings, raise_failure
from inferencecenter.api.prompt_counts import COUNT_ERRORS, count_prompt_tokens
from inferencecenter.api.session_match import ConversationRequest, run_choices
from inferencecenter.api.tool_calls import arguments_text, calls_of_message
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol import events
from inferencecenter.protocol.requests import Infer
from inferencecenter.protocol.values import ChatMessage, MessageImagePart, MessageInParts, NamedTool, Tool, ToolCall
from inferencecenter.sessions.prompt_lookup import PromptQuery

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from inferencecenter.api.anthropic.message_schemas import Block, MessageParam, ResultBlock
    from inferencecenter.api.endpoint import Reply
    from inferencecenter.api.session_match import SessionMatch
    from inferencecenter.protocol.base import Event
    from inferencecenter.protocol.values import ToolChoice

# Errors.

_ERROR_TYPES: Final[Mapping[int, str]] = MappingProxyType(
    {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
    }
)


def message_error_status(error: InferenceCenterError) -> int:
    """Return the HTTP status of an error; a prompt that is too long is an invalid request."""
    if error.code in (ErrorCode.PROMPT_TOO_LONG, ErrorCode.CONTEXT_FULL):
        return 400
    return status_of(error)


def message_error_body(error: InferenceCenterError) -> bytes:
    """Return the JSON body of an error; the message names the field, for which there is no other place."""
    status = message_error_status(error)
    kind = _ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    message = error.message
    if error.code is ErrorCode.PROMPT_TOO_LONG:
        message = f"prompt is too long: {message}"
    if error.field is not None and error.field not in message:
        message = f"{error.field}: {message}"
    if error.hint is not None:
        message = f"{message.rstrip('.')}. {error.hint}"
    return orjson.dumps({"type": "error", "error": {"type": kind, "message": message}, "request_id": None})


MESSAGE_ERRORS: Final = ErrorFormat(
    answer=MessageError,
    body=message_error_body,
    status=message_error_status,
    last=partial(sse.event, name="error"),
)


# Requests.

BILLING_HEADER: Final = "x-anthropic-billing-header:"
"""Start of a system block for Anthropic's billing; it changes with each request, so its KV could not be reused."""

_FIELD_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "json_schema": "output_config.format",
        "prefix": "messages",
        "params.max_tokens": "max_tokens",
        "params.temperature": "temperature",
        "params.top_p": "top_p",
        "params.top_k": "top_k",
        "params.stop": "stop_sequences",
    }
)
"""Fields of ``infer`` by their names in this API."""


_UserParts: TypeAlias = "list[str | MessageImagePart]"
"""Texts and images of a user's message."""


def conversation_of(request: CountTokensRequest) -> tuple[ChatMessage | MessageInParts, ...]:
    """Return the conversation, with the results of tool calls as messages of their own.

    A message of the assistant at its end is the start of the answer, see ``prefix_of``, and not part of it.

    Raises:
        InferenceCenterError: ``invalid_request`` for blocks in the wrong message.
    """
    if not request.messages:
        raise invalid_field("messages", "messages: at least one message is required")
    messages: list[ChatMessage | MessageInParts | _UserParts] = []
    system = [block.text for block in request.system or () if not block.text.startswith(BILLING_HEADER)]
    if any(system):
        messages.append(ChatMessage(role="system", content="\n".join(system)))
    called: set[str] = set()
    begun = prefix_of(request) is not None
    for index, message in enumerate(request.messages[:-1] if begun else request.messages):
        where = f"messages.{index}"
        if message.role == "assistant":
            answer = _answer(message, where)
            called |= {call.call_id for call in answer.tool_calls or ()}
            messages.append(answer)
        else:
            messages += _converted(message, where, called)
    if not messages or (not isinstance(messages[-1], list) and messages[-1].role != "tool"):
        raise invalid_field(
            f"messages.{len(request.messages) - 1}.role",
            "the last message must have role user, or be the start of an answer",
        )
    return tuple(_joined(messages))


def prefix_of(request: CountTokensRequest) -> str | None:
    """Return the start of the answer: the text of an assistant's message at the end, ``None`` without one."""
    last = request.messages[-1]
    if last.role != "assistant" or not all(isinstance(block, MessageText) for block in last.content):
        return None
    return "".join(block.text for block in last.content if isinstance(block, MessageText))


def _joined(
    messages: Iterable[ChatMessage | MessageInParts | _UserParts],
) -> Iterator[ChatMessage | MessageInParts]:
    """Yield messages; consecutive ones of the user are one, since many templates require alternating roles."""
    parts: _UserParts | None = None
    for message in messages:
        if isinstance(message, list):
            parts = [] if parts is None else parts
            parts += message
            continue
        if parts is not None:
            yield user_message(parts)
            parts = None
        yield message
    if parts is not None:
        yield user_message(parts)


def _answer(message: MessageParam, where: str) -> ChatMessage:
    text: list[str] = []
    reasoning: list[str] = []
    calls: list[ToolCall] = []
    for place, block in enumerate(message.content):
        match block:
            case MessageText():
                text.append(block.text)
            case ThinkingBlock():
                reasoning.append(block.thinking)
            case ToolUseBlock():
                arguments = arguments_text(block.input, f"{where}.content.{place}.input")
                calls.append(ToolCall(call_id=block.id, name=block.name, arguments=arguments))
            case _:
                raise _misplaced(f"{where}.content.{place}", block, message)
    return ChatMessage(
        role="assistant",
        content="".join(text),
        reasoning="".join(reasoning) or None,
        tool_calls=calls_of_message(calls, f"{where}.content"),
    )


def _converted(
    message: MessageParam, where: str, called: set[str]
) -> Iterator[ChatMessage | MessageInParts | _UserParts]:
    """Yield the messages of a user or of the system, in the order of their blocks.

    A system message among the others is written as the user's: Claude Code ends a conversation with one, and many
    templates refuse one that is not the first.
    """
    parts: _UserParts = []
    for place, block in enumerate(message.content):
        if isinstance(block, ToolResultBlock) and message.role == "user":
            if block.tool_use_id not in called:
                raise invalid_field(
                    f"{where}.content.{place}.tool_use_id",
                    "tool_use_id is not that of a tool_use in an earlier message",
                )
            if parts:
                yield parts
                parts = []
            yield _result(block)
        elif isinstance(block, ThinkingBlock | ToolUseBlock | ToolResultBlock):
            raise _misplaced(f"{where}.content.{place}", block, message)
        else:
            parts.append(_part(block))
    if parts or not message.content:
        yield parts


def _result(block: ToolResultBlock) -> ChatMessage | MessageInParts:
    parts = [*map(_part, block.content)]
    if block.is_error:
        first = parts[0] if parts else ""
        parts = [f"Error: {first}", *parts[1:]] if isinstance(first, str) else ["Error: ", *parts]
    return result_message(parts, block.tool_use_id)


def _part(block: ResultBlock) -> str | MessageImagePart:
    if isinstance(block, ImageBlock):
        if isinstance(block.source, UrlSource):
            return MessageImagePart(type="image", url=block.source.url)
        return MessageImagePart(type="image", data=block.source.data)
    if isinstance(block, MessageText):
        return block.text
    if isinstance(block, SearchResultBlock):
        return "\n".join([block.title, block.source, *(part.text for part in block.content)])
    return block.source.data if block.title is None else f"{block.title}\n{block.source.data}"


def _misplaced(field: str, block: Block, message: MessageParam) -> InferenceCenterError:
    return invalid_field(field, f"a {block.type} block does not belong to messages of role {message.role}")


def tools_of(request: CountTokensRequest) -> list[Tool] | None:
    """Return the tools that the model is offered.

    Raises:
        InferenceCenterError: ``invalid_request`` for two of the same name.
    """
    tools = [
        Tool(name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict)
        for tool in request.tools or ()
    ]
    if len({tool.name for tool in tools}) < len(tools):
        raise invalid_field("tools", "two tools have the same name")
    return tools or None


def thinking_of(request: CountTokensRequest) -> bool | None:
    """Return whether the model reasons, ``None`` for its default."""
    kind = None if request.thinking is None else request.thinking.type
    return None if kind in (None, "between_tools") else kind != "disabled"


def _tool_choice(request: CountTokensRequest) -> ToolChoice:
    choice, names = request.tool_choice, [tool.name for tool in request.tools or ()]
    if choice is None or choice.type == "auto":
        return "auto"
    if choice.type == "none":
        return "none"
    if choice.type == "any":
        if not names:
            raise invalid_field("tool_choice", "tool_choice requires a call, and there are no tools")
        return "required"
    if choice.name is None:
        raise invalid_field("tool_choice.name", "tool_choice of the type tool needs a name")
    if choice.name not in names:
        raise invalid_field("tool_choice.name", f"tool_choice names {choice.name}, which is not among the tools")
    return NamedTool(name=choice.name)


def infer_of(request: MessagesRequest, place: SessionMatch) -> Infer:
    """Return the turn that answers in a matched session.

    Raises:
        InferenceCenterError: ``invalid_request``.
    """
    params = {
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "stop": request.stop_sequences,
    }
    form = (request.output_config and request.output_config.format) or request.output_format
    return checked(
        Infer,
        {
            "op": "infer",
            "session_id": place.session_id,
            "messages": list(place.remaining),
            "params": {name: value for name, value in params.items() if value is not None},
            "tools": tools_of(request),
            "tool_choice": _tool_choice(request),
            "parallel_tool_calls": request.tool_choice is None or not request.tool_choice.disable_parallel_tool_use,
            "json_schema": None if form is None else form.schema_,
            "strict_schema": False,
            "prefix": None if form is not None else prefix_of(request) or None,
            "thinking": thinking_of(request),
            "thinking_required": False,
        },
    )


# Responses.

_STOP_REASONS: Final[Mapping[str, str]] = MappingProxyType(
    {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
)


def _stop_reason(end: events.End) -> str:
    """Return why a turn ended.

    Raises:
        InferenceCenterError: ``engine_unavailable`` if the turn was ended by another party.
    """
    finish = finish_of(end)
    if end.finish_reason == "context_full":
        return "model_context_window_exceeded"
    return "stop_sequence" if finish == "stop" and end.stop is not None else _STOP_REASONS[finish]


def _usage(end: events.End | None) -> dict[str, int]:
    """Return the token usage; before the end it is not known."""
    usage = None if end is None else end.usage
    return {
        "input_tokens": 0 if usage is None else usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0 if usage is None else usage.cached_tokens,
        "output_tokens": 0 if usage is None else usage.completion_tokens,
    }


class MessageCollector:
    """Collects the blocks of an answer."""

    def __init__(self, model: str, warnings: Sequence[str] = ()) -> None:
        self.message_id = f"msg_{secrets.token_urlsafe(18)}"
        self._model = model
        self._warnings = warnings
        self._blocks: list[dict[str, Any]] = []
        self._pieces: list[str] = []
        self._end: events.End | None = None

    def take(self, _index: int, event: Event) -> None:
        """Add an event.

        Raises:
            InferenceCenterError: The turn failed.
        """
        match event:
            case events.Token():
                self._add("text", event.content, {"text": ""})
            case events.Reasoning():
                self._add("thinking", event.content, {"thinking": "", "signature": ""})
            case events.ToolCall():
                if event.name is not None:
                    self._close()
                    self._blocks.append({"type": "tool_use", "id": event.call_id, "name": event.name, "input": {}})
                self._pieces.append(event.arguments)
            case events.End():
                self._close()
                self._end = event
            case _:
                raise_failure(event)

    def document(self) -> dict[str, Any]:
        """Return the message as far as it is known."""
        end = self._end
        message = {
            "id": self.message_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": self._blocks,
            "stop_reason": None if end is None else _stop_reason(end),
            "stop_sequence": None if end is None else end.stop,
            "usage": _usage(end),
        }
        warnings = merged_warnings(self._warnings, () if end is None else (end,))
        return {**message, "warnings": warnings} if warnings else message

    def _add(self, kind: str, text: str, empty: Mapping[str, str]) -> None:
        if not self._blocks or self._blocks[-1]["type"] != kind:
            self._close()
            self._blocks.append({"type": kind, **empty})
        self._pieces.append(text)

    def _close(self) -> None:
        if self._blocks:
            block, text = self._blocks[-1], "".join(self._pieces)
            if block["type"] == "tool_use":
                block["input"] = _arguments(text)
            else:
                block[block["type"]] = text
        self._pieces = []


def _arguments(text: str) -> Any:
    """Return the arguments of a call; empty if the token limit truncated them."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}


class MessageEventWriter:
    """Encodes the events of a stream: at most one block is open, and content of another block closes it."""

    def __init__(self, model: str, warnings: Sequence[str]) -> None:
        self._start = MessageCollector(model, warnings).document()
        self._begun = False
        self._open: str | None = None
        self._n_blocks = 0
        self._before_text = b""

    def write(self, _index: int, event: Event) -> bytes:
        """Return the encoded events of an event of the turn, possibly none.

        Raises:
            InferenceCenterError: The turn failed.
        """
        if type(event) is events.Token and self._open == "text":
            return self._before_text + orjson.dumps(event.content) + b"}}\n\n"
        match event:
            case events.Token():
                return self._begin("text", {"text": ""}) + self._delta("text_delta", "text", event.content)
            case events.Reasoning():
                started = self._begin("thinking", {"thinking": "", "signature": ""})
                return started + self._delta("thinking_delta", "thinking", event.content)
            case events.ToolCall():
                started = b""
                if event.name is not None:
                    started = self._close() + self._begin(
                        "tool_use", {"id": event.call_id, "name": event.name, "input": {}}
                    )
                return started + self._delta("input_json_delta", "partial_json", event.arguments)
            case events.End():
                delta = {"stop_reason": _stop_reason(event), "stop_sequence": event.stop}
                warned = {"warnings": list(event.warnings)} if event.warnings else {}
                return b"".join(
                    (
                        self._start_message(),
                        self._close(),
                        _encoded("message_delta", {"delta": delta, "usage": _usage(event), **warned}),
                        _encoded("message_stop", {}),
                    )
                )
            case _:
                raise_failure(event)
                return b""

    def _start_message(self) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        return _encoded("message_start", {"message": self._start})

    def _begin(self, kind: str, block: Mapping[str, Any]) -> bytes:
        if self._open == kind:
            return b""
        closed = self._start_message() + self._close()
        self._open = kind
        self._before_text = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,' % (
            self._n_blocks,
        ) + (b'"delta":{"type":"text_delta","text":')
        return closed + _encoded(
            "content_block_start", {"index": self._n_blocks, "content_block": {"type": kind, **block}}
        )

    def _delta(self, kind: str, field: str, text: str) -> bytes:
        if not text:
            return b""
        return _encoded("content_block_delta", {"index": self._n_blocks, "delta": {"type": kind, field: text}})

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        self._n_blocks += 1
        return _encoded("content_block_stop", {"index": self._n_blocks - 1})


def _encoded(kind: str, fields: Mapping[str, Any]) -> bytes:
    return sse.event(orjson.dumps({"type": kind, **fields}), name=kind)


PING: Final = _encoded("ping", {})
"""Keeps an idle connection open."""


# Handlers.

_MANY_BLOCKS: Final = 256
"""From this number on the blocks of a conversation take more than a millisecond to convert."""


async def create(call: Call) -> Reply:
    """Handle a request: answer a conversation."""
    request: MessagesRequest = call.body
    messages = await _messages(call)
    user_id = None if request.metadata is None else request.metadata.user_id
    conversation = ConversationRequest(
        messages=messages, model=request.model, metadata={} if user_id is None else {"user_id": user_id}
    )
    turns = run_choices(
        call.context,
        call.request_context,
        (conversation,),
        n=1,
        infer=lambda place, _: infer_of(request, place),
        names=_FIELD_NAMES,
    )
    if not request.stream:
        return await collect_turns(turns, MessageCollector(request.model, call.warnings))
    return stream_turns(turns, MessageEventWriter(request.model, call.warnings).write, keepalive=PING)


async def count_tokens(call: Call) -> Reply:
    """Handle a request: count the tokens of a conversation."""
    request: CountTokensRequest = call.body
    query = PromptQuery(
        messages=await _messages(call),
        model=request.model,
        tools=tools_of(request) or (),
        thinking=thinking_of(request),
        prefix=prefix_of(request) or "",
    )
    return document({"input_tokens": await count_prompt_tokens(call.context, call.request_context, query)})


async def _messages(call: Call) -> tuple[ChatMessage, ...]:
    """Return the conversation; a long one is converted in a thread, round-robin over clients."""
    request: CountTokensRequest = call.body
    if sum(1 + len(message.content) for message in request.messages) < _MANY_BLOCKS:
        messages = conversation_of(request)
    else:
        messages = await call.context.worker.run(call.caller.client.client_id, partial(conversation_of, request))
    return await with_stored_images(call.context, call.caller.client, messages)


OPERATIONS: Final = (
    Operation(
        method="POST",
        path="/v1/messages",
        summary="Create a message.",
        handler=create,
        body=MessagesRequest,
        query=MessagesQuery,
        answer=AnswerMessage,
        event=MessageStreamEvent,
        errors=TURN_ERRORS,
        fields=MESSAGE_FIELDS,
        error_format=MESSAGE_ERRORS,
    ),
    Operation(
        method="POST",
        path="/v1/messages/count_tokens",
        summary="Count the tokens of a message's prompt.",
        handler=count_tokens,
        body=CountTokensRequest,
        query=MessagesQuery,
        answer=TokenCount,
        errors=COUNT_ERRORS,
        fields=MESSAGE_FIELDS,
        error_format=MESSAGE_ERRORS,
    ),
)

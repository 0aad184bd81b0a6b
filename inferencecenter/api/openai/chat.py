"""``/v1/chat/completions``: answers a conversation, as a document or a stream.

The mapping of requests to sessions, the handler, and the writers of chunks and documents.
"""

from __future__ import annotations

import secrets
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import orjson

from inferencecenter.api import sse
from inferencecenter.api.body import checked
from inferencecenter.api.endpoint import TURN_ERRORS, Call, Operation, Stream, document
from inferencecenter.api.openai.chat_schemas import ChatCompletion, ChatCompletionChunk, ChatRequest
from inferencecenter.api.openai.finish_reason import finish_of, finite, raise_failure, usage_of, warnings_of
from inferencecenter.api.openai.sampling import TIERS, check_stream_options, raw_params, with_request_fields
from inferencecenter.api.session_match import ConversationRequest, run_choices
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol import events
from inferencecenter.protocol.requests import Infer
from inferencecenter.protocol.values import ChatMessage, NamedTool, Tool, ToolCall

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping

    from inferencecenter.api.endpoint import Reply
    from inferencecenter.api.openai.chat_schemas import ChatRequestMessage
    from inferencecenter.api.request_turns import RequestTurns
    from inferencecenter.api.session_match import SessionMatch
    from inferencecenter.protocol.base import Event
    from inferencecenter.protocol.requests import RawParams
    from inferencecenter.protocol.values import TokenLogprobs, TokenProbability, ToolChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatHead:
    """Fields common to all chunks of a response; ``top_logprobs`` is ``None`` unless requested."""

    completion_id: str
    created: int
    model: str
    n: int = 1
    include_usage: bool = False
    top_logprobs: int | None = None


class ChatChunkWriter:
    """Encodes the chunks of a stream; those of plain text differ in few bytes."""

    def __init__(self, head: ChatHead) -> None:
        self._head = head
        common = {
            "id": head.completion_id,
            "object": "chat.completion.chunk",
            "created": head.created,
            "model": head.model,
            "system_fingerprint": None,
        }
        self._prefix = b"data: " + orjson.dumps(common)[:-1] + b',"choices":['
        self._suffix = b'],"usage":null}\n\n' if head.include_usage else b"]}\n\n"
        self._begun = [False] * head.n
        self._ends: list[events.End | None] = [None] * head.n
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
                return self._begin(index) + self._chunk(index, {"content": event.content}, event.logprobs)
            case events.Reasoning():
                return self._begin(index) + self._chunk(index, {"reasoning_content": event.content}, event.logprobs)
            case events.ToolCall():
                return self._begin(index) + self._chunk(index, {"tool_calls": [_call_delta(event)]}, event.logprobs)
            case events.End():
                self._ends[index] = event
                chunk = self._chunk(index, {}, None, finish=finish_of(event))
                return self._begin(index) + _with_warnings(chunk, event.warnings)
            case _:
                raise_failure(event)
                return b""

    def last(self) -> bytes:
        """Return the end of a stream whose turns have all ended."""
        if not self._head.include_usage:
            return sse.DONE
        usage = usage_of([end for end in self._ends if end is not None], n=self._head.n)
        return b'%b],"usage":%b}\n\n%b' % (self._prefix, orjson.dumps(usage), sse.DONE)

    def _begin(self, index: int) -> bytes:
        if self._begun[index]:
            return b""
        self._begun[index] = True
        return self._chunk(index, {"role": "assistant", "content": ""}, None)

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: Iterable[TokenLogprobs] | None, *, finish: str | None = None
    ) -> bytes:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": None if logprobs is None else _logprobs(logprobs, self._head.top_logprobs or 0),
            "finish_reason": finish,
        }
        return self._prefix + orjson.dumps(choice) + self._suffix


def _with_warnings(chunk: bytes, warnings: tuple[str, ...]) -> bytes:
    return b'%b,"warnings":%b}\n\n' % (chunk[: -len(b"}\n\n")], orjson.dumps(warnings)) if warnings else chunk


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
        said = {
            "id": head.completion_id,
            "object": "chat.completion",
            "created": head.created,
            "model": head.model,
            "choices": [self._choice(index, choice) for index, choice in enumerate(self._choices)],
            "usage": usage_of(ends, n=head.n),
            "system_fingerprint": None,
        }
        warnings = warnings_of(ends)
        return {**said, "warnings": warnings} if warnings else said

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
        if choice.calls:
            message["tool_calls"] = [_call(call) for call in choice.calls.values()]
        top = self._head.top_logprobs
        return {
            "index": index,
            "message": message,
            "logprobs": None if top is None else _logprobs(choice.logprobs, top),
            "finish_reason": finish_of(choice.end),
        }


def _call_delta(event: events.ToolCall) -> dict[str, Any]:
    if event.name is None:
        return {"index": event.index, "function": {"arguments": event.arguments}}
    return {
        "index": event.index,
        "id": event.call_id,
        "type": "function",
        "function": {"name": event.name, "arguments": event.arguments},
    }


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = {"name": call["name"], "arguments": "".join(call["arguments"])}
    return {"id": call["id"], "type": "function", "function": function}


def _logprobs(entries: Iterable[TokenLogprobs], top: int) -> dict[str, Any]:
    content = [
        {**_probability(entry), "top_logprobs": [_probability(each) for each in entry.top[:top]]} for entry in entries
    ]
    return {"content": content, "refusal": None}


def _probability(entry: TokenLogprobs | TokenProbability) -> dict[str, Any]:
    # Incomplete characters are shown as U+FFFD; their bytes are not known here.
    known = "\N{REPLACEMENT CHARACTER}" not in entry.token
    return {
        "token": entry.token,
        "logprob": finite(entry.logprob),
        "bytes": list(entry.token.encode()) if known else None,
    }


OPENAI_FIELD_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "json_schema": "response_format",
        "thinking": "reasoning_effort",
        "priority": "service_tier",
        "params.max_tokens": "max_tokens",
        "params.n_probs": "top_logprobs",
        "params.seed": "seed",
        "params.stop": "stop",
    }
)
"""Fields of ``infer`` by their names in this API."""

_ANY_OBJECT: Final[Mapping[str, Any]] = MappingProxyType({"type": "object"})


def check(request: ChatRequest) -> None:
    """Refuse contradictory fields.

    Raises:
        InferenceCenterError: ``invalid_request`` with the field.
    """
    check_stream_options(request)
    if request.max_tokens is not None and request.max_completion_tokens is not None:
        raise _refused("max_completion_tokens", "max_tokens and max_completion_tokens are the same: give one of them")
    if request.top_logprobs is not None and not request.logprobs:
        raise _refused("top_logprobs", "top_logprobs needs logprobs")
    _check_tools(request)
    _check_form(request)
    _check_messages(request.messages)
    _params(request, choice=0)


def conversation_of(request: ChatRequest) -> ConversationRequest:
    """Return the conversation to be answered.

    Raises:
        InferenceCenterError: ``invalid_request``.
    """
    ids = {name: getattr(request, name) for name in ("user", "safety_identifier", "prompt_cache_key")}
    metadata = {name: value for name, value in ids.items() if value is not None} | (request.metadata or {})
    if len(metadata) > 16:
        raise _refused(
            "metadata", f"metadata has {len(metadata)} entries including those of other fields; at most 16 are allowed"
        )
    return ConversationRequest(messages=tuple(map(_said, request.messages)), model=request.model, metadata=metadata)


def infer_of(request: ChatRequest, place: SessionMatch, choice: int) -> Infer:
    """Return the turn that answers in a matched session.

    Raises:
        InferenceCenterError: ``invalid_request``.
    """
    effort = request.reasoning_effort
    return checked(
        Infer,
        {
            "op": "infer",
            "session_id": place.session_id,
            "messages": list(place.remaining),
            "params": _params(request, choice=choice),
            "tools": _tools(request),
            "tool_choice": _tool_choice(request),
            "parallel_tool_calls": request.parallel_tool_calls,
            "json_schema": _schema(request),
            "regex": request.regex,
            "grammar": request.grammar,
            "thinking": None if effort is None else effort != "none",
            "priority": TIERS[request.service_tier or "auto"],
        },
    )


def _params(request: ChatRequest, *, choice: int) -> RawParams:
    n_probs = max(1, request.top_logprobs or 0) if request.logprobs else 0
    max_tokens = request.max_tokens or request.max_completion_tokens
    return raw_params(request, max_tokens=max_tokens, n_probs=n_probs, choice=choice)


def _said(message: ChatRequestMessage) -> ChatMessage:
    calls = tuple(
        ToolCall(call_id=call.id, name=call.function.name, arguments=call.function.arguments)
        for call in message.tool_calls or ()
    )
    return ChatMessage(
        role="system" if message.role == "developer" else message.role,
        content=message.text,
        reasoning=message.reasoning_content,
        tool_calls=calls or None,
        tool_call_id=message.tool_call_id,
    )


def _check_messages(messages: list[ChatRequestMessage]) -> None:
    called: dict[str, str] = {}
    for index, message in enumerate(messages):
        where = f"messages.{index}"
        _check_message(message, where)
        if message.role == "tool":
            _check_result(message, where, called)
        called |= {call.id: call.function.name for call in message.tool_calls or ()}
    if messages[-1].role not in ("user", "tool"):
        raise _refused(f"messages.{len(messages) - 1}.role", "the last message must have role user or tool")


def _check_message(message: ChatRequestMessage, where: str) -> None:
    role = message.role
    if message.content is None and message.tool_calls is None:
        raise _refused(f"{where}.content", f"{where}.content is missing")
    for name, owner in (("reasoning_content", "assistant"), ("tool_calls", "assistant"), ("tool_call_id", "tool")):
        if role != owner and getattr(message, name) is not None:
            raise _refused(f"{where}.{name}", f"{name} belongs to messages of role {owner}")
    if role != "tool" and message.name is not None:
        raise _refused(f"{where}.name", "name is not supported: templates distinguish speakers by role")


def _check_result(message: ChatRequestMessage, where: str, called: Mapping[str, str]) -> None:
    if message.tool_call_id is None:
        raise _refused(f"{where}.tool_call_id", f"{where}.tool_call_id is missing")
    name = called.get(message.tool_call_id)
    if name is None:
        raise _refused(f"{where}.tool_call_id", "tool_call_id is not that of a call in an earlier message")
    if message.name not in (None, name):
        raise _refused(f"{where}.name", f"name is {message.name}, and the call asked for {name}")


def _check_tools(request: ChatRequest) -> None:
    choice, names = request.tool_choice, [tool.function.name for tool in request.tools or ()]
    if len(set(names)) < len(names):
        raise _refused("tools", "two tools have the same name")
    if (choice.type == "function") != (choice.function is not None):
        raise _refused("tool_choice", "function belongs to tool_choice of the type function")
    if choice.function is not None and choice.function.name not in names:
        raise _refused("tool_choice", f"tool_choice names {choice.function.name}, which is not among the tools")
    if choice.type == "required" and not names:
        raise _refused("tool_choice", "tool_choice is required, and there are no tools")


def _check_form(request: ChatRequest) -> None:
    wanted, form = request.response_format, _schema(request)
    if wanted is not None and (wanted.type == "json_schema") != (wanted.json_schema is not None):
        raise _refused("response_format", "json_schema belongs to response_format of the type json_schema")
    given = {"response_format": form, "regex": request.regex, "grammar": request.grammar}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise _refused(names[1], f"{names[0]} excludes {names[1]}")
    if names and request.tools and request.tool_choice.type != "none":
        raise _refused(names[0], f"{names[0]} excludes tools, unless tool_choice is none")


def _schema(request: ChatRequest) -> Mapping[str, Any] | None:
    wanted = request.response_format
    if wanted is None or wanted.type == "text":
        return None
    given = None if wanted.json_schema is None else wanted.json_schema.schema_
    return dict(_ANY_OBJECT) if given is None else given


def _tools(request: ChatRequest) -> list[Tool] | None:
    offered = [each.function for each in request.tools or ()]
    return [Tool(name=each.name, description=each.description, parameters=each.parameters) for each in offered] or None


def _tool_choice(request: ChatRequest) -> ToolChoice:
    choice = request.tool_choice
    if choice.function is not None:
        return NamedTool(name=choice.function.name)
    assert choice.type != "function", "checked by _check_tools"
    return choice.type


def _refused(field: str, message: str) -> InferenceCenterError:
    return InferenceCenterError(ErrorCode.INVALID_REQUEST, message, field=field)


_MANY_MESSAGES: Final = 256
"""From this size on a conversation takes more than a millisecond to convert."""


async def create(call: Call) -> Reply:
    """Handle a request: answer a conversation."""
    conversation = await _conversation(call)
    if call.body.stream:
        return Stream(_chunks(call, conversation))
    with _turns(call, conversation) as turns:
        gathered = ChatCollector(_head(call))
        async for batch in turns.batches():
            for index, event in batch:
                gathered.take(index, event)
    return document(gathered.document())


async def _conversation(call: Call) -> ConversationRequest:
    """Return the conversation to be answered; a long one is converted in a thread, round-robin over clients.

    Raises:
        InferenceCenterError: ``invalid_request``.
    """
    request: ChatRequest = call.body
    if len(request.messages) < _MANY_MESSAGES:
        return _checked(request)
    return await call.context.worker.run(call.caller.client.client_id, partial(_checked, request))


def _checked(request: ChatRequest) -> ConversationRequest:
    check(request)
    return conversation_of(request)


async def _chunks(call: Call, conversation: ConversationRequest) -> AsyncGenerator[bytes, None]:
    with _turns(call, conversation) as turns:
        chunks = ChatChunkWriter(_head(call))
        async for batch in turns.batches():
            if written := b"".join([chunks.write(index, event) for index, event in batch]):
                yield written
            elif not batch:
                yield sse.KEEPALIVE
        yield chunks.last()


@contextmanager
def _turns(call: Call, conversation: ConversationRequest) -> Iterator[RequestTurns]:
    """Run the turns of a request.

    Raises:
        InferenceCenterError: They cannot start; the error names the request's fields.
    """
    request: ChatRequest = call.body
    try:
        with run_choices(
            call.context,
            call.request_context,
            (conversation,),
            n=request.n,
            infer=lambda place, choice: infer_of(request, place, choice),
        ) as turns:
            yield turns
    except InferenceCenterError as error:
        raise with_request_fields(error, OPENAI_FIELD_NAMES) from None


def _head(call: Call) -> ChatHead:
    request: ChatRequest = call.body
    return ChatHead(
        completion_id=f"chatcmpl-{secrets.token_urlsafe(16)}",
        created=int(call.context.clock()),
        model=request.model or call.context.models.default,
        n=request.n,
        include_usage=request.stream_options is not None and request.stream_options.include_usage,
        top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
    )


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
    ),
)

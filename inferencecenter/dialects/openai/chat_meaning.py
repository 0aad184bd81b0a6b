"""What a request for a chat completion means to sessions: a conversation, and how its question is answered. Pure."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from inferencecenter.dialects.body import checked
from inferencecenter.dialects.conversation import Conversation
from inferencecenter.dialects.openai.sampling import TIERS, check_stream_options, raw_params
from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.requests import Infer
from inferencecenter.protocol.values import ChatMessage, NamedTool, Tool, ToolCall

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inferencecenter.dialects.conversation import Place
    from inferencecenter.dialects.openai.chat_request import ChatRequest, Message
    from inferencecenter.protocol.requests import RawParams
    from inferencecenter.protocol.values import ToolChoice

FIELDS: Final[Mapping[str, str]] = MappingProxyType(
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
"""Fields of ``infer`` by their names here."""

_ANY_OBJECT: Final[Mapping[str, Any]] = MappingProxyType({"type": "object"})


def check(request: ChatRequest) -> None:
    """Refuse what contradicts itself.

    Raises:
        InferenceCenterError: ``invalid_request`` with the field.
    """
    check_stream_options(request)
    if request.max_tokens is not None and request.max_completion_tokens is not None:
        raise _refused("max_completion_tokens", "max_tokens and max_completion_tokens are the same; give it once")
    if request.top_logprobs is not None and not request.logprobs:
        raise _refused("top_logprobs", "top_logprobs needs logprobs")
    _check_tools(request)
    _check_form(request)
    _check_messages(request.messages)
    _params(request, choice=0)


def conversation_of(request: ChatRequest) -> Conversation:
    """Return what is to be answered.

    Raises:
        InferenceCenterError: ``invalid_request``.
    """
    ids = {name: getattr(request, name) for name in ("user", "safety_identifier", "prompt_cache_key")}
    metadata = {name: value for name, value in ids.items() if value is not None} | (request.metadata or {})
    if len(metadata) > 16:
        raise _refused("metadata", f"metadata has {len(metadata)} entries with those of other fields; 16 fit")
    return Conversation(messages=tuple(map(_said, request.messages)), model=request.model, metadata=metadata)


def infer_of(request: ChatRequest, place: Place, choice: int) -> Infer:
    """Return the turn that answers in a place.

    Raises:
        InferenceCenterError: ``invalid_request``.
    """
    effort = request.reasoning_effort
    return checked(
        Infer,
        {
            "op": "infer",
            "session_id": place.session_id,
            "messages": list(place.unsaid),
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


def _said(message: Message) -> ChatMessage:
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


def _check_messages(messages: list[Message]) -> None:
    called: dict[str, str] = {}
    for index, message in enumerate(messages):
        where = f"messages.{index}"
        _check_message(message, where)
        if message.role == "tool":
            _check_result(message, where, called)
        called |= {call.id: call.function.name for call in message.tool_calls or ()}
    if messages[-1].role not in ("user", "tool"):
        raise _refused(
            f"messages.{len(messages) - 1}.role", "the last of messages must have role user or tool: it is the question"
        )


def _check_message(message: Message, where: str) -> None:
    role = message.role
    if message.content is None and message.tool_calls is None:
        raise _refused(f"{where}.content", f"{where}.content is missing")
    for name, owner in (("reasoning_content", "assistant"), ("tool_calls", "assistant"), ("tool_call_id", "tool")):
        if role != owner and getattr(message, name) is not None:
            raise _refused(f"{where}.{name}", f"{name} belongs to messages of role {owner}")
    if role != "tool" and message.name is not None:
        raise _refused(f"{where}.name", "name is not supported: templates know speakers by their role")


def _check_result(message: Message, where: str, called: Mapping[str, str]) -> None:
    if message.tool_call_id is None:
        raise _refused(f"{where}.tool_call_id", f"{where}.tool_call_id is missing")
    name = called.get(message.tool_call_id)
    if name is None:
        raise _refused(f"{where}.tool_call_id", "tool_call_id is that of no call in an earlier message")
    if message.name not in (None, name):
        raise _refused(f"{where}.name", f"name is {message.name}, and the call asked for {name}")


def _check_tools(request: ChatRequest) -> None:
    choice, names = request.tool_choice, [tool.function.name for tool in request.tools or ()]
    if len(set(names)) < len(names):
        raise _refused("tools", "two tools have the same name")
    if (choice.type == "function") != (choice.function is not None):
        raise _refused("tool_choice", "function belongs to tool_choice of the type function")
    if choice.function is not None and choice.function.name not in names:
        raise _refused("tool_choice", f"tool_choice names {choice.function.name}, which is none of the tools")
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
    assert choice.type != "function", "_check_tools has seen to it"
    return choice.type


def _refused(field: str, message: str) -> InferenceCenterError:
    return InferenceCenterError(ErrorCode.INVALID_REQUEST, message, field=field)

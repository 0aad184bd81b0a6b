"""Frames between the daemon and a template process: a 4-byte little-endian length, then MessagePack."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.values import ChatMessage, Role, Tool, ToolCall
from inferencecenter.sessions.output_parsing.call_format import ReasoningTags, TemplateCapabilities
from inferencecenter.sessions.output_parsing.json_calls import JsonCalls
from inferencecenter.sessions.output_parsing.named_calls import NamedCalls
from inferencecenter.sessions.output_parsing.tagged_calls import TaggedCalls
from inferencecenter.sessions.prompt.renderer import RenderedPrompt, RenderInput
from inferencecenter.sessions.prompt.special_tokens import RenderedText

if TYPE_CHECKING:
    from inferencecenter.ipc.messages import ModelInfo
    from inferencecenter.sessions.output_parsing.call_format import ToolCallFormat

MAX_FRAME_BYTES: Final = 256 * 1024 * 1024
"""Largest reply in bytes; below the memory limit of the process."""
LENGTH_BYTES: Final = 4

_FORMATS: Final[dict[str, type[ToolCallFormat]]] = {
    call_format.__name__: call_format for call_format in (JsonCalls, NamedCalls, TaggedCalls)
}


class TemplateSource(msgspec.Struct, frozen=True):
    """A model's template and the model's fields that it needs, named as in ``ModelInfo``."""

    chat_template: str
    special_tokens: tuple[str, ...]
    bos_token: str
    eos_token: str
    add_bos: bool

    @classmethod
    def of(cls, model: ModelInfo) -> TemplateSource:
        """Return the template of a model."""
        return cls(model.chat_template, model.special_tokens, model.bos_token, model.eos_token, model.add_bos)


class LoadTemplate(msgspec.Struct, frozen=True, tag=True):
    """The first frame: the template, the CPU limit of each request, and the memory limit of the process."""

    source: TemplateSource
    cpu_s: float
    memory_bytes: int


class MessageRow(msgspec.Struct, frozen=True, array_like=True):
    """A ``ChatMessage``; ``calls`` are the id, name and arguments of each call."""

    role: Role
    content: str
    reasoning: str | None
    calls: list[tuple[str, str, str]] | None
    tool_call_id: str | None


class RenderRequest(msgspec.Struct, frozen=True, tag=True):
    """A ``RenderInput``; ``tools`` are the name, description and parameters of each tool."""

    messages: list[MessageRow]
    now: str
    tools: list[tuple[str, str | None, dict[str, Any] | None]]
    thinking: bool | None


class TemplateLoaded(msgspec.Struct, frozen=True, tag=True):
    """The template compiles; carries the detected ``TemplateCapabilities``."""

    call_format: str | None
    format_fields: dict[str, Any]
    several: bool
    thinking: tuple[str, str] | None
    control: list[str]


class RenderReply(msgspec.Struct, frozen=True, tag=True):
    """A rendered conversation."""

    text: str
    cuts: list[int]
    literals: list[int]
    system_end: int


class RenderRefusal(msgspec.Struct, frozen=True, tag=True):
    """Why a request failed; the fields of an ``InferenceCenterError``."""

    code: str
    message: str
    hint: str | None
    field: str | None


class WorkerReply(msgspec.Struct, frozen=True):
    """Outcome of a request; after the ``last`` one the process exits because it has grown too large."""

    outcome: TemplateLoaded | RenderReply | RenderRefusal
    last: bool = False


request_decoder: Final = msgspec.msgpack.Decoder(LoadTemplate | RenderRequest)
reply_decoder: Final = msgspec.msgpack.Decoder(WorkerReply)
_encoder: Final = msgspec.msgpack.Encoder()


def encode(message: LoadTemplate | RenderRequest | WorkerReply) -> bytes:
    """Return a message as a frame.

    Raises:
        InferenceCenterError: ``invalid_request`` for a value that MessagePack cannot represent.
    """
    try:
        payload = _encoder.encode(message)
    except UnicodeEncodeError:
        raise InferenceCenterError(ErrorCode.INVALID_REQUEST, "a text is not Unicode", field="messages") from None
    except (OverflowError, RecursionError):
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST,
            "a schema has a number beyond 64 bits or is nested too deep",
            field="tools",
        ) from None
    return len(payload).to_bytes(LENGTH_BYTES, "little") + payload


def request_of(conversation: RenderInput) -> RenderRequest:
    """Return a conversation as a frame."""
    return RenderRequest(
        messages=[
            MessageRow(
                message.role,
                message.content,
                message.reasoning,
                None
                if message.tool_calls is None
                else [(call.call_id, call.name, call.arguments) for call in message.tool_calls],
                message.tool_call_id,
            )
            for message in conversation.messages
        ],
        now=conversation.now.isoformat(),
        tools=[(tool.name, tool.description, tool.parameters) for tool in conversation.tools],
        thinking=conversation.thinking,
    )


def input_of(request: RenderRequest) -> RenderInput:
    """Return the conversation of a frame; it was validated before."""
    return RenderInput(
        messages=tuple(map(_message, request.messages)),
        now=datetime.fromisoformat(request.now),
        tools=tuple(
            Tool.model_construct(name=name, description=description, parameters=parameters)
            for name, description, parameters in request.tools
        ),
        thinking=request.thinking,
    )


def _message(row: MessageRow) -> ChatMessage:
    calls = None
    if row.calls is not None:
        calls = tuple(
            ToolCall.model_construct(call_id=call_id, name=name, arguments=arguments)
            for call_id, name, arguments in row.calls
        )
    return ChatMessage.model_construct(
        role=row.role, content=row.content, reasoning=row.reasoning, tool_calls=calls, tool_call_id=row.tool_call_id
    )


def loaded(capabilities: TemplateCapabilities) -> TemplateLoaded:
    """Return a model's capabilities as a frame."""
    call_format, thinking = capabilities.call_format, capabilities.thinking
    return TemplateLoaded(
        call_format=None if call_format is None else type(call_format).__name__,
        format_fields={} if call_format is None else msgspec.to_builtins(call_format),
        several=capabilities.several,
        thinking=None if thinking is None else (thinking.opens, thinking.closes),
        control=sorted(capabilities.control),
    )


def capabilities_of(reply: TemplateLoaded) -> TemplateCapabilities:
    """Return the model's capabilities that a process detected.

    Raises:
        msgspec.ValidationError: The frame is malformed.
    """
    if reply.call_format is not None and reply.call_format not in _FORMATS:
        raise msgspec.ValidationError(f"unknown tool call format {reply.call_format}")
    return TemplateCapabilities(
        call_format=None
        if reply.call_format is None
        else msgspec.convert(reply.format_fields, _FORMATS[reply.call_format]),
        several=reply.several,
        thinking=None if reply.thinking is None else ReasoningTags(*reply.thinking),
        control=frozenset(reply.control),
    )


def rendered(prompt: RenderedPrompt) -> RenderReply:
    """Return a rendered conversation as a frame."""
    rendering = prompt.rendering
    return RenderReply(rendering.text, list(rendering.cuts), sorted(rendering.literals), prompt.system_end)


def prompt_of(reply: RenderReply, capabilities: TemplateCapabilities) -> RenderedPrompt:
    """Return the rendered conversation of a frame."""
    rendering = RenderedText(reply.text, tuple(reply.cuts), frozenset(reply.literals))
    return RenderedPrompt(rendering, reply.system_end, capabilities)

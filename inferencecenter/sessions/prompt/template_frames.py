"""Frames between the daemon and a template process: a 4-byte little-endian length, then MessagePack."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.images import ImageRef
from inferencecenter.protocol.values import ChatMessage, MessageImage, Tool, ToolCall
from inferencecenter.sessions.output_parsing.call_format import ReasoningTags, TemplateCapabilities
from inferencecenter.sessions.output_parsing.json_calls import JsonCalls, NamedCalls
from inferencecenter.sessions.output_parsing.tagged_calls import TaggedCalls
from inferencecenter.sessions.prompt.renderer import RenderedPrompt, RenderInput
from inferencecenter.sessions.prompt.special_tokens import RenderedText

if TYPE_CHECKING:
    from pydantic import BaseModel

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
        return cls(model.chat_template, model.special_tokens, model.bos_token, model.eos_token, model.add_bos)


class LoadTemplate(msgspec.Struct, frozen=True, tag=True):
    """The first frame: the template, the CPU limit of each request, and the memory limit of the process."""

    source: TemplateSource
    cpu_s: float
    memory_bytes: int


class RenderRequest(msgspec.Struct, frozen=True, tag=True):
    """A ``RenderInput``; ``now`` is in ISO 8601, which keeps the offset from UTC."""

    messages: tuple[ChatMessage, ...]
    now: str
    tools: tuple[Tool, ...]
    thinking: bool | None


class TemplateLoaded(msgspec.Struct, frozen=True, tag=True):
    """The template compiles; carries the detected ``TemplateCapabilities``."""

    call_format: str | None
    format_fields: dict[str, Any]
    parallel_calls: bool
    thinking: tuple[str, str] | None
    chooses_thinking: bool
    omits_empty_thinking: bool
    control: list[str]


class RenderReply(msgspec.Struct, frozen=True, tag=True):
    """A rendered conversation."""

    text: str
    cuts: list[int]
    literals: list[int]
    system_end: int
    images: dict[int, ImageRef]


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


def _model(kind: type[BaseModel], fields: dict[str, Any]) -> BaseModel:
    """Return a message or a tool of a frame; it was validated before."""
    if fields.get("images") is not None:
        fields["images"] = tuple(MessageImage.model_construct(**image) for image in fields["images"])
    if fields.get("tool_calls") is not None:
        fields["tool_calls"] = tuple(ToolCall.model_construct(**call) for call in fields["tool_calls"])
    return kind.model_construct(**fields)


request_decoder: Final = msgspec.msgpack.Decoder(LoadTemplate | RenderRequest, dec_hook=_model)
reply_decoder: Final = msgspec.msgpack.Decoder(WorkerReply)
_encoder: Final = msgspec.msgpack.Encoder(enc_hook=vars)


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
    return RenderRequest(
        tuple(conversation.messages), conversation.now.isoformat(), tuple(conversation.tools), conversation.thinking
    )


def input_of(request: RenderRequest) -> RenderInput:
    return RenderInput(request.messages, datetime.fromisoformat(request.now), request.tools, request.thinking)


def loaded(capabilities: TemplateCapabilities) -> TemplateLoaded:
    call_format, thinking = capabilities.call_format, capabilities.thinking
    return TemplateLoaded(
        call_format=None if call_format is None else type(call_format).__name__,
        format_fields={} if call_format is None else msgspec.to_builtins(call_format),
        parallel_calls=capabilities.parallel_calls,
        thinking=None if thinking is None else (thinking.opens, thinking.closes),
        chooses_thinking=capabilities.chooses_thinking,
        omits_empty_thinking=capabilities.omits_empty_thinking,
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
        parallel_calls=reply.parallel_calls,
        thinking=None if reply.thinking is None else ReasoningTags(*reply.thinking),
        chooses_thinking=reply.chooses_thinking,
        omits_empty_thinking=reply.omits_empty_thinking,
        control=frozenset(reply.control),
    )


def rendered(prompt: RenderedPrompt) -> RenderReply:
    rendering = prompt.rendering
    return RenderReply(
        rendering.text, list(rendering.cuts), sorted(rendering.literals), prompt.system_end, dict(rendering.images)
    )


def prompt_of(reply: RenderReply, capabilities: TemplateCapabilities) -> RenderedPrompt:
    rendering = RenderedText(reply.text, tuple(reply.cuts), frozenset(reply.literals), images=reply.images)
    return RenderedPrompt(rendering, reply.system_end, capabilities)

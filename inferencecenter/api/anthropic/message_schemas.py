"""Request and response models of the Messages API, and the table of its fields. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, Field, StringConstraints

from inferencecenter.api.foreign_fields import DialectModel, FieldRule, FieldTable
from inferencecenter.api.openai.chat_schemas import AnswerModel
from inferencecenter.api.openai.sampling import FOUND_BY_TEXT, Stop
from inferencecenter.protocol.params_model import MAX_TOKENS
from inferencecenter.protocol.values import CallId, ToolName

if TYPE_CHECKING:
    from collections.abc import Mapping

MOST_MESSAGES: Final = 10_000


class MessageText(DialectModel):
    """A text block."""

    type: Literal["text"] = Field(description="Type of the object.")
    text: str = Field(description="The text.")


class PlainTextSource(DialectModel):
    """The text of a document."""

    type: Literal["text"] = Field(description="Type of the object.")
    media_type: Literal["text/plain"] = Field(default="text/plain", description="Media type of the text.")
    data: str = Field(description="The text.")


class DocumentBlock(DialectModel):
    """A document, which must be plain text."""

    type: Literal["document"] = Field(description="Type of the object.")
    source: PlainTextSource = Field(description="Its text.")
    title: str | None = Field(default=None, description="Its title.")


class SearchResultBlock(DialectModel):
    """A result of a search that the client made."""

    type: Literal["search_result"] = Field(description="Type of the object.")
    source: str = Field(description="Where it is from.")
    title: str = Field(description="Its title.")
    content: Annotated[list[MessageText], Field(max_length=1000, fail_fast=True)] = Field(description="Its text.")


class ThinkingBlock(DialectModel):
    """Reasoning of an earlier answer."""

    type: Literal["thinking"] = Field(description="Type of the object.")
    thinking: str = Field(description="The reasoning.")
    signature: str | None = Field(default=None, description="Not checked.")


class ToolUseBlock(DialectModel):
    """A tool call of an earlier answer."""

    type: Literal["tool_use"] = Field(description="Type of the object.")
    id: CallId = Field(description="Id of the call.")
    name: ToolName = Field(description="Name of the tool.")
    input: dict[str, Any] = Field(description="Its arguments.")


def _as_blocks(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class Base64Source(DialectModel):
    """A file in the request."""

    type: Literal["base64"] = Field(description="Type of the object.")
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"] = Field(
        description="Format; that of the file decides."
    )
    data: str = Field(description="The file in Base64.")


class UrlSource(DialectModel):
    """A file at an address, which the daemon fetches from hosts in `server.image_hosts`."""

    type: Literal["url"] = Field(description="Type of the object.")
    url: str = Field(max_length=4096, description="Its address, with https.")


class ImageBlock(DialectModel):
    """An image for the model."""

    type: Literal["image"] = Field(description="Type of the object.")
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")] = Field(description="Its file.")


ResultBlock: TypeAlias = Annotated[
    MessageText | ImageBlock | DocumentBlock | SearchResultBlock, Field(discriminator="type")
]


class ToolResultBlock(DialectModel):
    """The result of a tool call."""

    type: Literal["tool_result"] = Field(description="Type of the object.")
    tool_use_id: CallId = Field(description="Id of the call.")
    content: Annotated[
        list[ResultBlock],
        Field(max_length=1000, fail_fast=True),
        BeforeValidator(_as_blocks, json_schema_input_type=str | list[ResultBlock]),
    ] = Field(default_factory=list, description="The result; blocks are joined as lines.")
    is_error: bool = Field(default=False, description="Whether the tool failed; the model is informed.")


Block: TypeAlias = Annotated[
    MessageText | ImageBlock | DocumentBlock | SearchResultBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]
Blocks: TypeAlias = Annotated[
    list[Block],
    Field(max_length=10_000, fail_fast=True),
    BeforeValidator(_as_blocks, json_schema_input_type=str | list[Block]),
]
SystemBlocks: TypeAlias = Annotated[
    list[MessageText],
    Field(max_length=1000, fail_fast=True),
    BeforeValidator(_as_blocks, json_schema_input_type=str | list[MessageText]),
]


class MessageParam(DialectModel):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"] = Field(description="Role of the author.")
    content: Blocks = Field(description="Its blocks; text blocks are joined as lines.")


class ClientTool(DialectModel):
    """A tool that the client runs."""

    type: Literal["custom"] = Field(default="custom", description="Type of the object.")
    name: ToolName = Field(description="Its name.")
    description: Annotated[str, StringConstraints(max_length=131_072)] | None = Field(
        default=None, description="Description for the model."
    )
    input_schema: dict[str, Any] = Field(description="JSON Schema of its arguments.")
    strict: bool = Field(
        default=False, description="Whether a keyword of the schema that cannot be enforced is refused."
    )


class ToolSelection(DialectModel):
    """Whether the model calls tools."""

    type: Literal["auto", "any", "tool", "none"] = Field(description="`tool` requires the named one, `any` one of all.")
    name: ToolName | None = Field(default=None, description="The tool, with the type `tool`.")
    disable_parallel_tool_use: bool = Field(default=False, description="Whether at most one tool is called.")


class ThinkingConfig(DialectModel):
    """Whether the model reasons before it answers."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"] = Field(
        description="`disabled` disables reasoning, `enabled` and `adaptive` enable it; otherwise the model's default."
    )


class OutputJson(DialectModel):
    """The JSON Schema of the answer."""

    type: Literal["json_schema"] = Field(description="Type of the object.")
    schema_: dict[str, Any] = Field(alias="schema", description="The JSON Schema.")


class OutputConfig(DialectModel):
    """Options of the answer."""

    format: OutputJson | None = Field(default=None, description="Format of the answer.")


class MessageMetadata(DialectModel):
    """Metadata of a request."""

    user_id: Annotated[str, StringConstraints(max_length=512)] | None = Field(
        default=None, description="Kept with the session."
    )


class CountTokensRequest(DialectModel):
    """A conversation whose tokens are counted."""

    model: Annotated[str, StringConstraints(min_length=1, max_length=256)] = Field(
        description="A name listed by `/v1/models`."
    )
    messages: Annotated[list[MessageParam], Field(max_length=MOST_MESSAGES, fail_fast=True)] = Field(
        description="The conversation; the last message is from `user`, or the start of the answer.",
        json_schema_extra={"minItems": 1},
    )
    system: SystemBlocks | None = Field(
        default=None,
        description="The system prompt; blocks are joined as lines, without those that start with "
        "`x-anthropic-billing-header:`, which change with each request.",
    )
    tools: Annotated[list[ClientTool], Field(max_length=128, fail_fast=True)] | None = Field(
        default=None, description="Tools that the model may call, with distinct names."
    )
    tool_choice: ToolSelection | None = Field(default=None, description="Whether the model calls tools.")
    thinking: ThinkingConfig | None = Field(
        default=None, description="Whether the model reasons first; if absent, the model's default."
    )
    output_config: OutputConfig | None = Field(default=None, description="Options of the answer.")
    output_format: OutputJson | None = Field(
        default=None, description="Format of the answer without `output_config`, as the field was called first."
    )


class MessagesRequest(CountTokensRequest):
    """A request of the Messages API."""

    max_tokens: int = Field(ge=1, le=MAX_TOKENS, description="Maximum number of generated tokens.")
    stream: bool = Field(default=False, description="Whether the response is sent as server-sent events.")
    temperature: float | None = Field(default=None, ge=0, le=5, description="Sampling temperature.")
    top_p: float | None = Field(default=None, ge=0, le=1, description="As `params.top_p`.")
    top_k: int | None = Field(default=None, ge=0, description="As `params.top_k`.")
    stop_sequences: Stop | None = Field(default=None, description="Texts that end the generation where they begin.")
    metadata: MessageMetadata | None = Field(default=None, description="Kept with the session.")


class MessagesQuery(DialectModel):
    """Query of a request."""

    beta: str | None = Field(default=None, description="Ignored: features are always available.")


_BLOCKS: Final = frozenset({"text", "image", "document", "search_result", "thinking", "tool_use", "tool_result"})
_RESULT_BLOCKS: Final = frozenset({"text", "image", "document", "search_result"})


def _type_of(item: Any) -> str | None:
    kind = item.get("type") if isinstance(item, dict) else None
    return kind if isinstance(kind, str) else None


def _is_other_block(item: Any, _siblings: Mapping[str, Any]) -> bool:
    return (kind := _type_of(item)) is not None and kind not in _BLOCKS


def _is_other_result(item: Any, _siblings: Mapping[str, Any]) -> bool:
    return (kind := _type_of(item)) is not None and kind not in _RESULT_BLOCKS


def _is_server_tool(item: Any, _siblings: Mapping[str, Any]) -> bool:
    return (kind := _type_of(item)) is not None and kind != "custom"


_NO_SERVER_TOOLS: Final = "the daemon runs no tools"

MESSAGE_FIELDS: Final = FieldTable(
    "messages",
    MessagesRequest,
    CountTokensRequest,
    MessagesQuery,
    rules=(
        FieldRule(
            field="messages[].content[]",
            values="of another type",
            why="the model is given text, images, reasoning, calls and results",
            applies=_is_other_block,
        ),
        FieldRule(
            field="messages[].content[].content[]",
            values="of another type than `text`, `image`, `document` or `search_result`",
            why="the model is given text and images only",
            applies=_is_other_result,
        ),
        FieldRule(
            field="tools[]",
            values="of a type other than `custom`",
            why="the daemon cannot run tools of this type, so the model is not offered it",
            applies=_is_server_tool,
        ),
        FieldRule(field="cache_control", why=FOUND_BY_TEXT),
        FieldRule(field="tools[].cache_control", why=FOUND_BY_TEXT),
        FieldRule(field="messages[].content[].cache_control", why=FOUND_BY_TEXT),
        FieldRule(field="messages[].content[].citations", why="answers have no citations"),
        FieldRule(field="messages[].content[].caller", why="the model calls tools itself"),
        FieldRule(field="tools[].eager_input_streaming", why="arguments are always streamed"),
        FieldRule(field="tools[].defer_loading", why="the model is offered all tools"),
        FieldRule(field="tools[].input_examples", why="the model is given the schema only"),
        FieldRule(field="tools[].allowed_callers", why="the model calls tools itself"),
        FieldRule(field="thinking.budget_tokens", why="the model decides on the length of its reasoning"),
        FieldRule(field="thinking.display", why="reasoning is always returned"),
        FieldRule(field="output_config.effort", why="the model decides on the length of its reasoning"),
        FieldRule(field="context_management", why="the client edits the conversation"),
        FieldRule(field="container", why=_NO_SERVER_TOOLS),
        FieldRule(field="mcp_servers", why=_NO_SERVER_TOOLS),
        FieldRule(field="service_tier", why="the class of a turn is that of the token"),
        FieldRule(field="speed", why="there is one speed"),
        FieldRule(field="inference_geo", why="answers come from this machine"),
    ),
)
"""The fields of the Messages API."""


class AnswerText(AnswerModel):
    """A text block."""

    type: Literal["text"] = Field(description="Type of the object.")
    text: str = Field(description="The text.")


class AnswerThinking(AnswerModel):
    """A block of reasoning."""

    type: Literal["thinking"] = Field(description="Type of the object.")
    thinking: str = Field(description="The reasoning.")
    signature: str = Field(description="Always empty: reasoning is not signed.")


class AnswerToolUse(AnswerModel):
    """A tool call."""

    type: Literal["tool_use"] = Field(description="Type of the object.")
    id: str = Field(description="Id of the call.")
    name: str = Field(description="Name of the tool.")
    input: dict[str, Any] = Field(description="Its arguments.")


class MessageUsage(AnswerModel):
    """Token usage of a request."""

    input_tokens: int = Field(description="Tokens of the prompt that were read.")
    cache_creation_input_tokens: int = Field(description="Always 0: every prompt's KV is kept, at no cost.")
    cache_read_input_tokens: int = Field(description="Tokens of the prompt whose KV was reused.")
    output_tokens: int = Field(description="Tokens generated.")


StopReason: TypeAlias = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class AnswerMessage(AnswerModel):
    """A message of the model."""

    id: str = Field(description="`msg_…`.")
    type: Literal["message"] = Field(description="Type of the object.")
    role: Literal["assistant"] = Field(description="Role of the author.")
    model: str = Field(description="The model.")
    content: list[AnswerText | AnswerThinking | AnswerToolUse] = Field(description="The blocks.")
    stop_reason: StopReason | None = Field(description="Reason of the end.")
    stop_sequence: str | None = Field(description="The stop sequence that matched.")
    usage: MessageUsage = Field(description="Token usage.")
    warnings: list[str] | None = Field(
        default=None, description="Valid parameters that had no effect; absent if there are none."
    )


class MessageStreamEvent(BaseModel, extra="allow"):
    """An event of a stream, as in Anthropic's API."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "ping",
    ] = Field(description="Type of the event.")


class TokenCount(AnswerModel):
    """The number of tokens of a conversation."""

    input_tokens: int = Field(description="Tokens of the prompt.")


class MessageErrorDetail(AnswerModel):
    """An error, in Anthropic's format."""

    type: str = Field(description="Whose fault it is.")
    message: str = Field(description="What is wrong, and what to do about it.")


class MessageError(AnswerModel):
    """An error response."""

    type: Literal["error"] = Field(description="Type of the object.")
    error: MessageErrorDetail
    request_id: str | None = Field(description="Always null.")

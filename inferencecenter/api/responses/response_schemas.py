"""Response models of the Responses API. Pure."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from inferencecenter.api.responses.request_schemas import (
    AllowedTools,
    CallableTool,
    ChosenTool,
    ClientTool,
    ReasoningConfig,
    TextConfig,
    offered_tools,
)

Status = Literal["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"]
ItemState = Literal["in_progress", "completed", "incomplete"]


class ResponseObject(BaseModel):
    """Part of a response: immutable; null for unknown values."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


def _is_none(value: object) -> bool:
    return value is None


class TopLogprob(ResponseObject):
    """A candidate token."""

    token: str = Field(description="The text.")
    bytes: tuple[int, ...] = Field(description="The text in UTF-8.")
    logprob: float = Field(description="Natural logarithm of its probability.")


class Logprob(TopLogprob):
    """A generated token."""

    top_logprobs: tuple[TopLogprob, ...] = Field(description="The most likely tokens at its position.")


class OutputText(ResponseObject):
    """Text of the output."""

    type: Literal["output_text"] = "output_text"
    text: str = Field(description="The text.")
    annotations: tuple[()] = Field(default=(), description="Always empty.")
    logprobs: tuple[Logprob, ...] = Field(default=(), description="Token probabilities, if requested.")


class OutputMessage(ResponseObject):
    """A message of the model."""

    type: Literal["message"] = "message"
    id: str = Field(description="Its id.")
    role: Literal["assistant"] = "assistant"
    status: ItemState = Field(description="Whether it is complete.")
    content: tuple[OutputText, ...] = Field(description="The text.")


class ThoughtText(ResponseObject):
    """Text of reasoning."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str = Field(description="The text.")


class OutputReasoning(ResponseObject):
    """Reasoning of the model."""

    type: Literal["reasoning"] = "reasoning"
    id: str = Field(description="Its id.")
    status: ItemState = Field(description="Whether it is complete.")
    summary: tuple[()] = Field(default=(), description="Always empty.")
    content: tuple[ThoughtText, ...] = Field(description="The reasoning.")


class OutputCall(ResponseObject):
    """A function call of the model."""

    type: Literal["function_call"] = "function_call"
    id: str = Field(description="Id of the item.")
    call_id: str = Field(description="Id of the call.")
    name: str = Field(description="Name of the function.")
    namespace: str | None = Field(default=None, exclude_if=_is_none, description="Namespace of the function.")
    arguments: str = Field(description="Its arguments, as JSON text.")
    status: ItemState = Field(description="Whether it is complete.")


class OutputCustomCall(ResponseObject):
    """A call of a custom tool by the model."""

    type: Literal["custom_tool_call"] = "custom_tool_call"
    id: str = Field(description="Id of the item.")
    call_id: str = Field(description="Id of the call.")
    name: str = Field(description="Name of the tool.")
    namespace: str | None = Field(default=None, exclude_if=_is_none, description="Namespace of the tool.")
    input: str = Field(description="Its input.")
    status: ItemState = Field(description="Whether it is complete.")


class OutputCompaction(ResponseObject):
    """Summary that replaces the conversation before the response."""

    type: Literal["compaction"] = "compaction"
    id: str = Field(description="Its id.")
    encrypted_content: str = Field(description="The summary; it is not encrypted.")


class ListedMcpTool(ResponseObject):
    """A tool of an MCP server."""

    name: str = Field(description="Its name.")
    description: str = Field(description="Its description.")
    input_schema: dict[str, Any] = Field(description="JSON Schema of its arguments.")


class OutputMcpList(ResponseObject):
    """Tools of an MCP server that the model is offered; once in a conversation."""

    type: Literal["mcp_list_tools"] = "mcp_list_tools"
    id: str = Field(description="Its id.")
    server_label: str = Field(description="The server.")
    tools: tuple[ListedMcpTool, ...] = Field(description="The tools.")
    error: str | None = Field(default=None, exclude_if=_is_none, description="Why they cannot be listed.")


class OutputApprovalRequest(ResponseObject):
    """A call of a tool of an MCP server by the model, which runs once it is approved."""

    type: Literal["mcp_approval_request"] = "mcp_approval_request"
    id: str = Field(description="Its id, for `mcp_approval_response`.")
    server_label: str = Field(description="The server.")
    name: str = Field(description="Name of the tool.")
    arguments: str = Field(description="Its arguments, as JSON text.")


class McpCallFailure(ResponseObject):
    """Why a call has no result."""

    type: Literal["mcp_tool_execution_error"] = "mcp_tool_execution_error"
    content: str = Field(description="The reason, or the tool's own message.")


class OutputMcpCall(ResponseObject):
    """A call of a tool of an MCP server that was approved."""

    type: Literal["mcp_call"] = "mcp_call"
    id: str = Field(description="Its id.")
    server_label: str = Field(description="The server.")
    name: str = Field(description="Name of the tool.")
    arguments: str = Field(description="Its arguments, as JSON text.")
    approval_request_id: str = Field(description="Id of the item by which it was approved.")
    output: str | None = Field(default=None, description="Its result.")
    error: McpCallFailure | None = Field(default=None, description="Why there is none.")
    status: Literal["in_progress", "completed", "failed"] = Field(description="Its status.")


McpOutputItem = OutputMcpList | OutputMcpCall
OutputItem = (
    OutputMessage
    | OutputReasoning
    | OutputCall
    | OutputCustomCall
    | OutputCompaction
    | OutputApprovalRequest
    | McpOutputItem
)


class McpToolName(ResponseObject):
    """A tool of an MCP server, and the name by which the model calls it."""

    called: str = Field(description="Name for the model.")
    server_label: str = Field(description="The server.")
    name: str = Field(description="Its name there.")


class CachedTokens(ResponseObject):
    """Details of input tokens."""

    cached_tokens: int = Field(description="Tokens whose KV was reused.")
    cache_write_tokens: int = Field(default=0, description="Always 0.")


class ReasoningTokens(ResponseObject):
    """Details of output tokens."""

    reasoning_tokens: int = Field(description="Tokens up to the end of the reasoning, including its delimiters.")


class ResponseUsage(ResponseObject):
    """Token usage of a response."""

    input_tokens: int = Field(description="Tokens of the prompt.")
    input_tokens_details: CachedTokens = Field(description="Details.")
    output_tokens: int = Field(description="Generated tokens.")
    output_tokens_details: ReasoningTokens = Field(description="Details.")
    total_tokens: int = Field(description="Sum of both.")


class ResponseError(ResponseObject):
    """Error of a failed response."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"] = Field(description="Error code.")
    message: str = Field(description="Error message.")


class Incomplete(ResponseObject):
    """Reason of an incomplete response."""

    reason: str = Field(
        description="`max_output_tokens`, also if the context is full; otherwise the finish reason of the turn."
    )


class ConversationRef(ResponseObject):
    """The conversation of a response."""

    id: str = Field(description="Its id.")


class Echo(ResponseObject):
    """Fields that a response echoes from its request."""

    object: Literal["response"] = "response"
    created_at: int = Field(description="Unix seconds.")
    model: str = Field(description="The model.")
    instructions: str | None = Field(description="System message.")
    previous_response_id: str | None = Field(description="The response that this one continues.")
    conversation: ConversationRef | None = Field(default=None, description="The conversation that it is part of.")
    background: bool = Field(description="Whether it runs in the background.")
    store: bool = Field(description="Whether it may be stored on disk.")
    max_output_tokens: int | None = Field(description="Maximum number of generated tokens.")
    max_tool_calls: int | None = Field(description="As requested.")
    temperature: float | None = Field(description="As requested.")
    top_p: float | None = Field(description="As requested.")
    top_logprobs: int = Field(description="Number of most likely tokens per position.")
    text: TextConfig = Field(description="Format of the output.")
    tools: tuple[ClientTool, ...] = Field(description="Tools that the model may call.")
    tool_choice: (
        Literal["auto", "none", "required"] | Annotated[ChosenTool | AllowedTools, Field(discriminator="type")]
    ) = Field(description="Whether the model calls tools.")
    parallel_tool_calls: bool = Field(description="Whether the model may call several at once.")
    reasoning: ReasoningConfig = Field(description="Options of reasoning.")
    truncation: Literal["auto", "disabled"] = Field(description="Behavior when the context is full.")
    service_tier: Literal["default", "flex", "priority"] = Field(description="Priority class of the turn.")
    metadata: dict[str, str] = Field(description="As in the request.")
    user: str | None = Field(description="As in the request.")
    safety_identifier: str | None = Field(description="As in the request.")
    prompt_cache_key: str | None = Field(description="As in the request.")
    warnings: tuple[str, ...] = Field(default=(), description="Valid fields and parameters that had no effect.")

    @property
    def tools_by_name(self) -> dict[str, CallableTool]:
        """The tools by the names that the model calls them by."""
        return {offered.called: offered for offered in offered_tools(self.tools)}


class Note(Echo):
    """Note stored with a turn, to rebuild its response later; notes of other APIs are not of this form."""

    # A later version may have more fields, or fewer.
    model_config = ConfigDict(extra="ignore", frozen=True)

    generate: bool = Field(default=True, description="Whether text was to be generated.")
    compaction: OutputCompaction | None = Field(default=None, description="The first item of the output.")
    mcp_items: tuple[McpOutputItem, ...] = Field(default=(), description="The next items of the output.")
    mcp_tools: tuple[McpToolName, ...] = Field(default=(), description="Tools of MCP servers in the conversation.")

    @property
    def first_items(self) -> tuple[OutputItem, ...]:
        """The items before the model's own."""
        return (*(() if self.compaction is None else (self.compaction,)), *self.mcp_items)

    @property
    def mcp_by_name(self) -> dict[str, McpToolName]:
        """The tools of MCP servers by the names that the model calls them by."""
        return {tool.called: tool for tool in self.mcp_tools}


class Response(Echo):
    """A response."""

    id: str = Field(description="Its id.")
    status: Status = Field(description="Its status.")
    completed_at: int | None = Field(default=None, description="Unix seconds; of completed responses.")
    error: ResponseError | None = Field(default=None, description="The error, if it failed.")
    incomplete_details: Incomplete | None = Field(default=None, description="The reason, if it is incomplete.")
    output: tuple[OutputItem, ...] = Field(default=(), description="Reasoning, text and calls of the model.")
    usage: ResponseUsage | None = Field(default=None, description="Token usage, once it has ended.")


class InputTokens(ResponseObject):
    """The number of tokens of a prompt."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int = Field(description="Tokens of the prompt.")


class Deleted(ResponseObject):
    """Confirmation of a deletion."""

    id: str = Field(description="Its id.")
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class StreamEvent(ResponseObject):
    """An event of a stream: each type has its own fields, as documented by OpenAI."""

    model_config = ConfigDict(extra="allow", frozen=True)

    type: str = Field(description="Type of the event, such as `response.output_text.delta`.")
    sequence_number: int = Field(description="Index of the event in the response, from 0.")


class ItemList(ResponseObject):
    """A page of items."""

    object: Literal["list"] = "list"
    data: tuple[dict[str, Any], ...] = Field(description="The items.")
    first_id: str | None = Field(description="Id of the first.")
    last_id: str | None = Field(description="Id of the last, for `after` of the next page.")
    has_more: bool = Field(description="Whether there are further pages.")

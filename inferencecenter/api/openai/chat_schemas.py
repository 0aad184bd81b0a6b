"""Request and response models of chat completions, from which the OpenAPI document derives. Pure."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from inferencecenter.api.body import RequestModel
from inferencecenter.api.openai.sampling import MOST_PROBS, Sampling
from inferencecenter.protocol.params_model import MAX_TOKENS
from inferencecenter.protocol.values import CallId, Metadata, MetadataText, ToolName

MOST_MESSAGES: Final = 10_000


class TextPart(RequestModel):
    """A part of a message; only text is supported."""

    type: Literal["text"] = Field(description="Type of the object.")
    text: str = Field(description="The text.")


def _as_parts(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _as_object(value: object) -> object:
    return {"type": value} if isinstance(value, str) else value


Content: TypeAlias = Annotated[
    list[TextPart],
    Field(
        max_length=1000, fail_fast=True
    ),  # validated before the preceding validators, so that a longer one is not traversed
    BeforeValidator(_as_parts, json_schema_input_type=str | list[TextPart]),
]


class CalledFunction(RequestModel):
    """Function and arguments of a tool call."""

    name: ToolName = Field(description="Name of the function.")
    arguments: str = Field(description="Its arguments, as JSON text.")


class AskedCall(RequestModel):
    """A tool call of an assistant."""

    id: CallId = Field(description="Id of the call.")
    type: Literal["function"] = Field(default="function", description="Type of the object.")
    function: CalledFunction = Field(description="Function and arguments.")


class ChatRequestMessage(RequestModel):
    """A message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="Role of the author; `developer` is the same as `system`."
    )
    content: Content | None = Field(
        default=None,
        description="The content; parts are joined as lines. Optional only for an assistant with tool calls.",
    )
    reasoning_content: str | None = Field(default=None, description="Reasoning of an assistant before its content.")
    tool_calls: Annotated[list[AskedCall], Field(min_length=1, max_length=128, fail_fast=True)] | None = Field(
        default=None, description="Tool calls of an assistant."
    )
    tool_call_id: CallId | None = Field(default=None, description="The call whose result a tool message contains.")
    name: ToolName | None = Field(default=None, description="Only for a tool message: the name in its call.")

    @property
    def text(self) -> str:
        """The whole text."""
        return "\n".join(part.text for part in self.content or ())


class Function(RequestModel):
    """A function that the client can execute."""

    name: ToolName = Field(description="Its name.")
    description: Annotated[str, StringConstraints(max_length=16_384)] | None = Field(
        default=None, description="Description for the model."
    )
    parameters: dict[str, Any] | None = Field(default=None, description="JSON Schema of its arguments.")
    strict: bool = Field(default=False, description="Arguments always follow the schema, whatever the value.")


class ToolOffer(RequestModel):
    """A tool that the model may call."""

    type: Literal["function"] = Field(description="Type of the object.")
    function: Function = Field(description="The function.")


class ChosenFunction(RequestModel):
    """The function that the model has to call."""

    name: ToolName = Field(description="Its name.")


class ToolChoice(RequestModel):
    """Whether the model calls tools."""

    type: Literal["auto", "none", "required", "function"] = Field(description="`function` requires the named one.")
    function: ChosenFunction | None = Field(default=None, description="Only with the type `function`.")


class ResponseFormatSchema(RequestModel):
    """JSON Schema of the output."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")] = Field(description="Its name.")
    description: str | None = Field(default=None, description="Its purpose.")
    schema_: dict[str, Any] | None = Field(default=None, alias="schema", description="The JSON Schema.")
    strict: bool = Field(default=False, description="Output always follows the schema, whatever the value.")


class ResponseFormat(RequestModel):
    """Format of the output."""

    type: Literal["text", "json_object", "json_schema"] = Field(description="`json_object` is any JSON object.")
    json_schema: ResponseFormatSchema | None = Field(default=None, description="Only with the type `json_schema`.")


_Id: TypeAlias = Annotated[MetadataText, StringConstraints(max_length=512)]


class ChatRequest(Sampling):
    """A chat completion request."""

    messages: Annotated[list[ChatRequestMessage], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)] = (
        Field(description="The whole conversation, the last message from `user` or `tool`.")
    )
    max_completion_tokens: int | None = Field(
        default=None, ge=1, le=MAX_TOKENS, description="Maximum number of generated tokens; the same as `max_tokens`."
    )
    logprobs: bool = Field(default=False, description="Whether token probabilities are returned.")
    top_logprobs: int | None = Field(
        default=None,
        ge=0,
        le=MOST_PROBS,
        description="Number of most likely tokens to return at each position; only with `logprobs`.",
    )
    response_format: ResponseFormat | None = Field(default=None, description="Format of the output.")
    tools: Annotated[list[ToolOffer], Field(max_length=128, fail_fast=True)] | None = Field(
        default=None, description="Tools that the model may call, with distinct names."
    )
    tool_choice: Annotated[
        ToolChoice,
        BeforeValidator(_as_object, json_schema_input_type=Literal["auto", "none", "required"] | ToolChoice),
    ] = Field(default=ToolChoice(type="auto"), description="Whether the model calls tools.")
    parallel_tool_calls: bool = Field(default=True, description="Whether it may call several at once.")
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        default=None, description="`none` disables thinking, all others enable it; if absent, the model's default."
    )
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1, fail_fast=True)] | None = Field(
        default=None, description="Answers are text."
    )
    service_tier: Literal["auto", "default", "priority", "fast", "flex"] | None = Field(
        default=None, description="The class of the turn: `priority` is interactive, `flex` is batch."
    )
    store: Literal[False] = Field(default=False, description="Nothing is stored; `/v1/responses` stores answers.")
    metadata: Metadata | None = Field(default=None, description="Kept with the session.")
    safety_identifier: _Id | None = Field(default=None, description="Kept with the session as metadata.")
    prompt_cache_key: _Id | None = Field(default=None, description="Kept with the session as metadata.")


Finish = Literal["stop", "length", "tool_calls", "content_filter"]


class AnswerModel(BaseModel):
    """Part of a response."""

    model_config = ConfigDict(extra="forbid", strict=True)


class PromptTokensDetails(AnswerModel):
    """Details of prompt tokens."""

    cached_tokens: int = Field(description="Those whose KV was reused.")


class CompletionTokensDetails(AnswerModel):
    """Details of completion tokens."""

    reasoning_tokens: int = Field(
        description="Those up to the end of what the model thought, with the marks around that."
    )


class TokenUsage(AnswerModel):
    """Token usage of a request; a prompt with several choices counts once."""

    prompt_tokens: int = Field(description="Tokens the model was given.")
    completion_tokens: int = Field(description="Tokens the model made.")
    total_tokens: int = Field(description="Both.")
    prompt_tokens_details: PromptTokensDetails = Field(description="More of the prompt's.")
    completion_tokens_details: CompletionTokensDetails = Field(description="More of the answer's.")


class Probability(AnswerModel):
    """A token and its probability before any sampler."""

    token: str = Field(description="Its text; bytes that are no whole character are shown as U+FFFD.")
    logprob: float = Field(description="Natural logarithm of its probability; -9999 for none.")
    bytes: list[int] | None = Field(description="Its text in UTF-8; null for what is no whole character.")


class TokenProbabilities(Probability):
    """The sampled token, and the most likely ones at its position."""

    top_logprobs: list[Probability] = Field(description="The likeliest, the likeliest first.")


class ChoiceLogprobs(AnswerModel):
    """Probabilities of a choice's tokens."""

    content: list[TokenProbabilities] = Field(description="One for each token.")
    refusal: None = Field(description="Always null.")


class ToolCallFunction(AnswerModel):
    """Function and arguments of a tool call."""

    name: str = Field(description="Name of the function.")
    arguments: str = Field(description="Its arguments, as JSON text.")


class MessageToolCall(AnswerModel):
    """A tool call of the model."""

    id: str = Field(description="Id of the call.")
    type: Literal["function"] = Field(description="Type of the object.")
    function: ToolCallFunction = Field(description="Function and arguments.")


class ChatMessageOut(AnswerModel):
    """A message of the model."""

    role: Literal["assistant"] = Field(description="Role of the author.")
    content: str | None = Field(description="The content; null if there are only tool calls.")
    refusal: None = Field(description="Always null.")
    reasoning_content: str | None = Field(
        default=None, description="Reasoning before the content; absent if there is none."
    )
    tool_calls: list[MessageToolCall] | None = Field(default=None, description="Tool calls; absent if there are none.")


class ChatChoice(AnswerModel):
    """A choice."""

    index: int = Field(description="Index of the choice.")
    message: ChatMessageOut = Field(description="The message.")
    logprobs: ChoiceLogprobs | None = Field(description="Token probabilities, if requested.")
    finish_reason: Finish = Field(description="Reason of the end.")


class ChatCompletion(AnswerModel):
    """A chat completion."""

    id: str = Field(description="`chatcmpl-…`.")
    object: Literal["chat.completion"] = Field(description="Type of the object.")
    created: int = Field(description="Unix seconds.")
    model: str = Field(description="The model.")
    choices: list[ChatChoice] = Field(description="The choices.")
    usage: TokenUsage = Field(description="Token usage.")
    system_fingerprint: None = Field(description="Always null.")
    warnings: list[str] | None = Field(
        default=None, description="Valid parameters that had no effect; absent if there are none."
    )


class FunctionDelta(AnswerModel):
    """Increment of a function call."""

    name: str | None = Field(default=None, description="Name of the function, once.")
    arguments: str = Field(description="Text to append to the arguments.")


class ToolCallDelta(AnswerModel):
    """Increment of a tool call; the first one has id, type and name."""

    index: int = Field(description="Index of the call.")
    id: str | None = Field(default=None, description="Id of the call, once.")
    type: Literal["function"] | None = Field(default=None, description="Type of the object, once.")
    function: FunctionDelta = Field(description="Function and arguments.")


class Delta(AnswerModel):
    """Increment of a message."""

    role: Literal["assistant"] | None = Field(default=None, description="Role of the author, once.")
    content: str | None = Field(default=None, description="Text to append.")
    reasoning_content: str | None = Field(default=None, description="Text to append to the reasoning.")
    tool_calls: list[ToolCallDelta] | None = Field(default=None, description="Increments of tool calls.")


class ChunkChoice(AnswerModel):
    """Increment of a choice."""

    index: int = Field(description="Index of the choice.")
    delta: Delta = Field(description="The increment.")
    logprobs: ChoiceLogprobs | None = Field(description="Token probabilities, if requested.")
    finish_reason: Finish | None = Field(description="Reason of the end, in its last chunk.")


class ChatCompletionChunk(AnswerModel):
    """A chunk of the stream; the data of the stream's last event is `[DONE]`."""

    id: str = Field(description="`chatcmpl-…`, the same in all chunks.")
    object: Literal["chat.completion.chunk"] = Field(description="Type of the object.")
    created: int = Field(description="Unix seconds.")
    model: str = Field(description="The model.")
    system_fingerprint: None = Field(description="Always null.")
    choices: list[ChunkChoice] = Field(description="Increments of choices; empty in the last chunk with `usage`.")
    usage: TokenUsage | None = Field(default=None, description="In the last chunk, with `include_usage`.")
    warnings: list[str] | None = Field(
        default=None,
        description="With a `finish_reason`: valid parameters that had no effect; absent if there are none.",
    )

"""Requests for chat completions, and their answers, as the OpenAPI document describes them. Pure."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from inferencecenter.api.body import RequestModel
from inferencecenter.api.openai.sampling import MOST_PROBS, Sampling
from inferencecenter.protocol.params_model import MAX_TOKENS
from inferencecenter.protocol.values import CallId, Metadata, MetadataText, ToolName

MOST_MESSAGES: Final = 10_000


class TextPart(RequestModel):
    """A piece of a message; only text is understood."""

    type: Literal["text"] = Field(description="What it is.")
    text: str = Field(description="The text.")


def _as_parts(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _as_object(value: object) -> object:
    return {"type": value} if isinstance(value, str) else value


Content: TypeAlias = Annotated[
    list[TextPart],
    Field(max_length=1000, fail_fast=True),  # before what comes before it, so that a longer one is not looked into
    BeforeValidator(_as_parts, json_schema_input_type=str | list[TextPart]),
]


class CalledFunction(RequestModel):
    """What a tool was asked for."""

    name: ToolName = Field(description="The tool.")
    arguments: str = Field(description="Its arguments, as JSON text.")


class AskedCall(RequestModel):
    """A tool that an assistant asked for."""

    id: CallId = Field(description="Names the call.")
    type: Literal["function"] = Field(default="function", description="What it is.")
    function: CalledFunction = Field(description="What was asked for.")


class ChatRequestMessage(RequestModel):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="Who speaks; `developer` is `system`."
    )
    content: Content | None = Field(
        default=None,
        description="What is said; parts are lines. Only an assistant that asks for tools may say nothing.",
    )
    reasoning_content: str | None = Field(default=None, description="What an assistant thought before.")
    tool_calls: Annotated[list[AskedCall], Field(min_length=1, max_length=128, fail_fast=True)] | None = Field(
        default=None, description="Tools that an assistant asked for."
    )
    tool_call_id: CallId | None = Field(default=None, description="The call that a message of a tool is the result of.")
    name: ToolName | None = Field(default=None, description="Only of a tool, as its call has it.")

    @property
    def text(self) -> str:
        """All that is said."""
        return "\n".join(part.text for part in self.content or ())


class Function(RequestModel):
    """A function that the client can run."""

    name: ToolName = Field(description="Its name.")
    description: Annotated[str, StringConstraints(max_length=16_384)] | None = Field(
        default=None, description="What it does, for the model."
    )
    parameters: dict[str, Any] | None = Field(default=None, description="JSON Schema of its arguments.")
    strict: bool = Field(default=False, description="Arguments always follow the schema, asked for or not.")


class ToolOffer(RequestModel):
    """A tool that the model may ask for."""

    type: Literal["function"] = Field(description="What it is.")
    function: Function = Field(description="The function.")


class ChosenFunction(RequestModel):
    """The function that the model has to call."""

    name: ToolName = Field(description="Its name.")


class ToolChoice(RequestModel):
    """Whether the model asks for tools."""

    type: Literal["auto", "none", "required", "function"] = Field(description="`function` demands the one named.")
    function: ChosenFunction | None = Field(default=None, description="Only with the type `function`.")


class ResponseFormatSchema(RequestModel):
    """The form of an answer."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")] = Field(description="What to call it.")
    description: str | None = Field(default=None, description="What it is for.")
    schema_: dict[str, Any] | None = Field(default=None, alias="schema", description="The JSON Schema.")
    strict: bool = Field(default=False, description="Answers always follow the schema, asked for or not.")


class ResponseFormat(RequestModel):
    """What the answer is to be."""

    type: Literal["text", "json_object", "json_schema"] = Field(description="`json_object` is any object.")
    json_schema: ResponseFormatSchema | None = Field(default=None, description="Only with the type `json_schema`.")


_Id: TypeAlias = Annotated[MetadataText, StringConstraints(max_length=512)]


class ChatRequest(Sampling):
    """A conversation that is to be answered."""

    messages: Annotated[list[ChatRequestMessage], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)] = (
        Field(description="All of it, the last from `user` or `tool`.")
    )
    max_completion_tokens: int | None = Field(
        default=None, ge=1, le=MAX_TOKENS, description="Tokens to generate at most; the same as `max_tokens`."
    )
    logprobs: bool = Field(default=False, description="Whether probabilities of the tokens are told.")
    top_logprobs: int | None = Field(
        default=None, ge=0, le=MOST_PROBS, description="Likeliest tokens to tell at each place; only with `logprobs`."
    )
    response_format: ResponseFormat | None = Field(default=None, description="What the answer is to be.")
    tools: Annotated[list[ToolOffer], Field(max_length=128, fail_fast=True)] | None = Field(
        default=None, description="Tools that the model may ask for, each name once."
    )
    tool_choice: Annotated[
        ToolChoice,
        BeforeValidator(_as_object, json_schema_input_type=Literal["auto", "none", "required"] | ToolChoice),
    ] = Field(default=ToolChoice(type="auto"), description="Whether it does.")
    parallel_tool_calls: bool = Field(default=True, description="Whether it may ask for several at once.")
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        default=None, description="`none` has the model not think, all others have it think; without it as it likes."
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
    """Part of an answer."""

    model_config = ConfigDict(extra="forbid", strict=True)


class PromptTokensDetails(AnswerModel):
    """Tokens of prompts."""

    cached_tokens: int = Field(description="Those whose KV was reused.")


class CompletionTokensDetails(AnswerModel):
    """Tokens of answers."""

    reasoning_tokens: int = Field(
        description="Those up to the end of what the model thought, with the marks around that."
    )


class TokenUsage(AnswerModel):
    """Tokens of a request; a prompt that is answered several times counts once."""

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
    """The sampled token, and the likeliest at its place."""

    top_logprobs: list[Probability] = Field(description="The likeliest, the likeliest first.")


class ChoiceLogprobs(AnswerModel):
    """Probabilities of an answer's tokens."""

    content: list[TokenProbabilities] = Field(description="One for each token.")
    refusal: None = Field(description="There is none.")


class ToolCallFunction(AnswerModel):
    """What a tool is asked for."""

    name: str = Field(description="The tool.")
    arguments: str = Field(description="Its arguments, as JSON text.")


class MessageToolCall(AnswerModel):
    """A tool that the model asks for."""

    id: str = Field(description="Names the call.")
    type: Literal["function"] = Field(description="What it is.")
    function: ToolCallFunction = Field(description="What is asked for.")


class ChatMessageOut(AnswerModel):
    """An answer."""

    role: Literal["assistant"] = Field(description="Who speaks.")
    content: str | None = Field(description="What is said; null where only tools are asked for.")
    refusal: None = Field(description="There is none.")
    reasoning_content: str | None = Field(default=None, description="What was thought before; absent for nothing.")
    tool_calls: list[MessageToolCall] | None = Field(default=None, description="Tools asked for; absent for none.")


class ChatChoice(AnswerModel):
    """One of the answers."""

    index: int = Field(description="Which.")
    message: ChatMessageOut = Field(description="The answer.")
    logprobs: ChoiceLogprobs | None = Field(description="Where they were asked for.")
    finish_reason: Finish = Field(description="Why it ends.")


class ChatCompletion(AnswerModel):
    """The answers to a conversation."""

    id: str = Field(description="`chatcmpl-…`.")
    object: Literal["chat.completion"] = Field(description="What it is.")
    created: int = Field(description="Unix seconds.")
    model: str = Field(description="The model that answered.")
    choices: list[ChatChoice] = Field(description="The answers.")
    usage: TokenUsage = Field(description="Its tokens.")
    system_fingerprint: None = Field(description="There is none.")
    warnings: list[str] | None = Field(
        default=None, description="Legal parameters of which one had no effect; absent for none."
    )


class FunctionDelta(AnswerModel):
    """More of a call."""

    name: str | None = Field(default=None, description="The tool, once.")
    arguments: str = Field(description="Text to append to the arguments.")


class ToolCallDelta(AnswerModel):
    """More of a tool's call: the first has all names."""

    index: int = Field(description="Which call.")
    id: str | None = Field(default=None, description="Names the call, once.")
    type: Literal["function"] | None = Field(default=None, description="What it is, once.")
    function: FunctionDelta = Field(description="What is asked for.")


class Delta(AnswerModel):
    """What is new."""

    role: Literal["assistant"] | None = Field(default=None, description="Who speaks, once.")
    content: str | None = Field(default=None, description="Text to append.")
    reasoning_content: str | None = Field(default=None, description="Text to append to what is thought.")
    tool_calls: list[ToolCallDelta] | None = Field(default=None, description="More of tools' calls.")


class ChunkChoice(AnswerModel):
    """What is new of one of the answers."""

    index: int = Field(description="Which.")
    delta: Delta = Field(description="What is new.")
    logprobs: ChoiceLogprobs | None = Field(description="Where they were asked for.")
    finish_reason: Finish | None = Field(description="Why it ends, with its last.")


class ChatCompletionChunk(AnswerModel):
    """A piece of the answers; the data of the stream's last event is `[DONE]`."""

    id: str = Field(description="`chatcmpl-…`, the same in all of them.")
    object: Literal["chat.completion.chunk"] = Field(description="What it is.")
    created: int = Field(description="Unix seconds.")
    model: str = Field(description="The model that answers.")
    system_fingerprint: None = Field(description="There is none.")
    choices: list[ChunkChoice] = Field(description="What is new; none in the last where it has `usage`.")
    usage: TokenUsage | None = Field(default=None, description="In the last, where `include_usage` asks for it.")
    warnings: list[str] | None = Field(
        default=None,
        description="With a `finish_reason`: legal parameters of which one had no effect; absent for none.",
    )

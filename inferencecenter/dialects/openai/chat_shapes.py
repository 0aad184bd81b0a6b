"""Answers to requests for chat completions, as the OpenAPI document describes them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Finish = Literal["stop", "length", "tool_calls", "content_filter"]


class Shape(BaseModel):
    """Part of an answer."""

    model_config = ConfigDict(extra="forbid", strict=True)


class PromptTokensDetails(Shape):
    """Tokens of prompts."""

    cached_tokens: int = Field(description="Those whose KV was reused.")


class CompletionTokensDetails(Shape):
    """Tokens of answers."""

    reasoning_tokens: int = Field(
        description="Those up to the end of what the model thought, with the marks around that."
    )


class TokenUsage(Shape):
    """Tokens of a request; a prompt that is answered several times counts once."""

    prompt_tokens: int = Field(description="Tokens the model was given.")
    completion_tokens: int = Field(description="Tokens the model made.")
    total_tokens: int = Field(description="Both.")
    prompt_tokens_details: PromptTokensDetails = Field(description="More of the prompt's.")
    completion_tokens_details: CompletionTokensDetails = Field(description="More of the answer's.")


class Probability(Shape):
    """A token and its probability before any sampler."""

    token: str = Field(description="Its text; bytes that are no whole character are shown as U+FFFD.")
    logprob: float = Field(description="Natural logarithm of its probability; -9999 for none.")
    bytes: list[int] | None = Field(description="Its text in UTF-8; null for what is no whole character.")


class TokenProbabilities(Probability):
    """The sampled token, and the likeliest at its place."""

    top_logprobs: list[Probability] = Field(description="The likeliest, the likeliest first.")


class ChoiceLogprobs(Shape):
    """Probabilities of an answer's tokens."""

    content: list[TokenProbabilities] = Field(description="One for each token.")
    refusal: None = Field(description="There is none.")


class FunctionCall(Shape):
    """What a tool is asked for."""

    name: str = Field(description="The tool.")
    arguments: str = Field(description="Its arguments, as JSON text.")


class MessageToolCall(Shape):
    """A tool that the model asks for."""

    id: str = Field(description="Names the call.")
    type: Literal["function"] = Field(description="What it is.")
    function: FunctionCall = Field(description="What is asked for.")


class ChatMessageOut(Shape):
    """An answer."""

    role: Literal["assistant"] = Field(description="Who speaks.")
    content: str | None = Field(description="What is said; null where only tools are asked for.")
    refusal: None = Field(description="There is none.")
    reasoning_content: str | None = Field(default=None, description="What was thought before; absent for nothing.")
    tool_calls: list[MessageToolCall] | None = Field(default=None, description="Tools asked for; absent for none.")


class ChatChoice(Shape):
    """One of the answers."""

    index: int = Field(description="Which.")
    message: ChatMessageOut = Field(description="The answer.")
    logprobs: ChoiceLogprobs | None = Field(description="Where they were asked for.")
    finish_reason: Finish = Field(description="Why it ends.")


class ChatCompletion(Shape):
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


class FunctionDelta(Shape):
    """More of a call."""

    name: str | None = Field(default=None, description="The tool, once.")
    arguments: str = Field(description="Text to append to the arguments.")


class ToolCallDelta(Shape):
    """More of a tool's call: the first has all names."""

    index: int = Field(description="Which call.")
    id: str | None = Field(default=None, description="Names the call, once.")
    type: Literal["function"] | None = Field(default=None, description="What it is, once.")
    function: FunctionDelta = Field(description="What is asked for.")


class Delta(Shape):
    """What is new."""

    role: Literal["assistant"] | None = Field(default=None, description="Who speaks, once.")
    content: str | None = Field(default=None, description="Text to append.")
    reasoning_content: str | None = Field(default=None, description="Text to append to what is thought.")
    tool_calls: list[ToolCallDelta] | None = Field(default=None, description="More of tools' calls.")


class ChunkChoice(Shape):
    """What is new of one of the answers."""

    index: int = Field(description="Which.")
    delta: Delta = Field(description="What is new.")
    logprobs: ChoiceLogprobs | None = Field(description="Where they were asked for.")
    finish_reason: Finish | None = Field(description="Why it ends, with its last.")


class ChatCompletionChunk(Shape):
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

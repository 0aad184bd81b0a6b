"""Requests for completions and their answers, as the OpenAPI document describes them."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field, StringConstraints
from pydantic_core import PydanticCustomError

from inferencecenter.dialects.openai.chat_shapes import Shape, TokenUsage
from inferencecenter.dialects.openai.sampling import MOST_PROBS, Sampling
from inferencecenter.protocol.params_model import MAX_TOKENS

MOST_PROMPTS: Final = 16
DEFAULT_MAX_TOKENS: Final = 16
"""As OpenAI has it: without a limit, plain text goes on until the context is full."""


def _texts(value: object) -> object:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and any(isinstance(each, int | list) for each in value):
        raise PydanticCustomError("tokens", "prompts of tokens are not supported: send text")
    return value


class CompletionRequest(Sampling):
    """Texts that are to be gone on with."""

    prompt: Annotated[
        list[Annotated[str, StringConstraints(min_length=1)]],
        Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True),
        BeforeValidator(_texts, json_schema_input_type=str | list[str]),
    ] = Field(description="A text, or several, each of which is gone on with.")
    max_tokens: int | None = Field(
        default=DEFAULT_MAX_TOKENS, ge=1, le=MAX_TOKENS, description="Tokens to generate at most."
    )
    echo: bool = Field(default=False, description="Whether the answer begins with the prompt; not with `logprobs`.")
    logprobs: int | None = Field(
        default=None, ge=0, le=MOST_PROBS, description="Likeliest tokens to tell at each place."
    )
    best_of: Literal[1] = Field(default=1, description="Every answer is told.")


class CompletionLogprobs(Shape):
    """Probabilities of an answer's tokens, one entry of each list for each token."""

    tokens: list[str] = Field(description="Their texts.")
    token_logprobs: list[float] = Field(description="Natural logarithms of their probabilities.")
    top_logprobs: list[dict[str, float]] = Field(description="Those of the likeliest tokens, by text.")
    text_offset: list[int] = Field(description="Where each begins in the answer, in characters.")


class CompletionChoice(Shape):
    """One of the answers, or what is new of it."""

    text: str = Field(description="The text.")
    index: int = Field(description="Which: answers to the same prompt follow each other.")
    logprobs: CompletionLogprobs | None = Field(description="Where they were asked for.")
    finish_reason: Literal["stop", "length", "content_filter"] | None = Field(
        description="Why it ends; null while it goes on."
    )


class Completion(Shape):
    """The answers, or a piece of them in a stream; the data of a stream's last event is `[DONE]`."""

    id: str = Field(description="`cmpl-…`.")
    object: Literal["text_completion"] = Field(description="What it is.")
    created: int = Field(description="Unix seconds.")
    model: str = Field(description="The model that answers.")
    choices: list[CompletionChoice] = Field(description="The answers; none in a stream's last piece with `usage`.")
    usage: TokenUsage | None = Field(default=None, description="Tokens; in a stream where `include_usage` asks for it.")
    system_fingerprint: None = Field(description="There is none.")
    warnings: list[str] | None = Field(
        default=None, description="Legal parameters of which one had no effect; absent for none."
    )

"""What a client is told: responses and their items. Pure."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from inferencecenter.api.responses.request_schemas import (
    AllowedTools,
    FunctionChoice,
    FunctionTool,
    ReasoningConfig,
    TextConfig,
)

Status = Literal["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"]
ItemState = Literal["in_progress", "completed", "incomplete"]


class ResponseObject(BaseModel):
    """Part of what a client is told: immutable; null where something is not known."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TopLogprob(ResponseObject):
    """A token that might have come."""

    token: str = Field(description="Its text.")
    bytes: tuple[int, ...] = Field(description="The text in UTF-8.")
    logprob: float = Field(description="Natural logarithm of its probability.")


class Logprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: tuple[TopLogprob, ...] = Field(description="The likeliest tokens in its place.")


class OutputText(ResponseObject):
    """Text of an answer."""

    type: Literal["output_text"] = "output_text"
    text: str = Field(description="The text.")
    annotations: tuple[()] = Field(default=(), description="There are none.")
    logprobs: tuple[Logprob, ...] = Field(default=(), description="Its tokens, where they were asked for.")


class OutputMessage(ResponseObject):
    """What the model said."""

    type: Literal["message"] = "message"
    id: str = Field(description="Its name.")
    role: Literal["assistant"] = "assistant"
    status: ItemState = Field(description="Whether it is all there.")
    content: tuple[OutputText, ...] = Field(description="Its text.")


class ThoughtText(ResponseObject):
    """What a model has thought."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str = Field(description="The text.")


class OutputReasoning(ResponseObject):
    """What the model thought."""

    type: Literal["reasoning"] = "reasoning"
    id: str = Field(description="Its name.")
    status: ItemState = Field(description="Whether it is all there.")
    summary: tuple[()] = Field(default=(), description="There is none.")
    content: tuple[ThoughtText, ...] = Field(description="The thoughts.")


class OutputCall(ResponseObject):
    """A tool that the model asks for."""

    type: Literal["function_call"] = "function_call"
    id: str = Field(description="The item's name.")
    call_id: str = Field(description="Names the call.")
    name: str = Field(description="The tool.")
    arguments: str = Field(description="Its arguments, as JSON text.")
    status: ItemState = Field(description="Whether they are all there.")


OutputItem = OutputMessage | OutputReasoning | OutputCall


class CachedTokens(ResponseObject):
    """Tokens that were not read again."""

    cached_tokens: int = Field(description="Whose KV was reused.")
    cache_write_tokens: int = Field(default=0, description="Nothing is counted for being kept.")


class ReasoningTokens(ResponseObject):
    """Tokens of thoughts."""

    reasoning_tokens: int = Field(
        description="Those up to the end of what the model thought, with the marks around that."
    )


class ResponseUsage(ResponseObject):
    """Tokens of a response."""

    input_tokens: int = Field(description="Those that the model was given.")
    input_tokens_details: CachedTokens = Field(description="Of those.")
    output_tokens: int = Field(description="Those that it made.")
    output_tokens_details: ReasoningTokens = Field(description="Of those.")
    total_tokens: int = Field(description="Both.")


class ResponseError(ResponseObject):
    """Why there is no answer."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"] = Field(description="What kind of reason.")
    message: str = Field(description="Which.")


class Incomplete(ResponseObject):
    """Why an answer is not complete."""

    reason: str = Field(description="`max_output_tokens` also where the context is full, else the turn's own reason.")


class Echo(ResponseObject):
    """What a response repeats of its request."""

    object: Literal["response"] = "response"
    created_at: int = Field(description="Unix seconds.")
    model: str = Field(description="The model that answers.")
    instructions: str | None = Field(description="What the model was told first.")
    previous_response_id: str | None = Field(description="The response that this one goes on to.")
    background: bool = Field(description="Whether nobody waits for it.")
    store: bool = Field(description="Whether it may be written to disk.")
    max_output_tokens: int | None = Field(description="Most tokens.")
    max_tool_calls: int | None = Field(description="As it was asked for.")
    temperature: float | None = Field(description="As it was asked for.")
    top_p: float | None = Field(description="As it was asked for.")
    top_logprobs: int = Field(description="So many of the likeliest tokens each.")
    text: TextConfig = Field(description="What the answer looks like.")
    tools: tuple[FunctionTool, ...] = Field(description="Functions that may be asked for.")
    tool_choice: (
        Literal["auto", "none", "required"] | Annotated[FunctionChoice | AllowedTools, Field(discriminator="type")]
    ) = Field(description="Whether one is.")
    parallel_tool_calls: bool = Field(description="Whether several may be at once.")
    reasoning: ReasoningConfig = Field(description="Whether the model thinks first.")
    truncation: Literal["auto", "disabled"] = Field(description="What happens when the context is full.")
    service_tier: Literal["default", "flex", "priority"] = Field(description="The class of the turn.")
    metadata: dict[str, str] = Field(description="As it was given.")
    user: str | None = Field(description="As it was given.")
    safety_identifier: str | None = Field(description="As it was given.")
    prompt_cache_key: str | None = Field(description="As it was given.")


class Note(Echo):
    """What is kept with a turn, to tell its response again later; others' notes are none of these."""

    # A later daemon may know more, or less.
    model_config = ConfigDict(extra="ignore", frozen=True)

    generate: bool = Field(default=True, description="Whether there was to be an answer.")


class Response(Echo):
    """A response."""

    id: str = Field(description="Its name.")
    status: Status = Field(description="Where it is.")
    completed_at: int | None = Field(default=None, description="Unix seconds, told with its end alone.")
    error: ResponseError | None = Field(default=None, description="Why it failed.")
    incomplete_details: Incomplete | None = Field(default=None, description="Why it is not complete.")
    output: tuple[OutputItem, ...] = Field(default=(), description="What the model thought, said and asks for.")
    usage: ResponseUsage | None = Field(default=None, description="Its tokens, at its end.")


class Deleted(ResponseObject):
    """A response is gone."""

    id: str = Field(description="Its name.")
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class StreamEvent(ResponseObject):
    """An event of a response: each type has fields of its own, as OpenAI's have."""

    model_config = ConfigDict(extra="allow", frozen=True)

    type: str = Field(description="What kind of event, as `response.output_text.delta`.")
    sequence_number: int = Field(description="Counts the events of the response from 0.")


class ItemList(ResponseObject):
    """A page of items."""

    object: Literal["list"] = "list"
    data: tuple[dict[str, Any], ...] = Field(description="The page.")
    first_id: str | None = Field(description="Name of the first.")
    last_id: str | None = Field(description="Name of the last, to go on after.")
    has_more: bool = Field(description="Whether there are more.")

"""What a request for a chat completion may say. Pure."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import BeforeValidator, Field, StringConstraints

from inferencecenter.dialects.body import Fields
from inferencecenter.dialects.openai.sampling import MOST_PROBS, Sampling
from inferencecenter.protocol.params_model import MAX_TOKENS
from inferencecenter.protocol.values import CallId, Metadata, MetadataText, ToolName

MOST_MESSAGES: Final = 10_000


class TextPart(Fields):
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


class CalledFunction(Fields):
    """What a tool was asked for."""

    name: ToolName = Field(description="The tool.")
    arguments: str = Field(description="Its arguments, as JSON text.")


class AskedCall(Fields):
    """A tool that an assistant asked for."""

    id: CallId = Field(description="Names the call.")
    type: Literal["function"] = Field(default="function", description="What it is.")
    function: CalledFunction = Field(description="What was asked for.")


class Message(Fields):
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


class Function(Fields):
    """A function that the client can run."""

    name: ToolName = Field(description="Its name.")
    description: Annotated[str, StringConstraints(max_length=16_384)] | None = Field(
        default=None, description="What it does, for the model."
    )
    parameters: dict[str, Any] | None = Field(default=None, description="JSON Schema of its arguments.")
    strict: bool = Field(default=False, description="Arguments always follow the schema, asked for or not.")


class ToolOffer(Fields):
    """A tool that the model may ask for."""

    type: Literal["function"] = Field(description="What it is.")
    function: Function = Field(description="The function.")


class ChosenFunction(Fields):
    """The function that the model has to call."""

    name: ToolName = Field(description="Its name.")


class ToolChoice(Fields):
    """Whether the model asks for tools."""

    type: Literal["auto", "none", "required", "function"] = Field(description="`function` demands the one named.")
    function: ChosenFunction | None = Field(default=None, description="Only with the type `function`.")


class JsonSchema(Fields):
    """The form of an answer."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")] = Field(description="What to call it.")
    description: str | None = Field(default=None, description="What it is for.")
    schema_: dict[str, Any] | None = Field(default=None, alias="schema", description="The JSON Schema.")
    strict: bool = Field(default=False, description="Answers always follow the schema, asked for or not.")


class ResponseFormat(Fields):
    """What the answer is to be."""

    type: Literal["text", "json_object", "json_schema"] = Field(description="`json_object` is any object.")
    json_schema: JsonSchema | None = Field(default=None, description="Only with the type `json_schema`.")


_Id: TypeAlias = Annotated[MetadataText, StringConstraints(max_length=512)]


class ChatRequest(Sampling):
    """A conversation that is to be answered."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)] = Field(
        description="All of it, the last from `user` or `tool`."
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

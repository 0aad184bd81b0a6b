"""Request and response models of chat completions, from which the OpenAPI document derives. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    model_validator,
)

from inferencecenter.api.body import no_media
from inferencecenter.api.custom_tools import (
    LARK_NOT_ENFORCED,
    MAX_DEFINITION_CHARS,
    MAX_DESCRIPTION_CHARS,
    Syntax,
    arguments_of,
    function_of,
    is_left_to_model,
)
from inferencecenter.api.foreign_fields import DialectModel, FieldRule, FieldTable
from inferencecenter.api.openai.sampling import FOUND_BY_TEXT, MOST_PROBS, SAMPLING_RULES, MaxTokens, Sampling
from inferencecenter.protocol.values import CallId, Metadata, MetadataText, Tool, ToolCall, ToolName

MOST_MESSAGES: Final = 10_000


class TextPart(DialectModel):
    """A part of a message that is text."""

    type: Annotated[Literal["text"], BeforeValidator(no_media, json_schema_input_type=Literal["text"])] = Field(
        description="Type of the object."
    )
    text: str = Field(description="The text.")


class ImageAddress(DialectModel):
    """Where an image is."""

    url: str = Field(description="The image as `data:image/…;base64,…`; other addresses are refused.")


def _as_address(value: object) -> object:
    return {"url": value} if isinstance(value, str) else value


class ImageUrlPart(DialectModel):
    """A part of a message that is an image."""

    type: Literal["image_url"] = Field(description="Type of the object.")
    image_url: Annotated[ImageAddress, BeforeValidator(_as_address, json_schema_input_type=str | ImageAddress)] = Field(
        description="The image."
    )


def _type_of(part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return "image_url" if kind == "image_url" else "text"


Part: TypeAlias = Annotated[
    Annotated[TextPart, Tag("text")] | Annotated[ImageUrlPart, Tag("image_url")], Discriminator(_type_of)
]


def _as_parts(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _as_object(value: object) -> object:
    return {"type": value} if isinstance(value, str) else value


Content: TypeAlias = Annotated[
    list[Part],
    Field(
        max_length=1000, fail_fast=True
    ),  # validated before the preceding validators, so that a longer one is not traversed
    BeforeValidator(_as_parts, json_schema_input_type=str | list[Part]),
]


class CalledFunction(DialectModel):
    """Function and arguments of a tool call."""

    name: ToolName = Field(description="Name of the function.")
    arguments: str = Field(description="Its arguments, as JSON text.")


class AskedCall(DialectModel):
    """A tool call of an assistant."""

    id: CallId = Field(description="Id of the call.")
    type: Literal["function"] = Field(default="function", description="Type of the object.")
    function: CalledFunction = Field(description="Function and arguments.")

    @property
    def wire_call(self) -> ToolCall:
        """The call in a session."""
        return ToolCall(call_id=self.id, name=self.function.name, arguments=self.function.arguments)


class CalledCustomTool(DialectModel):
    """Custom tool and input of a call."""

    name: ToolName = Field(description="Name of the tool.")
    input: str = Field(description="Its input.")


class AskedCustomCall(DialectModel):
    """A call of a custom tool by an assistant."""

    id: CallId = Field(description="Id of the call.")
    type: Literal["custom"] = Field(description="Type of the object.")
    custom: CalledCustomTool = Field(description="Tool and input.")

    @property
    def wire_call(self) -> ToolCall:
        """The call in a session, where custom tools are functions."""
        return ToolCall(call_id=self.id, name=self.custom.name, arguments=arguments_of(self.custom.input))


def _kind_of_call(call: Any) -> str:
    """Return the type of a call; the default is that of a function."""
    found = call.get("type", "function") if isinstance(call, dict) else getattr(call, "type", "")
    return found if isinstance(found, str) else ""


GivenCall: TypeAlias = Annotated[
    Annotated[AskedCall, Tag("function")] | Annotated[AskedCustomCall, Tag("custom")], Discriminator(_kind_of_call)
]


class ChatRequestMessage(DialectModel):
    """A message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"] = Field(
        description="Role of the author; `developer` is the same as `system`, and `function` an earlier `tool`."
    )
    content: Content | None = Field(
        default=None, description="The content; parts are joined as lines. Without it the message is empty."
    )
    reasoning_content: str | None = Field(default=None, description="Reasoning of an assistant before its content.")
    tool_calls: Annotated[list[GivenCall], Field(max_length=128, fail_fast=True)] | None = Field(
        default=None, description="Tool calls of an assistant."
    )
    function_call: CalledFunction | None = Field(
        default=None, description="The call of an assistant, before there were `tool_calls`."
    )
    tool_call_id: CallId | None = Field(default=None, description="The call whose result a tool message contains.")
    name: Annotated[str, StringConstraints(max_length=256)] | None = Field(
        default=None, description="Only for a result: the name in its call."
    )

    @property
    def text(self) -> str:
        """The whole text."""
        return "\n".join(part.text for part in self.content or () if isinstance(part, TextPart))

    @property
    def has_images(self) -> bool:
        return any(isinstance(part, ImageUrlPart) for part in self.content or ())

    @property
    def calls_tools(self) -> bool:
        return bool(self.tool_calls) or self.function_call is not None


class Function(DialectModel):
    """A function that the client can execute."""

    name: ToolName = Field(description="Its name.")
    description: Annotated[str, StringConstraints(max_length=16_384)] | None = Field(
        default=None, description="Description for the model."
    )
    parameters: dict[str, Any] | None = Field(default=None, description="JSON Schema of its arguments.")
    strict: bool = Field(
        default=False, description="Whether a keyword of the schema that cannot be enforced is refused."
    )

    @property
    def wire_tool(self) -> Tool:
        """The function of the turn."""
        return Tool(name=self.name, description=self.description, parameters=self.parameters, strict=self.strict)


class ToolOffer(DialectModel):
    """A function that the model may call."""

    type: Literal["function"] = Field(description="Type of the object.")
    function: Function = Field(description="The function.")

    @property
    def wire_tool(self) -> Tool:
        """The function of the turn."""
        return self.function.wire_tool


class CustomGrammar(DialectModel):
    """A grammar of the input of a custom tool."""

    syntax: Syntax = Field(description="Its syntax.")
    definition: str = Field(
        max_length=MAX_DEFINITION_CHARS,
        description="The grammar, which the model is given as text; a `regex` is enforced as far as possible.",
    )


class CustomInputFormat(DialectModel):
    """Format of the input of a custom tool."""

    type: Literal["text", "grammar"] = Field(description="Type of the object.")
    grammar: CustomGrammar | None = Field(default=None, description="Only with the type `grammar`.")

    @model_validator(mode="after")
    def _has_its_grammar(self) -> CustomInputFormat:
        if (self.type == "grammar") != (self.grammar is not None):
            raise ValueError("grammar belongs to a format of the type grammar")
        return self


class CustomToolSpec(DialectModel):
    """A tool of the client whose input is text; the model calls it as a function with the argument `input`."""

    name: ToolName = Field(description="Its name.")
    description: Annotated[str, StringConstraints(max_length=MAX_DESCRIPTION_CHARS)] | None = Field(
        default=None, description="Description for the model."
    )
    format: CustomInputFormat = Field(default=CustomInputFormat(type="text"), description="Format of the input.")


class CustomToolOffer(DialectModel):
    """A custom tool that the model may call."""

    type: Literal["custom"] = Field(description="Type of the object.")
    custom: CustomToolSpec = Field(description="The tool.")

    @property
    def wire_tool(self) -> Tool:
        """The function of the turn."""
        tool, grammar = self.custom, self.custom.format.grammar
        if grammar is None:
            return function_of(tool.name, tool.description, syntax=None, definition="")
        return function_of(tool.name, tool.description, syntax=grammar.syntax, definition=grammar.definition)


class ChosenFunction(DialectModel):
    """The function or custom tool that the model has to call."""

    name: ToolName = Field(description="Its name.")


class AllowedFunction(DialectModel):
    """A function that may be called now."""

    type: Literal["function"] = Field(default="function", description="Type of the object.")
    function: ChosenFunction = Field(description="The function.")

    @property
    def name(self) -> str:
        return self.function.name


class AllowedCustomTool(DialectModel):
    """A custom tool that may be called now."""

    type: Literal["custom"] = Field(description="Type of the object.")
    custom: ChosenFunction = Field(description="The tool.")

    @property
    def name(self) -> str:
        return self.custom.name


AllowedTool: TypeAlias = Annotated[
    Annotated[AllowedFunction, Tag("function")] | Annotated[AllowedCustomTool, Tag("custom")],
    Discriminator(_kind_of_call),
]


class AllowedFunctions(DialectModel):
    """The subset of tools that may be called now."""

    mode: Literal["auto", "required"] = Field(description="Whether one has to be called.")
    tools: Annotated[list[AllowedTool], Field(min_length=1, max_length=128, fail_fast=True)] = Field(
        description="The allowed tools."
    )


class ToolChoice(DialectModel):
    """Whether the model calls tools."""

    type: Literal["auto", "none", "required", "function", "custom", "allowed_tools"] = Field(
        description="`function` and `custom` require the named one."
    )
    function: ChosenFunction | None = Field(default=None, description="Only with the type `function`.")
    custom: ChosenFunction | None = Field(default=None, description="Only with the type `custom`.")
    allowed_tools: AllowedFunctions | None = Field(default=None, description="Only with the type `allowed_tools`.")


class TemplateOptions(DialectModel):
    """Variables of the chat template."""

    enable_thinking: bool | None = Field(default=None, description="Whether the model thinks first.")
    thinking: bool | None = Field(default=None, description="The same as `enable_thinking`.")


_Id: TypeAlias = Annotated[MetadataText, StringConstraints(max_length=512)]


class ChatRequest(Sampling):
    """A chat completion request."""

    messages: Annotated[list[ChatRequestMessage], Field(max_length=MOST_MESSAGES, fail_fast=True)] = Field(
        description="The whole conversation, the last message from `user` or `tool`; an `assistant` after "
        "it begins the answer, which the model continues.",
        json_schema_extra={"minItems": 1},
    )
    max_completion_tokens: MaxTokens = Field(
        default=None, description="Maximum number of generated tokens; takes precedence over `max_tokens`."
    )
    logprobs: bool = Field(default=False, description="Whether token probabilities are returned.")
    top_logprobs: int | None = Field(
        default=None,
        ge=0,
        le=MOST_PROBS,
        description="Number of most likely tokens to return at each position; only with `logprobs`.",
    )
    tools: (
        Annotated[
            list[Annotated[ToolOffer | CustomToolOffer, Field(discriminator="type")]],
            Field(max_length=128, fail_fast=True),
        ]
        | None
    ) = Field(default=None, description="Tools that the model may call, with distinct names.")
    tool_choice: Annotated[
        ToolChoice,
        BeforeValidator(_as_object, json_schema_input_type=Literal["auto", "none", "required"] | ToolChoice),
    ] = Field(default=ToolChoice(type="auto"), description="Whether the model calls tools.")
    functions: Annotated[list[Function], Field(max_length=128, fail_fast=True)] | None = Field(
        default=None, description="Tools, before there were `tools`; calls of them are returned as `function_call`."
    )
    function_call: Literal["auto", "none"] | ChosenFunction | None = Field(
        default=None, description="Whether the model calls `functions`."
    )
    parallel_tool_calls: bool = Field(default=True, description="Whether it may call several at the same time.")
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        default=None, description="`none` disables thinking, all others enable it; if absent, the model's default."
    )
    chat_template_kwargs: TemplateOptions | None = Field(default=None, description="Variables of the chat template.")
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=2, fail_fast=True)] | None = Field(
        default=None, description="Answers are text."
    )
    service_tier: Literal["auto", "default", "priority", "fast", "flex"] | None = Field(
        default=None, description="The class of the turn: `priority` is interactive, `flex` is batch."
    )
    store: bool = Field(default=False, description="Nothing is stored; `/v1/responses` stores answers.")
    metadata: Metadata | None = Field(default=None, description="Kept with the session.")
    safety_identifier: _Id | None = Field(default=None, description="Kept with the session as metadata.")
    prompt_cache_key: _Id | None = Field(default=None, description="Kept with the session as metadata.")


def _is_no_result(_value: Any, siblings: Mapping[str, Any]) -> bool:
    return siblings.get("role") not in ("tool", "function")


def _is_server_tool(item: Any, _siblings: Mapping[str, Any]) -> bool:
    return isinstance(item, dict) and isinstance(kind := item.get("type"), str) and kind not in ("function", "custom")


CHAT_FIELDS: Final = FieldTable(
    "chat",
    ChatRequest,
    rules=(
        FieldRule(
            field="store",
            values="`true`",
            why="chat completions are not stored, see /v1/responses",
            applies=lambda value, _: value is True,
        ),
        FieldRule(field="verbosity", why="the model decides on the length of its answer"),
        FieldRule(field="prediction", why="an expected answer does not make this one faster"),
        FieldRule(field="audio", why="answers are text"),
        FieldRule(field="web_search_options", why="the daemon does not search the web"),
        FieldRule(field="prompt_cache_retention", why=FOUND_BY_TEXT),
        FieldRule(
            field="messages[].name",
            values="with a role other than `tool`",
            why="templates distinguish speakers by role",
            applies=_is_no_result,
        ),
        FieldRule(field="messages[].refusal", why="a refusal is part of the content"),
        FieldRule(field="messages[].annotations", why="the model is given the content only"),
        FieldRule(field="messages[].audio", why="the model is given text only"),
        FieldRule(field="messages[].cache_control", why=FOUND_BY_TEXT),
        FieldRule(field="messages[].content[].cache_control", why=FOUND_BY_TEXT),
        FieldRule(field="tools[].cache_control", why=FOUND_BY_TEXT),
        FieldRule(
            field="tools[]",
            values="of a type other than `function` and `custom`",
            why="the daemon cannot run tools of this type, so the model is not offered it",
            applies=_is_server_tool,
        ),
        FieldRule(
            field="tools[].custom.format",
            values="some grammars with the syntax `lark`",
            why=LARK_NOT_ENFORCED,
            applies=lambda form, _: isinstance(form, dict) and is_left_to_model(form.get("grammar")),
            kept=True,
        ),
        *SAMPLING_RULES,
    ),
)
"""The fields of chat completions."""

Finish = Literal["stop", "length", "tool_calls", "function_call", "content_filter"]


class AnswerModel(BaseModel):
    """Part of a response."""

    model_config = ConfigDict(extra="forbid", strict=True, defer_build=True)


class PromptTokensDetails(AnswerModel):
    """Details of prompt tokens."""

    cached_tokens: int = Field(description="Those whose KV was reused.")


class CompletionTokensDetails(AnswerModel):
    """Details of completion tokens."""

    reasoning_tokens: int = Field(description="Those up to the end of the reasoning, including its markers.")


class TokenUsage(AnswerModel):
    """Token usage of a request; a prompt with several choices counts once."""

    prompt_tokens: int = Field(description="Tokens the model was given.")
    completion_tokens: int = Field(description="Tokens the model made.")
    total_tokens: int = Field(description="Both.")
    prompt_tokens_details: PromptTokensDetails = Field(description="More of the prompt's.")
    completion_tokens_details: CompletionTokensDetails = Field(description="More of the answer's.")


class Timings(AnswerModel):
    """Speed of a turn, in the terms of llama-server."""

    cache_n: int = Field(description="Tokens of the prompt whose KV was reused.")
    prompt_n: int = Field(description="Tokens of the prompt that were read.")
    prompt_ms: float = Field(description="Milliseconds from a slot to the first token.")
    prompt_per_token_ms: float = Field(description="The same per token.")
    prompt_per_second: float = Field(description="Tokens read per second.")
    predicted_n: int = Field(description="Generated tokens.")
    predicted_ms: float = Field(description="Milliseconds from the first token to the end.")
    predicted_per_token_ms: float = Field(description="The same per token.")
    predicted_per_second: float = Field(description="Tokens generated per second.")


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


class CustomCallInput(AnswerModel):
    """Custom tool and input of a call."""

    name: str = Field(description="Name of the tool.")
    input: str = Field(description="Its input.")


class MessageCustomCall(AnswerModel):
    """A call of a custom tool by the model."""

    id: str = Field(description="Id of the call.")
    type: Literal["custom"] = Field(description="Type of the object.")
    custom: CustomCallInput = Field(description="Tool and input.")


class ChatMessageOut(AnswerModel):
    """A message of the model."""

    role: Literal["assistant"] = Field(description="Role of the author.")
    content: str | None = Field(description="The content; null if there are only calls.")
    refusal: None = Field(description="Always null.")
    reasoning_content: str | None = Field(
        default=None, description="Reasoning before the content; absent if there is none."
    )
    tool_calls: list[MessageToolCall | MessageCustomCall] | None = Field(
        default=None, description="Tool calls; absent if there are none."
    )
    function_call: ToolCallFunction | None = Field(default=None, description="The call, if `functions` were given.")


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
        default=None, description="Fields and valid parameters that had no effect; absent if there are none."
    )
    timings: Timings | None = Field(default=None, description="Speed of the first choice.")


class FunctionDelta(AnswerModel):
    """Increment of a function call."""

    name: str | None = Field(default=None, description="Name of the function, once.")
    arguments: str = Field(description="Text to append to the arguments.")


class CustomCallDelta(AnswerModel):
    """Increment of a call of a custom tool."""

    name: str | None = Field(default=None, description="Name of the tool, once.")
    input: str = Field(description="Text to append to the input.")


class ToolCallDelta(AnswerModel):
    """Increment of a tool call; the first one has id, type and name."""

    index: int = Field(description="Index of the call.")
    id: str | None = Field(default=None, description="Id of the call, once.")
    type: Literal["function", "custom"] | None = Field(default=None, description="Type of the object, once.")
    function: FunctionDelta | None = Field(default=None, description="Function and arguments.")
    custom: CustomCallDelta | None = Field(default=None, description="Custom tool and input.")


class Delta(AnswerModel):
    """Increment of a message."""

    role: Literal["assistant"] | None = Field(default=None, description="Role of the author, once.")
    content: str | None = Field(default=None, description="Text to append.")
    reasoning_content: str | None = Field(default=None, description="Text to append to the reasoning.")
    tool_calls: list[ToolCallDelta] | None = Field(default=None, description="Increments of tool calls.")
    function_call: FunctionDelta | None = Field(
        default=None, description="Increment of the call, if `functions` were given."
    )


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
        description="With a `finish_reason`: fields and valid parameters that had no effect; absent if there are none.",
    )
    timings: Timings | None = Field(default=None, description="With a `finish_reason`: speed of the choice.")

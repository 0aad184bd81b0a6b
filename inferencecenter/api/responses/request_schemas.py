"""What a client may ask of Responses, and the messages that its items stand for. Pure; what is not here is refused.

Assistants' reasoning, text and calls are items of their own here and one message in a session.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import ConfigDict, Discriminator, Field, StringConstraints, Tag, model_validator

from inferencecenter.api.body import RequestModel
from inferencecenter.protocol.requests import ModelName, RawParams
from inferencecenter.protocol.values import (
    CallId,
    ChatMessage,
    Metadata,
    MetadataText,
    NamedTool,
    Tool,
    ToolCall,
    ToolChoice,
    ToolName,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


MAX_ITEMS: Final = 4000
_MAX_PARTS: Final = 1000

ItemId = Annotated[str, Field(max_length=128)]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputText(RequestModel):
    """Text of a message, or of what a tool answered."""

    type: Literal["input_text"] = Field(description="What it is.")
    text: str = Field(description="The text.")


class GivenOutputText(RequestModel):
    """Text that a model has said."""

    type: Literal["output_text"] = Field(description="What it is.")
    text: str = Field(description="The text.")
    annotations: list[Any] = Field(default=[], max_length=0, description="Empty: there are none.")
    logprobs: list[Any] = Field(default=[], description="As they came; a model does not read them.")


TextPart = Annotated[InputText | GivenOutputText, Field(discriminator="type")]


class InputMessage(RequestModel):
    """Something that was said."""

    type: Literal["message"] = Field(default="message", description="What it is.")
    role: Literal["user", "assistant", "system", "developer"] = Field(description="Who says it.")
    content: str | Annotated[list[TextPart], Field(max_length=_MAX_PARTS, fail_fast=True)] = Field(
        description="What: text alone."
    )
    id: ItemId = Field(default="", description="Its name, if it came from a response.")
    status: ItemStatus = Field(default="completed", description="As it came.")

    @property
    def text(self) -> str:
        """All of its text."""
        return text_of(self.content)


class ReasoningText(RequestModel):
    """What a model has thought."""

    type: Literal["reasoning_text"] = Field(description="What it is.")
    text: str = Field(description="The text.")


class SummaryText(RequestModel):
    """A summary of what a model has thought."""

    type: Literal["summary_text"] = Field(description="What it is.")
    text: str = Field(description="The text.")


class InputReasoning(RequestModel):
    """What a model thought before it said something or asked for a tool."""

    type: Literal["reasoning"] = Field(description="What it is.")
    summary: list[SummaryText] = Field(
        default=[], max_length=_MAX_PARTS, fail_fast=True, description="Stands for missing content."
    )
    content: list[ReasoningText] = Field(default=[], max_length=_MAX_PARTS, fail_fast=True, description="The thoughts.")
    id: ItemId = Field(default="", description="Its name, if it came from a response.")
    status: ItemStatus = Field(default="completed", description="As it came.")

    @property
    def text(self) -> str:
        """All of its text."""
        return "".join(part.text for part in self.content or self.summary)


class FunctionCall(RequestModel):
    """A tool that a model asked for."""

    type: Literal["function_call"] = Field(description="What it is.")
    call_id: CallId = Field(description="Names the call.")
    name: ToolName = Field(description="The tool.")
    arguments: str = Field(description="Its arguments, as JSON text.")
    id: ItemId = Field(default="", description="The item's name, if it came from a response.")
    status: ItemStatus = Field(default="completed", description="As it came.")


class FunctionCallOutput(RequestModel):
    """What a tool answered."""

    type: Literal["function_call_output"] = Field(description="What it is.")
    call_id: CallId = Field(description="The call that it answers.")
    output: str | Annotated[list[InputText], Field(max_length=_MAX_PARTS, fail_fast=True)] = Field(
        description="What: text alone."
    )
    id: ItemId = Field(default="", description="The item's name.")
    status: ItemStatus = Field(default="completed", description="As it came.")


Item = InputMessage | InputReasoning | FunctionCall | FunctionCallOutput


def text_of(content: str | Sequence[InputText | GivenOutputText]) -> str:
    """Return the text of something that may come in parts."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


def messages_of(items: Iterable[Item]) -> tuple[ChatMessage, ...]:
    """Return the messages that items stand for, in their order."""
    gathering = _Gathering()
    for item in items:
        gathering.take(item)
    gathering.end()
    return tuple(gathering.messages)


class _Gathering:
    """Puts what an assistant thought, said and asked for together again."""

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self._reasoning: str | None = None
        self._content: str | None = None
        self._calls: list[ToolCall] = []

    def take(self, item: Item) -> None:
        """Take the next item."""
        match item:
            case InputReasoning():
                self.end()
                self._reasoning = item.text
            case InputMessage(role="assistant"):
                if self._content is not None or self._calls:
                    self.end()
                self._content = item.text
            case FunctionCall():
                self._calls.append(ToolCall(call_id=item.call_id, name=item.name, arguments=item.arguments))
            case FunctionCallOutput():
                self.end()
                output = text_of(item.output)
                self.messages.append(ChatMessage(role="tool", content=output, tool_call_id=item.call_id))
            case InputMessage():
                self.end()
                role = "system" if item.role == "developer" else item.role
                self.messages.append(ChatMessage(role=role, content=item.text))

    def end(self) -> None:
        """Add what an assistant has said so far; thoughts that led to nothing are left out."""
        if self._content is not None or self._calls:
            self.messages.append(
                ChatMessage(
                    role="assistant",
                    content=self._content or "",
                    reasoning=self._reasoning,
                    tool_calls=tuple(self._calls) or None,
                )
            )
        self._reasoning, self._content, self._calls = None, None, []


MAX_TOOLS: Final = 128
LOGPROBS: Final = "message.output_text.logprobs"

ResponseName = Annotated[str, StringConstraints(min_length=1, max_length=128)]
StreamId = Annotated[str, StringConstraints(min_length=1, max_length=64)]


class PlainText(RequestModel):
    """The answer is text."""

    type: Literal["text"] = Field(description="What it is.")


class JsonObject(RequestModel):
    """The answer is a JSON object."""

    type: Literal["json_object"] = Field(description="What it is.")


class JsonSchema(RequestModel):
    """The answer is JSON that a JSON Schema accepts."""

    # The field is called schema, which pydantic's models have a method for.
    model_config = ConfigDict(serialize_by_alias=True)

    type: Literal["json_schema"] = Field(description="What it is.")
    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-]+$", description="A name for it.")
    schema_: dict[str, Any] = Field(alias="schema", description="The JSON Schema.")
    strict: bool = Field(default=True, description="The answer is held to the schema either way.")


class TextConfig(RequestModel):
    """What the text of the answer looks like."""

    format: Annotated[PlainText | JsonObject | JsonSchema, Field(discriminator="type")] = Field(
        default=PlainText(type="text"), description="Its form."
    )
    verbosity: Literal["medium"] = Field(default="medium", description="There is no other.")


class FunctionTool(RequestModel):
    """A function that the client can run."""

    type: Literal["function"] = Field(description="What it is.")
    name: ToolName = Field(description="Its name.")
    description: str | None = Field(default=None, max_length=16_384, description="What it does, for the model.")
    parameters: dict[str, Any] | None = Field(default=None, description="JSON Schema of its arguments, an object.")
    strict: bool = Field(default=True, description="Arguments are held to the schema either way.")


class FunctionChoice(RequestModel):
    """The function that has to be called."""

    type: Literal["function"] = Field(description="What it is.")
    name: ToolName = Field(description="Its name.")


class AllowedTools(RequestModel):
    """The functions, out of all, that may be called now."""

    type: Literal["allowed_tools"] = Field(description="What it is.")
    mode: Literal["auto", "required"] = Field(description="Whether one has to be called.")
    tools: list[FunctionChoice] = Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True, description="Which.")


class ReasoningConfig(RequestModel):
    """Whether the model thinks before it answers."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        default=None, description="`none` is not to think; all others are to think, where the model can choose."
    )
    summary: Literal["auto"] | None = Field(default=None, description="There are no summaries: thoughts come whole.")


class StreamOptions(RequestModel):
    """How a stream is told."""

    include_obfuscation: Literal[False] = Field(default=False, description="Nothing is added to hide lengths.")


def _kind(item: Any) -> str:
    """Return the type of an item; one that names none is a message."""
    found = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message")
    return found if isinstance(found, str) else ""


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputReasoning, Tag("reasoning")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")],
    Discriminator(_kind),
]


class CreateResponse(RequestModel):
    """Ask for a response."""

    input: str | Annotated[list[InputItem], Field(max_length=MAX_ITEMS, fail_fast=True)] = Field(
        default=[], description="What is said: text of a user, or items."
    )
    model: ModelName | None = Field(default=None, description="A name that `/v1/models` lists; the daemon's choice.")
    instructions: str | None = Field(
        default=None, description="What the model is told first. It holds for this response alone."
    )
    previous_response_id: ResponseName | None = Field(
        default=None, description="The response that this one goes on to."
    )
    store: bool = Field(default=True, description="Whether the response may be written to disk, and asked for later.")
    background: bool = Field(default=False, description="Answer at once, and go on without whoever asked.")
    stream: bool = Field(default=False, description="Tell the response while it comes.")
    stream_options: StreamOptions = Field(default=StreamOptions(), description="How.")
    max_output_tokens: int | None = Field(default=None, ge=1, le=2**20, description="Most tokens, thoughts included.")
    max_tool_calls: int | None = Field(default=None, ge=1, description="Of tools that a server runs; it runs none.")
    temperature: float | None = Field(default=None, ge=0, le=2, description="How freely tokens are chosen.")
    top_p: float | None = Field(default=None, gt=0, le=1, description="Tokens of this much probability are left.")
    top_logprobs: int | None = Field(default=None, ge=0, le=20, description="So many of the likeliest tokens each.")
    include: list[Literal["message.output_text.logprobs"]] = Field(
        default=[], max_length=16, fail_fast=True, description="More of it."
    )
    text: TextConfig = Field(default=TextConfig(), description="What the answer looks like.")
    tools: list[FunctionTool] = Field(
        default=[], max_length=MAX_TOOLS, fail_fast=True, description="Functions that may be asked for."
    )
    tool_choice: (
        Literal["auto", "none", "required"] | Annotated[FunctionChoice | AllowedTools, Field(discriminator="type")]
    ) = Field(default="auto", description="Whether one is asked for.")
    parallel_tool_calls: bool = Field(default=True, description="Whether several may be asked for at once.")
    reasoning: ReasoningConfig = Field(default=ReasoningConfig(), description="Whether the model thinks first.")
    truncation: Literal["auto", "disabled"] = Field(
        default="disabled", description="With `auto` the oldest turns go when the context is full."
    )
    metadata: Metadata = Field(default={}, description="Strings of your own, given back as they are.")
    service_tier: Literal["auto", "default", "flex", "priority", "fast"] = Field(
        default="auto", description="`priority` and `fast` are interactive, `flex` is a batch."
    )
    user: MetadataText | None = Field(default=None, description="Whom it is for; kept with the session.")
    safety_identifier: MetadataText | None = Field(default=None, description="Whom it is for; kept with the session.")
    prompt_cache_key: MetadataText | None = Field(
        default=None, description="Kept with the session; any prefix is found."
    )
    params: RawParams = Field(default={}, description="Further parameters, as in `infer`.")

    @model_validator(mode="after")
    def _fits_together(self) -> CreateResponse:
        if self.background and not self.store:
            raise ValueError("background needs store: whoever asks comes back for the response")
        names = {tool.name for tool in self.tools}
        choice = self.tool_choice
        wanted = choice.tools if isinstance(choice, AllowedTools) else []
        for each in wanted:
            if each.name not in names:
                raise ValueError(f"tool_choice names {each.name}, which is none of the tools")
        return self

    @property
    def items(self) -> tuple[Item, ...]:
        """What is said, as items."""
        if isinstance(self.input, str):
            return (InputMessage(role="user", content=self.input),)
        return tuple(self.input)

    @property
    def messages(self) -> tuple[ChatMessage, ...]:
        """What is said, as messages; ``instructions`` are none of them."""
        return messages_of(self.items)

    @property
    def wire_tools(self) -> list[Tool] | None:
        """The functions that may be asked for now."""
        choice = self.tool_choice
        allowed = {each.name for each in choice.tools} if isinstance(choice, AllowedTools) else None
        return [
            Tool(name=tool.name, description=tool.description, parameters=tool.parameters)
            for tool in self.tools
            if allowed is None or tool.name in allowed
        ] or None

    @property
    def wire_tool_choice(self) -> ToolChoice:
        """Whether one of them is."""
        match self.tool_choice:
            case FunctionChoice(name=name):
                return NamedTool(name=name)
            case AllowedTools(mode=mode):
                return mode
            case choice:
                return choice

    @property
    def json_schema(self) -> dict[str, Any] | None:
        """What the answer is held to; ``None`` for any text."""
        match self.text.format:
            case JsonSchema(schema_=schema):
                return schema
            case JsonObject():
                return {"type": "object"}
        return None

    @property
    def n_probs(self) -> int | None:
        """How many of the likeliest tokens are wanted with each; 1 where only that itself is."""
        return (self.top_logprobs or 1) if self.top_logprobs or LOGPROBS in self.include else None


class CreateOnSocket(CreateResponse):
    """Ask for a response over a WebSocket; responses of one ``stream_id`` come one after the other."""

    type: Literal["response.create"] = Field(description="What it is.")
    stream_id: StreamId | None = Field(default=None, description="Its lane; different lanes go on at once.")
    stream: Literal[True] = Field(default=True, description="It is told while it comes.")
    background: Literal[False] = Field(default=False, description="A response outlives its socket as it is.")
    generate: bool = Field(default=True, description="Without it all is read, and nothing answered.")


class CancelOnSocket(RequestModel):
    """End a response that is running or waiting, or what a lane has running."""

    type: Literal["response.cancel"] = Field(description="What it is.")
    response_id: ResponseName | None = Field(default=None, description="Which response.")
    stream_id: StreamId | None = Field(default=None, description="Which lane; without either the one without a name.")

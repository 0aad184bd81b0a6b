"""Items that a request may say, and the messages that they stand for. Pure.

Assistants' reasoning, text and calls are items of their own here and one message in a session.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import Field

from inferencecenter.dialects.body import Fields
from inferencecenter.protocol.values import CallId, ChatMessage, ToolCall, ToolName

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MAX_ITEMS: Final = 4000
_MAX_PARTS: Final = 1000

ItemId = Annotated[str, Field(max_length=128)]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputText(Fields):
    """Text of a message, or of what a tool answered."""

    type: Literal["input_text"] = Field(description="What it is.")
    text: str = Field(description="The text.")


class GivenOutputText(Fields):
    """Text that a model has said."""

    type: Literal["output_text"] = Field(description="What it is.")
    text: str = Field(description="The text.")
    annotations: list[Any] = Field(default=[], max_length=0, description="Empty: there are none.")
    logprobs: list[Any] = Field(default=[], description="As they came; a model does not read them.")


TextPart = Annotated[InputText | GivenOutputText, Field(discriminator="type")]


class Message(Fields):
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


class ReasoningText(Fields):
    """What a model has thought."""

    type: Literal["reasoning_text"] = Field(description="What it is.")
    text: str = Field(description="The text.")


class SummaryText(Fields):
    """A summary of what a model has thought."""

    type: Literal["summary_text"] = Field(description="What it is.")
    text: str = Field(description="The text.")


class Reasoning(Fields):
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


class FunctionCall(Fields):
    """A tool that a model asked for."""

    type: Literal["function_call"] = Field(description="What it is.")
    call_id: CallId = Field(description="Names the call.")
    name: ToolName = Field(description="The tool.")
    arguments: str = Field(description="Its arguments, as JSON text.")
    id: ItemId = Field(default="", description="The item's name, if it came from a response.")
    status: ItemStatus = Field(default="completed", description="As it came.")


class FunctionCallOutput(Fields):
    """What a tool answered."""

    type: Literal["function_call_output"] = Field(description="What it is.")
    call_id: CallId = Field(description="The call that it answers.")
    output: str | Annotated[list[InputText], Field(max_length=_MAX_PARTS, fail_fast=True)] = Field(
        description="What: text alone."
    )
    id: ItemId = Field(default="", description="The item's name.")
    status: ItemStatus = Field(default="completed", description="As it came.")


Item = Message | Reasoning | FunctionCall | FunctionCallOutput


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
            case Reasoning():
                self.end()
                self._reasoning = item.text
            case Message(role="assistant"):
                if self._content is not None or self._calls:
                    self.end()
                self._content = item.text
            case FunctionCall():
                self._calls.append(ToolCall(call_id=item.call_id, name=item.name, arguments=item.arguments))
            case FunctionCallOutput():
                self.end()
                output = text_of(item.output)
                self.messages.append(ChatMessage(role="tool", content=output, tool_call_id=item.call_id))
            case Message():
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

"""The answer of a turn, assembled from its events. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from inferencecenter.protocol.events import End, Reasoning, Token
from inferencecenter.protocol.events import ToolCall as ToolCallEvent
from inferencecenter.protocol.values import ChatMessage, ToolCall

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from inferencecenter.protocol.base import Event
    from inferencecenter.protocol.values import FinishReason, TurnStats, Usage


@dataclass(slots=True)
class Answer:
    """The answer received so far; ``end`` is set once it is complete."""

    end: End | None = None
    _content: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)
    _calls: list[_Call] = field(default_factory=list)

    @classmethod
    def of(cls, content: str, reasoning: str | None = None, tool_calls: Sequence[ToolCall] | None = None) -> Answer:
        """Return an answer with this content."""
        calls = [_Call(call.call_id, call.name, [call.arguments]) for call in tool_calls or ()]
        return cls(_content=[content], _reasoning=[reasoning or ""], _calls=calls)

    def __str__(self) -> str:
        return self.content

    @property
    def has_begun(self) -> bool:
        """Whether any text, reasoning or tool call has arrived."""
        return bool(self._content or self._reasoning or self._calls)

    @property
    def content(self) -> str:
        """The text."""
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        """The reasoning that precedes the text."""
        return "".join(self._reasoning)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The requested tool calls; the last one's arguments are complete only if the turn ended with ``tool_calls``.

        Use ``result`` to send back what a tool returned.
        """
        return tuple(
            ToolCall(call_id=call.call_id, name=call.name, arguments="".join(call.arguments)) for call in self._calls
        )

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the turn ended; ``None`` while it runs."""
        return None if self.end is None else self.end.finish_reason

    @property
    def stats(self) -> TurnStats | None:
        """Timings and rates of the turn; ``None`` while it runs."""
        return None if self.end is None else self.end.stats

    @property
    def usage(self) -> Usage | None:
        """Token counts of the turn; ``None`` while it runs."""
        return None if self.end is None else self.end.usage

    @property
    def warnings(self) -> tuple[str, ...]:
        """Valid parameters that had no effect."""
        return () if self.end is None else self.end.warnings

    def take(self, event: Event) -> None:
        """Apply an event of the turn."""
        match event:
            case Token(content=content):
                self._content.append(content)
            case Reasoning(content=content):
                self._reasoning.append(content)
            case ToolCallEvent(name=str(name)):
                self._calls.append(_Call(event.call_id, name, [event.arguments]))
            case ToolCallEvent(index=index) if index < len(self._calls):
                self._calls[index].arguments.append(event.arguments)
            case End():
                self.end = event

    def missing(self, whole: Answer, *, session_id: str, turn_id: str, seq: int) -> Iterator[_Text]:
        """Yield, as events, the part of ``whole`` that this answer lacks.

        Raises:
            ValueError: This answer is not a prefix of ``whole``.
        """
        head = {"session_id": session_id, "turn_id": turn_id, "seq": seq}
        if thought := _rest(self.reasoning, whole.reasoning):
            yield Reasoning.model_validate({**head, "content": thought})
        if said := _rest(self.content, whole.content):
            yield Token.model_validate({**head, "content": said})
        told = self.tool_calls
        for index, call in enumerate(whole.tool_calls):
            name = None if index < len(told) else call.name
            rest = call.arguments if name is not None else _rest(told[index].arguments, call.arguments)
            if rest or name is not None:
                yield ToolCallEvent.model_validate(
                    {**head, "index": index, "call_id": call.call_id, "name": name, "arguments": rest}
                )


class Answered:
    """Properties of a turn that are read from its answer.

    Attributes:
        answer: The answer received so far.
    """

    answer: Answer

    @property
    def content(self) -> str:
        """The text received so far."""
        return self.answer.content

    @property
    def reasoning(self) -> str:
        """The reasoning that precedes the text."""
        return self.answer.reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The requested tool calls; see ``Answer.tool_calls``."""
        return self.answer.tool_calls

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the turn ended; ``None`` while it runs."""
        return self.answer.finish_reason

    @property
    def stats(self) -> TurnStats | None:
        """Timings and rates of the turn; ``None`` while it runs."""
        return self.answer.stats

    @property
    def usage(self) -> Usage | None:
        """Token counts of the turn; ``None`` while it runs."""
        return self.answer.usage


@dataclass(slots=True)
class _Call:
    call_id: str
    name: str
    arguments: list[str]


_Text = Token | Reasoning | ToolCallEvent


def result(call: ToolCall, content: str) -> ChatMessage:
    """Return the message that carries a tool's result."""
    return ChatMessage(role="tool", content=content, tool_call_id=call.call_id)


def _rest(begins: str, whole: str) -> str:
    if not whole.startswith(begins):
        raise ValueError("another answer")
    return whole[len(begins) :]

"""Text of a turn that waits for a reader, joined so that it goes out as one event."""

from __future__ import annotations

from typing import Final, TypeAlias

from inferencecenter.protocol import events

Text: TypeAlias = events.Token | events.Reasoning | events.ToolCall
"""Events that text is told with."""

_EVENT_BYTES: Final = 64
_LOGPROB_BYTES: Final = 96


class Run:
    """Text of one turn that waits to be taken as one event."""

    __slots__ = ("first", "last", "parts")

    def __init__(self, event: Text) -> None:
        self.first = self.last = event
        self.parts = [text_of(event)]

    def add(self, event: Text) -> bool:
        """Take further text; ``False`` if it is of another kind, or has more to it than text."""
        first = self.first
        if type(event) is not type(first) or event.logprobs is not None or first.logprobs is not None:
            return False
        if isinstance(event, events.ToolCall) and (event.name is not None or not _same_call(event, first)):
            return False
        self.parts.append(text_of(event))
        self.last = event
        return True

    def joined(self) -> Text:
        """Return all of it as one event, with the number of the last."""
        name = "arguments" if isinstance(self.first, events.ToolCall) else "content"
        return self.first.model_copy(update={"seq": self.last.seq, name: "".join(self.parts)})


def size_of(event: Text) -> int:
    """Return about how many bytes text takes while it waits."""
    logprobs = sum(1 + len(each.top) for each in event.logprobs or ())
    return _EVENT_BYTES + len(text_of(event)) + _LOGPROB_BYTES * logprobs


def text_of(event: Text) -> str:
    """Return the text that an event tells."""
    return event.arguments if isinstance(event, events.ToolCall) else event.content


def _same_call(event: events.ToolCall, other: Text) -> bool:
    return isinstance(other, events.ToolCall) and other.index == event.index

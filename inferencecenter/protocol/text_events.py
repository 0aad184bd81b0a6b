"""Events that bring a piece of a text: of the answer, of what is thought, of the arguments of a call. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from inferencecenter.protocol.events import Reasoning, Token, ToolCall

if TYPE_CHECKING:
    from inferencecenter.protocol.base import Event
    from inferencecenter.protocol.values import TokenLogprobs

Text: TypeAlias = Token | Reasoning | ToolCall


def text_of(event: Text) -> str:
    """Return the piece that an event brings."""
    return event.arguments if isinstance(event, ToolCall) else event.content


def goes_on(first: Text, event: Event) -> bool:
    """Tell whether an event brings more of the text of which ``first`` brings a piece.

    The event that names a tool stands by itself.
    """
    if type(event) is not type(first) or event.turn_id != first.turn_id:
        return False
    if isinstance(event, ToolCall) and isinstance(first, ToolCall):
        return event.name is None and first.name is None and event.index == first.index
    return True


def with_text(event: Text, text: str, *, seq: int, logprobs: tuple[TokenLogprobs, ...] | None) -> Text:
    """Return the event with another piece in place of its own."""
    field = "arguments" if isinstance(event, ToolCall) else "content"
    return event.model_copy(update={field: text, "seq": seq, "logprobs": logprobs})

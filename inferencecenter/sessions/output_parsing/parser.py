"""Parses an answer into text, reasoning and tool calls while it is generated.

The parser is a coroutine over a ``CharStream``: it suspends when the stream is exhausted and emits a part as soon as no
later text can change it. Text that may still become a delimiter is held back; after a trigger the stream is marked, and
if the text is not a call of an offered tool it is rolled back and emitted as text. Invariant: the concatenated parts
depend only on the whole text, never on how it was chunked.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from inferencecenter.sessions.output_parsing.char_stream import CharStream
from inferencecenter.sessions.output_parsing.parts import Part, PartBuilder, TextDelta

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from inferencecenter.protocol.values import Tool
    from inferencecenter.sessions.output_parsing.call_format import ReasoningTags, ToolCallFormat
    from inferencecenter.sessions.output_parsing.char_stream import Reading


class PlainTextParser:
    """Returns all output as text."""

    chars_after_reasoning = 0

    def feed(self, text: str) -> tuple[Part, ...]:
        return (TextDelta(text),) if text else ()

    def finish(self) -> tuple[Part, ...]:
        """Return nothing: no text is held back."""
        return ()


_REST_OF_CHUNK: Final = re.compile(r".+", re.DOTALL)


class StructuredOutputParser:
    """Parses one answer.

    White space around calls and reasoning is dropped. Text that starts like a call but names no offered tool is text;
    once a call is started, whatever stands in the place of its arguments is its arguments.

    Args:
        begun: The start of the answer that the prompt already contains, such as the opening reasoning tag.
        thinking: The reasoning tags, if the model reasons.
        call_format: The call format; ``None`` disables calls.
        tools: The offered tools by name.
    """

    def __init__(
        self,
        begun: str,
        *,
        thinking: ReasoningTags | None,
        call_format: ToolCallFormat | None,
        tools: Mapping[str, Tool],
    ) -> None:
        self._stream = CharStream()
        self._builder = PartBuilder()
        self._coroutine = _read_answer(
            self._stream, self._builder, thinking=thinking, call_format=call_format, tools=tools
        )
        self.feed(begun)

    @property
    def chars_after_reasoning(self) -> int | None:
        """Characters after the end of the reasoning in the chunk that contained it; ``None`` before."""
        return self._builder.chars_after_reasoning

    def feed(self, text: str) -> tuple[Part, ...]:
        """Add text and return the parts that are final."""
        self._stream.extend(text)
        next(self._coroutine, None)
        return self._builder.take()

    def finish(self) -> tuple[Part, ...]:
        """Return the text that was held back, at the end of the answer."""
        self._stream.ended = True
        return self.feed("")


def _read_answer(
    stream: CharStream,
    builder: PartBuilder,
    *,
    thinking: ReasoningTags | None,
    call_format: ToolCallFormat | None,
    tools: Mapping[str, Tool],
) -> Reading[None]:
    reasoned = thinking is not None and (yield from _read_reasoning(stream, builder, thinking))
    builder.chars_after_reasoning = stream.n_unread
    if call_format is None:
        if reasoned:
            yield from stream.read_blank()
        yield from _read_rest(stream, builder)
    else:
        yield from _read_text_and_calls(stream, builder, call_format=call_format, tools=tools, fresh=reasoned)


def _read_rest(stream: CharStream, builder: PartBuilder) -> Reading[None]:
    while char := (yield from stream.next()):
        builder.add_text(char)
        builder.add_text(stream.match(_REST_OF_CHUNK))


def _read_reasoning(stream: CharStream, builder: PartBuilder, thinking: ReasoningTags) -> Reading[bool]:
    """Read the reasoning if the answer begins with it."""
    blank = yield from stream.read_blank()
    if not (yield from stream.accept(thinking.opens)):
        stream.push_back(blank)
        return False
    yield from stream.read_blank()
    yield from _read_until(stream, builder.add_reasoning, thinking.closes)
    return True


def _read_text_and_calls(
    stream: CharStream, builder: PartBuilder, *, call_format: ToolCallFormat, tools: Mapping[str, Tool], fresh: bool
) -> Reading[None]:
    """Read text and calls.

    ``fresh`` if only reasoning and calls precede, after which white space is dropped.
    """
    first = True
    while True:
        blank = yield from stream.read_blank()
        initial = (fresh or first) and call_format.initial_trigger
        trigger = (yield from stream.accept(call_format.trigger, initial)) if initial else ""
        if not trigger:
            stream.push_back("" if fresh else blank)
            blank, trigger = yield from _read_until(stream, builder.add_text, call_format.trigger)
        if not trigger:
            builder.add_text(blank)
            return
        stream.mark()
        fresh = yield from call_format.read(stream, builder, tools=tools, trigger=trigger)
        if not fresh:
            stream.rollback()
            builder.add_text(blank + trigger)
        first = False


def _read_until(stream: CharStream, emit: Callable[[str], None], end: str) -> Reading[tuple[str, str]]:
    """Emit text up to ``end``; return the white space before it, which is not emitted, and ``end`` if found."""
    # Words and the white space before them; possessive, so that matching is linear.
    ordinary = re.compile(rf"(?:\s*+[^\s{re.escape(end[0])}]++)++")
    while True:
        emit(stream.match(ordinary))
        blank = yield from stream.read_blank()
        if (yield from stream.accept(end)):
            return blank, end
        char = yield from stream.next()
        if not char:
            return blank, ""
        emit(blank + char)

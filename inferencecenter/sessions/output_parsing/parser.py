"""Parses an answer into text, reasoning and tool calls while it is generated.

The parser is a coroutine over a ``CharStream``: it suspends when the stream is exhausted and emits a part as soon as no
later text can change it. Text that may still become a delimiter is held back; after a trigger the stream is marked, and
if the text is not a call of an offered tool it is rolled back and emitted as text. Invariant: the concatenated parts
depend only on the whole text, never on how it was chunked.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.values import NamedTool
from inferencecenter.sessions.output_parsing.char_stream import CharStream
from inferencecenter.sessions.output_parsing.grammar import AnswerStart, calls_grammar, form_grammar, no_calls_grammar
from inferencecenter.sessions.output_parsing.parts import Part, PartBuilder, TextDelta

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from inferencecenter.ipc.messages import Grammar
    from inferencecenter.protocol.requests import Infer
    from inferencecenter.protocol.values import Tool
    from inferencecenter.sessions.output_parsing.call_format import ReasoningTags, TemplateCapabilities, ToolCallFormat
    from inferencecenter.sessions.output_parsing.char_stream import Reading
    from inferencecenter.sessions.output_parsing.parts import OutputParser


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


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSpec:
    """How the engine constrains an answer, and how the answer is parsed.

    ``markers`` are control tokens that the engine must emit as text. ``begun`` is the start of the answer that the
    prompt already contains; without ``thinking`` and ``call_format`` the answer is plain text.
    """

    grammar: Grammar | None = None
    markers: tuple[str, ...] = ()
    begun: str = ""
    thinking: ReasoningTags | None = None
    call_format: ToolCallFormat | None = None
    tools: Mapping[str, Tool] = field(default_factory=dict)

    @property
    def plain(self) -> bool:
        """Whether the whole answer is text."""
        return self.thinking is None and self.call_format is None

    def new_parser(self) -> OutputParser:
        if self.plain:
            return PlainTextParser()
        return StructuredOutputParser(
            self.begun, thinking=self.thinking, call_format=self.call_format, tools=self.tools
        )


def output_spec(request: Infer, *, capabilities: TemplateCapabilities, prompt: str) -> OutputSpec:
    """Return how the answer to ``request`` is constrained and parsed.

    Args:
        request: The request.
        capabilities: The model's capabilities.
        prompt: The rendered prompt; its end shows whether the reasoning is already open.

    Raises:
        InferenceCenterError: ``invalid_request`` for tools if the model does not support them, and see
            ``form_grammar`` and ``calls_grammar``.
    """
    call_format = capabilities.call_format
    if request.tools and call_format is None:
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST, "this session's model does not support tools", field="tools"
        )
    begun = (
        call_format.trigger
        if call_format is not None and call_format.text_prefix and prompt.endswith(call_format.trigger)
        else ""
    )
    state = _reasoning_state(request, capabilities, prompt=prompt)
    start = AnswerStart(
        control=capabilities.control,
        thinking=None if state == "not" else capabilities.thinking,
        in_thinking=state == "already",
        in_call=bool(begun),
        text_prefix=call_format.text_prefix if call_format is not None and begun else "",
    )
    opened = capabilities.thinking.opens if capabilities.thinking is not None and start.in_thinking else ""
    calls = bool(request.tools) and request.tool_choice != "none"
    parsed_format = call_format if calls or start.text_prefix else None
    marks = (capabilities.thinking.opens, capabilities.thinking.closes) if capabilities.thinking is not None else ()
    return OutputSpec(
        grammar=form_grammar(request, start) or _calls(request, capabilities, start),
        markers=tuple(
            mark for mark in (*marks, *(parsed_format.markers if parsed_format else ())) if mark in capabilities.control
        ),
        begun=begun or opened,
        thinking=capabilities.thinking,
        call_format=parsed_format,
        tools={tool.name: tool for tool in request.tools or ()} if calls else {},
    )


def _calls(request: Infer, capabilities: TemplateCapabilities, start: AnswerStart) -> Grammar | None:
    call_format, tools, choice = capabilities.call_format, request.tools, request.tool_choice
    if call_format is None or not tools:
        return None
    if choice == "none":
        return no_calls_grammar(call_format, start=start)
    named = isinstance(choice, NamedTool)
    return calls_grammar(
        call_format,
        [tool for tool in tools if tool.name == choice.name] if isinstance(choice, NamedTool) else tools,
        start=start,
        required=named or choice == "required",
        parallel_calls=request.parallel_tool_calls and capabilities.parallel_calls and not named,
    )


def _reasoning_state(
    request: Infer, capabilities: TemplateCapabilities, *, prompt: str
) -> Literal["already", "perhaps", "not"]:
    """Return whether the model reasons, by the end of the prompt."""
    thinking = capabilities.thinking
    if thinking is None or request.thinking is False:
        return "not"
    if prompt.rstrip().endswith(thinking.opens):
        return "already"
    return "not" if prompt.rstrip().endswith(thinking.closes) else "perhaps"

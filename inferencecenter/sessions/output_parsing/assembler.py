"""Assembles an answer from the parts that its parser returns. Pure.

The assembler decides which parts may be sent. After a restart the answer is parsed again from its beginning once the
model is known; the parts that were already sent are then skipped. Invariant: the sent parts are a prefix of the parsed
answer, whatever the sizes of the chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias

import orjson

from inferencecenter.protocol.values import ChatMessage, ToolCall
from inferencecenter.sessions.history import TOKEN_BYTES
from inferencecenter.sessions.output_parsing.parts import ArgumentsDelta, Part, ReasoningDelta, TextDelta, ToolCallStart

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inferencecenter.ipc.messages import SampledLogprobs, TokenDelta
    from inferencecenter.sessions.output_parsing.output_spec import OutputSpec
    from inferencecenter.sessions.output_parsing.parts import OutputParser

Parts: TypeAlias = Sequence[Part]

_MAX_CALLS: Final = 128
_ID_PREFIX: Final = "call_"


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """Parts of an answer to send now; ``logprobs`` belong to the first of them."""

    parts: Parts
    logprobs: tuple[SampledLogprobs, ...] = ()


def call_id(turn_id: str, index: int) -> str:
    """Return the id of a tool call, derived from the turn and thus stable across restarts."""
    return f"{_ID_PREFIX}{turn_id.removeprefix('t_')}_{index}"


@dataclass(slots=True)
class ResponseAssembler:
    """The answer of a turn and how much of it was sent.

    A restored turn has sent parts before; it has no parser until its model is known again.
    """

    turn_id: str
    _texts: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)
    _calls: list[tuple[str, list[str]]] = field(default_factory=list)
    _emitted: list[Part] = field(default_factory=list)
    _pending: Parts = ()
    _logprobs: tuple[SampledLogprobs, ...] = ()
    _parser: OutputParser | None = None
    _n_reasoning_tokens: int = 0

    @classmethod
    def restored(cls, turn_id: str, emitted: Iterable[Part]) -> ResponseAssembler:
        """Return the assembler of a turn that had ``emitted`` parts before a restart."""
        assembler = cls(turn_id)
        assembler._emitted = list(emitted)
        for part in assembler._emitted:
            assembler._apply(part)
        return assembler

    @property
    def has_parser(self) -> bool:
        """Whether the output format is known."""
        return self._parser is not None

    @property
    def content(self) -> str:
        return "".join(self._texts)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def reasoning_tokens(self) -> int:
        """Tokens up to the end of the reasoning, including its tags.

        If several tokens arrive at once and the reasoning ends among them, they are attributed in proportion to their
        characters; the same applies to all output before a restart.
        """
        return self._n_reasoning_tokens if self._reasoning else 0

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The tool calls so far; the arguments of the last one may be incomplete."""
        return tuple(
            ToolCall(call_id=call_id(self.turn_id, index), name=name, arguments="".join(arguments))
            for index, (name, arguments) in enumerate(self._calls[:_MAX_CALLS])
        )

    @property
    def complete_calls(self) -> tuple[ToolCall, ...]:
        """The calls whose arguments are a complete JSON object."""
        return tuple(call for call in self.calls if _is_object(call.arguments))

    def message(self) -> ChatMessage:
        """Return the answer as stored in the conversation, without truncated calls."""
        return ChatMessage(
            role="assistant",
            content=self.content,
            reasoning=self.reasoning or None,
            tool_calls=self.complete_calls or None,
        )

    def set_parser(self, spec: OutputSpec, text: str, *, n_tokens: int = 0) -> None:
        """Parse the answer from now on according to ``spec``.

        Args:
            spec: The output format.
            text: The whole text so far; parts of it may have been sent.
            n_tokens: Tokens of that text.
        """
        self._parser = spec.new_parser()
        self._pending = remaining_parts(self._emitted, self._feed(self._parser, text, n_tokens))
        self._emitted = []

    def feed(self, delta: TokenDelta) -> OutputDelta:
        """Add generated output and return what to send."""
        n_tokens = len(delta.tokens) // TOKEN_BYTES
        parts = () if self._parser is None else self._feed(self._parser, delta.text, n_tokens)
        return self._emit(parts, delta.logprobs)

    def finish(self) -> OutputDelta:
        """Return the remaining parts at the end of the answer."""
        parts = self._parser.finish() if self._parser is not None else ()
        if not parts and not self._pending and self._logprobs:
            parts = (TextDelta(""),)
        return self._emit(parts, ())

    def _feed(self, parser: OutputParser, text: str, n_tokens: int) -> Parts:
        """Parse text and count the reasoning tokens in it."""
        is_reasoning = parser.chars_after_reasoning is None
        parts = parser.feed(text)
        if is_reasoning:
            n_after = parser.chars_after_reasoning or 0
            # Rounded up: the token that contains the end of the closing tag counts.
            self._n_reasoning_tokens += n_tokens - (n_tokens * n_after // len(text) if n_after else 0)
        return parts

    def _emit(self, parts: Parts, logprobs: tuple[SampledLogprobs, ...]) -> OutputDelta:
        if self._pending:
            parts, self._pending = (*self._pending, *parts), ()
        if self._logprobs:
            logprobs, self._logprobs = self._logprobs + logprobs, ()
        if not parts:
            self._logprobs = logprobs
            return _NO_OUTPUT
        for part in parts:
            self._apply(part)
        return OutputDelta(parts, logprobs)

    def _apply(self, part: Part) -> None:
        match part:
            case TextDelta(text):
                self._texts.append(text)
            case ReasoningDelta(text):
                self._reasoning.append(text)
            case ToolCallStart(_, name):
                self._calls.append((name, []))
            case ArgumentsDelta(index, text):
                self._calls[index][1].append(text)


def assembler_for(
    spec: OutputSpec, before: ResponseAssembler | None, *, turn_id: str, text: str, n_tokens: int
) -> ResponseAssembler | None:
    """Return the assembler of an answer whose format is ``spec``; ``None`` for plain text.

    Args:
        spec: The output format.
        before: The current assembler, if any.
        turn_id: The turn.
        text: The whole text so far.
        n_tokens: Tokens generated so far; a started answer keeps its format.
    """
    started = n_tokens > 0
    if started and (before is None or before.has_parser):
        return before
    if before is None or not started:
        if spec.plain:
            return None
        before = ResponseAssembler(turn_id)
    before.set_parser(spec, text, n_tokens=n_tokens)
    return before


def remaining_parts(emitted: Parts, read: Parts) -> tuple[Part, ...]:
    """Return the remainder of ``read`` after the prefix ``emitted``, however both are chunked.

    If it is no prefix nothing is returned: sent parts cannot be revised.
    """
    left, rest = joined(emitted), joined(read)
    while left and rest:
        first, other = left.pop(0), rest.pop(0)
        if first == other:
            continue
        tail = _tail(first, other)
        if left or tail is None:
            return ()
        return (tail, *rest)
    return tuple(rest)


def joined(parts: Parts) -> list[Part]:
    """Return the parts with adjacent texts of one kind merged."""
    together: list[Part] = []
    for part in parts:
        if not isinstance(part, ToolCallStart) and not part.text:
            continue
        last = together[-1] if together else None
        match last, part:
            case (TextDelta(before), TextDelta(text)):
                together[-1] = TextDelta(before + text)
            case (ReasoningDelta(before), ReasoningDelta(text)):
                together[-1] = ReasoningDelta(before + text)
            case (ArgumentsDelta(index, before), ArgumentsDelta(other, text)) if index == other:
                together[-1] = ArgumentsDelta(index, before + text)
            case _:
                together.append(part)
    return together


def encode_parts(parts: Parts) -> str:
    """Return parts in their stored form, a JSON array."""
    return orjson.dumps([_encoded(part) for part in parts]).decode()


def decode_parts(columns: Iterable[str]) -> tuple[Part, ...]:
    """Return the parts of one answer from the columns that ``encode_parts`` wrote, in order.

    Raises:
        ValueError: A column is malformed, or a call is missing.
    """
    parts: list[Part] = []
    n_calls = 0
    for column in columns:
        parsed = orjson.loads(column)
        if not isinstance(parsed, list):
            raise ValueError("not a list of parts")
        for part in map(_decoded, parsed):
            if isinstance(part, ToolCallStart):
                n_calls += 1
            if isinstance(part, ToolCallStart | ArgumentsDelta) and part.index != n_calls - 1:
                raise ValueError("a call is missing")
            parts.append(part)
    return tuple(parts)


def _tail(first: Part, other: Part) -> Part | None:
    """Return the rest of ``other`` after its prefix ``first``; ``None`` if that is not a prefix."""
    match first, other:
        case (TextDelta(head), TextDelta(whole)) if whole.startswith(head):
            return TextDelta(whole[len(head) :])
        case (ReasoningDelta(head), ReasoningDelta(whole)) if whole.startswith(head):
            return ReasoningDelta(whole[len(head) :])
        case (ArgumentsDelta(index, head), ArgumentsDelta(same, whole)) if index == same and whole.startswith(head):
            return ArgumentsDelta(index, whole[len(head) :])
    return None


def _encoded(part: Part) -> list[str | int]:
    match part:
        case TextDelta(text):
            return ["said", text]
        case ReasoningDelta(text):
            return ["thought", text]
        case ToolCallStart(index, name):
            return ["called", index, name]
        case ArgumentsDelta(index, text):
            return ["argued", index, text]


def _decoded(encoded: object) -> Part:
    match encoded:
        case ["said", str(text)]:
            return TextDelta(text)
        case ["thought", str(text)]:
            return ReasoningDelta(text)
        case ["called", int(index), str(name)]:
            return ToolCallStart(index, name)
        case ["argued", int(index), str(text)]:
            return ArgumentsDelta(index, text)
    raise ValueError("not a part of an answer")


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(orjson.loads(arguments), dict)
    except orjson.JSONDecodeError:
        return False


_NO_OUTPUT: Final = OutputDelta(())

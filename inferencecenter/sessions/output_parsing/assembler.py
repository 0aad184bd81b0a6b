"""Assembles an answer from the parts that its parser returns. Pure."""

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
    from inferencecenter.sessions.output_parsing.parser import OutputSpec
    from inferencecenter.sessions.output_parsing.parts import OutputParser

Parts: TypeAlias = Sequence[Part]

_MAX_CALLS: Final = 128
_ID_PREFIX: Final = "call_"


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """Parts of an answer that are to be told now; ``logprobs`` go with the first."""

    parts: Parts
    logprobs: tuple[SampledLogprobs, ...] = ()


def call_id(turn_id: str, index: int) -> str:
    """Return the name of a turn's call, which is the same each time it is asked for."""
    return f"{_ID_PREFIX}{turn_id.removeprefix('t_')}_{index}"


@dataclass(slots=True)
class ResponseAssembler:
    """An answer as it is told.

    A turn that an earlier daemon began has told parts of it already; until its model is known again it cannot be read
    any further.
    """

    turn_id: str
    _texts: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)
    _calls: list[tuple[str, list[str]]] = field(default_factory=list)
    _emitted: list[Part] = field(default_factory=list)
    _due: Parts = ()
    _logprobs: tuple[SampledLogprobs, ...] = ()
    _parser: OutputParser | None = None
    _n_reasoning_tokens: int = 0

    @classmethod
    def restored(cls, turn_id: str, emitted: Iterable[Part]) -> ResponseAssembler:
        """Return an answer of which parts were told before."""
        speaking = cls(turn_id)
        speaking._emitted = list(emitted)
        for part in speaking._emitted:
            speaking._take(part)
        return speaking

    @property
    def has_parser(self) -> bool:
        """Whether it is known how the answer is read."""
        return self._parser is not None

    @property
    def content(self) -> str:
        """What was said so far."""
        return "".join(self._texts)

    @property
    def reasoning(self) -> str:
        """What was thought so far."""
        return "".join(self._reasoning)

    @property
    def reasoning_tokens(self) -> int:
        """Tokens up to the end of what was thought, with the marks around it.

        Of several that came at once, one of which has that end in it, as many as are its share of their text. So it is
        with all that an earlier daemon heard.
        """
        return self._n_reasoning_tokens if self._reasoning else 0

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The tools that were asked for so far; arguments of the last may lack their end."""
        return tuple(
            ToolCall(call_id=call_id(self.turn_id, index), name=name, arguments="".join(arguments))
            for index, (name, arguments) in enumerate(self._calls[:_MAX_CALLS])
        )

    @property
    def complete_calls(self) -> tuple[ToolCall, ...]:
        """Those of the calls whose arguments are a whole JSON object."""
        return tuple(call for call in self.calls if _is_object(call.arguments))

    def message(self) -> ChatMessage:
        """Return the answer as the conversation keeps it; a call that was cut off is not part of it."""
        return ChatMessage(
            role="assistant",
            content=self.content,
            reasoning=self.reasoning or None,
            tool_calls=self.complete_calls or None,
        )

    def set_parser(self, speech: OutputSpec, said: str, *, n_tokens: int = 0) -> None:
        """Read the answer from now on as ``speech`` says.

        Args:
            speech: How the model writes.
            said: All of its text so far, whose parts may have been told.
            n_tokens: Tokens that spell it.
        """
        self._parser = speech.reader()
        self._due = remaining_parts(self._emitted, self._feed(self._parser, said, n_tokens))
        self._emitted = []

    def feed(self, delta: TokenDelta) -> OutputDelta:
        """Take more of the answer and return what is to be told of it now."""
        n_tokens = len(delta.tokens) // TOKEN_BYTES
        parts = () if self._parser is None else self._feed(self._parser, delta.text, n_tokens)
        return self._emit(parts, delta.logprobs)

    def finish(self) -> OutputDelta:
        """Return what is left to be told when no more comes."""
        parts = self._parser.finish() if self._parser is not None else ()
        if not parts and not self._due and self._logprobs:
            parts = (TextDelta(""),)
        return self._emit(parts, ())

    def _feed(self, reader: OutputParser, text: str, n_tokens: int) -> Parts:
        """Read more text, and count those of its tokens with which the model thinks."""
        is_reasoning = reader.chars_after_reasoning is None
        parts = reader.feed(text)
        if is_reasoning:
            behind = reader.chars_after_reasoning or 0
            # Rounded up: the token with the end of the mark is one of them.
            self._n_reasoning_tokens += n_tokens - (n_tokens * behind // len(text) if behind else 0)
        return parts

    def _emit(self, parts: Parts, logprobs: tuple[SampledLogprobs, ...]) -> OutputDelta:
        if self._due:
            parts, self._due = (*self._due, *parts), ()
        if self._logprobs:
            logprobs, self._logprobs = self._logprobs + logprobs, ()
        if not parts:
            self._logprobs = logprobs
            return _NO_OUTPUT
        for part in parts:
            self._take(part)
        return OutputDelta(parts, logprobs)

    def _take(self, part: Part) -> None:
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
    speech: OutputSpec, before: ResponseAssembler | None, *, turn_id: str, said: str, n_tokens: int
) -> ResponseAssembler | None:
    """Return how an answer goes on that is read as ``speech`` says; ``None`` for one that is plain text.

    Args:
        speech: How the model writes.
        before: How it was read up to now.
        turn_id: The turn.
        said: All of its text so far.
        n_tokens: Tokens that it has made. With any it goes on as it began.
    """
    begun = n_tokens > 0
    if begun and (before is None or before.has_parser):
        return before
    if before is None or not begun:
        if speech.plain:
            return None
        before = ResponseAssembler(turn_id)
    before.set_parser(speech, said, n_tokens=n_tokens)
    return before


def remaining_parts(emitted: Parts, read: Parts) -> tuple[Part, ...]:
    """Return what comes after ``emitted`` in ``read``, which begins with it however both are cut.

    If it does not, what was told stands, and nothing more is certain.
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
    """Return the same parts with texts that follow each other as one."""
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
    """Return parts as they are written down."""
    return orjson.dumps([_encoded(part) for part in parts]).decode()


def decode_parts(columns: Iterable[str]) -> tuple[Part, ...]:
    """Return the parts of one answer that ``encode_parts`` wrote, one time after the other.

    Raises:
        ValueError: It did not write this.
    """
    parts: list[Part] = []
    n_calls = 0
    for column in columns:
        found = orjson.loads(column)
        if not isinstance(found, list):
            raise ValueError("no list of parts")
        for part in map(_decoded, found):
            if isinstance(part, ToolCallStart):
                n_calls += 1
            if isinstance(part, ToolCallStart | ArgumentsDelta) and part.index != n_calls - 1:
                raise ValueError("a call is missing")
            parts.append(part)
    return tuple(parts)


def _tail(first: Part, other: Part) -> Part | None:
    """Return the rest of ``other``, which begins with ``first``; ``None`` if it does not."""
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
    raise ValueError("no part of an answer")


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(orjson.loads(arguments), dict)
    except orjson.JSONDecodeError:
        return False


_NO_OUTPUT: Final = OutputDelta(())

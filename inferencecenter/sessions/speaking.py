"""What an answer consists of that is more than plain text: read while it comes, remembered, and put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias

import orjson

from inferencecenter.protocol.values import ChatMessage, ToolCall
from inferencecenter.sessions.formats.parts import Argued, Called, Part, Said, Thought
from inferencecenter.sessions.history import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inferencecenter.ipc.messages import SampledLogprobs, TokenDelta
    from inferencecenter.sessions.formats.parts import Reader
    from inferencecenter.sessions.formats.speech import Speech

Parts: TypeAlias = Sequence[Part]

_MAX_CALLS: Final = 128
_ID_PREFIX: Final = "call_"


@dataclass(frozen=True, slots=True)
class Utterance:
    """Parts of an answer that are to be told now; ``logprobs`` go with the first."""

    parts: Parts
    logprobs: tuple[SampledLogprobs, ...] = ()


def call_id(turn_id: str, index: int) -> str:
    """Return the name of a turn's call, which is the same each time it is asked for."""
    return f"{_ID_PREFIX}{turn_id.removeprefix('t_')}_{index}"


@dataclass(slots=True)
class Speaking:
    """An answer as it is told.

    A turn that an earlier daemon began has told parts of it already; until its model is known again it cannot be read
    any further.
    """

    turn_id: str
    _saids: list[str] = field(default_factory=list)
    _thoughts: list[str] = field(default_factory=list)
    _calls: list[tuple[str, list[str]]] = field(default_factory=list)
    _told: list[Part] = field(default_factory=list)
    _due: Parts = ()
    _logprobs: tuple[SampledLogprobs, ...] = ()
    _reader: Reader | None = None
    _n_thinking: int = 0

    @classmethod
    def restored(cls, turn_id: str, told: Iterable[Part]) -> Speaking:
        """Return an answer of which parts were told before."""
        speaking = cls(turn_id)
        speaking._told = list(told)
        for part in speaking._told:
            speaking._take(part)
        return speaking

    @property
    def is_read(self) -> bool:
        """Whether it is known how the answer is read."""
        return self._reader is not None

    @property
    def content(self) -> str:
        """What was said so far."""
        return "".join(self._saids)

    @property
    def reasoning(self) -> str:
        """What was thought so far."""
        return "".join(self._thoughts)

    @property
    def reasoning_tokens(self) -> int:
        """Tokens up to the end of what was thought, with the marks around it.

        Of several that came at once, one of which has that end in it, as many as are its share of their text. So it is
        with all that an earlier daemon heard.
        """
        return self._n_thinking if self._thoughts else 0

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

    def follow(self, speech: Speech, said: str, *, n_tokens: int = 0) -> None:
        """Read the answer from now on as ``speech`` says.

        Args:
            speech: How the model writes.
            said: All of its text so far, whose parts may have been told.
            n_tokens: Tokens that spell it.
        """
        self._reader = speech.reader()
        self._due = untold(self._told, self._feed(self._reader, said, n_tokens))
        self._told = []

    def read(self, delta: TokenDelta) -> Utterance:
        """Take more of the answer and return what is to be told of it now."""
        n_tokens = len(delta.tokens) // TOKEN_BYTES
        parts = () if self._reader is None else self._feed(self._reader, delta.text, n_tokens)
        return self._utter(parts, delta.logprobs)

    def finish(self) -> Utterance:
        """Return what is left to be told when no more comes."""
        parts = self._reader.finish() if self._reader is not None else ()
        if not parts and not self._due and self._logprobs:
            parts = (Said(""),)
        return self._utter(parts, ())

    def _feed(self, reader: Reader, text: str, n_tokens: int) -> Parts:
        """Read more text, and count those of its tokens with which the model thinks."""
        thinks = reader.behind_thoughts is None
        parts = reader.feed(text)
        if thinks:
            behind = reader.behind_thoughts or 0
            # Rounded up: the token with the end of the mark is one of them.
            self._n_thinking += n_tokens - (n_tokens * behind // len(text) if behind else 0)
        return parts

    def _utter(self, parts: Parts, logprobs: tuple[SampledLogprobs, ...]) -> Utterance:
        if self._due:
            parts, self._due = (*self._due, *parts), ()
        if self._logprobs:
            logprobs, self._logprobs = self._logprobs + logprobs, ()
        if not parts:
            self._logprobs = logprobs
            return _NOTHING
        for part in parts:
            self._take(part)
        return Utterance(parts, logprobs)

    def _take(self, part: Part) -> None:
        match part:
            case Said(text):
                self._saids.append(text)
            case Thought(text):
                self._thoughts.append(text)
            case Called(_, name):
                self._calls.append((name, []))
            case Argued(index, text):
                self._calls[index][1].append(text)


def speaking_as(speech: Speech, before: Speaking | None, *, turn_id: str, said: str, n_tokens: int) -> Speaking | None:
    """Return how an answer goes on that is read as ``speech`` says; ``None`` for one that is plain text.

    Args:
        speech: How the model writes.
        before: How it was read up to now.
        turn_id: The turn.
        said: All of its text so far.
        n_tokens: Tokens that it has made. With any it goes on as it began.
    """
    begun = n_tokens > 0
    if begun and (before is None or before.is_read):
        return before
    if before is None or not begun:
        if speech.plain:
            return None
        before = Speaking(turn_id)
    before.follow(speech, said, n_tokens=n_tokens)
    return before


def untold(told: Parts, read: Parts) -> tuple[Part, ...]:
    """Return what comes after ``told`` in ``read``, which begins with it however both are cut.

    If it does not, what was told stands, and nothing more is certain.
    """
    left, rest = joined(told), joined(read)
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
        if not isinstance(part, Called) and not part.text:
            continue
        last = together[-1] if together else None
        match last, part:
            case (Said(before), Said(text)):
                together[-1] = Said(before + text)
            case (Thought(before), Thought(text)):
                together[-1] = Thought(before + text)
            case (Argued(index, before), Argued(other, text)) if index == other:
                together[-1] = Argued(index, before + text)
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
            if isinstance(part, Called):
                n_calls += 1
            if isinstance(part, Called | Argued) and part.index != n_calls - 1:
                raise ValueError("a call is missing")
            parts.append(part)
    return tuple(parts)


def _tail(first: Part, other: Part) -> Part | None:
    """Return the rest of ``other``, which begins with ``first``; ``None`` if it does not."""
    match first, other:
        case (Said(head), Said(whole)) if whole.startswith(head):
            return Said(whole[len(head) :])
        case (Thought(head), Thought(whole)) if whole.startswith(head):
            return Thought(whole[len(head) :])
        case (Argued(index, head), Argued(same, whole)) if index == same and whole.startswith(head):
            return Argued(index, whole[len(head) :])
    return None


def _encoded(part: Part) -> list[str | int]:
    match part:
        case Said(text):
            return ["said", text]
        case Thought(text):
            return ["thought", text]
        case Called(index, name):
            return ["called", index, name]
        case Argued(index, text):
            return ["argued", index, text]


def _decoded(encoded: object) -> Part:
    match encoded:
        case ["said", str(text)]:
            return Said(text)
        case ["thought", str(text)]:
            return Thought(text)
        case ["called", int(index), str(name)]:
            return Called(index, name)
        case ["argued", int(index), str(text)]:
            return Argued(index, text)
    raise ValueError("no part of an answer")


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(orjson.loads(arguments), dict)
    except orjson.JSONDecodeError:
        return False


_NOTHING: Final = Utterance(())

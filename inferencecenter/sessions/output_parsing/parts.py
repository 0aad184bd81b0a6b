"""The parts of an answer, and the builder that collects them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A tool call begins; ``index`` counts the calls of the answer from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """Text of the arguments of a call; JSON when the call is complete."""

    index: int
    text: str


Part: TypeAlias = TextDelta | ReasoningDelta | ToolCallStart | ArgumentsDelta


class OutputParser(Protocol):
    """Parses one answer fed in chunks of any size; the joined parts do not depend on the chunks."""

    @property
    def chars_after_reasoning(self) -> int | None:
        """Characters after the end of the reasoning in the chunk that contained it; ``None`` before."""

    def feed(self, text: str) -> tuple[Part, ...]:
        """Add text and return the parts that are final."""

    def finish(self) -> tuple[Part, ...]:
        """Return the text that was held back, at the end of the answer."""


_Kind: TypeAlias = type[TextDelta] | type[ReasoningDelta] | type[ArgumentsDelta]


class PartBuilder:
    """Collects parts; adjacent texts of one kind are merged.

    ``chars_after_reasoning`` is the number of unread characters when the reasoning ended or turned out to be absent.
    """

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._kind: _Kind = TextDelta
        self._texts: list[str] = []  # of this kind, not yet in the parts
        self._n_calls = 0
        self.chars_after_reasoning: int | None = None

    def add_text(self, text: str) -> None:
        self._add(TextDelta, text)

    def add_reasoning(self, text: str) -> None:
        self._add(ReasoningDelta, text)

    def start_call(self, name: str) -> None:
        self._close()
        self._parts.append(ToolCallStart(self._n_calls, name))
        self._n_calls += 1

    def add_arguments(self, text: str) -> None:
        """Add text of the arguments of the current call."""
        self._add(ArgumentsDelta, text)

    def take(self) -> tuple[Part, ...]:
        """Return and remove the parts collected so far."""
        self._close()
        parts, self._parts = tuple(self._parts), []
        return parts

    def _add(self, kind: _Kind, text: str) -> None:
        if not text:
            return
        if kind is not self._kind:
            self._close()
            self._kind = kind
        self._texts.append(text)

    def _close(self) -> None:
        if not self._texts:
            return
        text, self._texts = "".join(self._texts), []
        if self._kind is ArgumentsDelta:
            self._parts.append(ArgumentsDelta(self._n_calls - 1, text))
        else:
            self._parts.append(ReasoningDelta(text) if self._kind is ReasoningDelta else TextDelta(text))

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
    """Text of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A tool is asked for; ``index`` counts the calls of the answer from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """Text of a call's arguments; all of it is JSON when the call is complete."""

    index: int
    text: str


Part: TypeAlias = TextDelta | ReasoningDelta | ToolCallStart | ArgumentsDelta


class OutputParser(Protocol):
    """Reads one answer, in pieces of any size: however it is cut, its parts put together are the same."""

    @property
    def chars_after_reasoning(self) -> int | None:
        """Characters that stood behind the end of the thoughts in the piece that had it; ``None`` before that."""

    def feed(self, text: str) -> tuple[Part, ...]:
        """Take more of the answer and return what is certain by now."""

    def finish(self) -> tuple[Part, ...]:
        """Return what was held back, now that no more will come."""


_Kind: TypeAlias = type[TextDelta] | type[ReasoningDelta] | type[ArgumentsDelta]


class PartBuilder:
    """Collects parts; neighbours of one kind become one.

    ``chars_after_reasoning`` is how much text was there already when the thoughts had ended, or it was clear that there
    are none.
    """

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._kind: _Kind = TextDelta
        self._texts: list[str] = []  # of this kind, behind the parts
        self._n_calls = 0
        self.chars_after_reasoning: int | None = None

    def add_text(self, text: str) -> None:
        """Add text of the answer."""
        self._add(TextDelta, text)

    def add_reasoning(self, text: str) -> None:
        """Add text of what the model thinks."""
        self._add(ReasoningDelta, text)

    def start_call(self, name: str) -> None:
        """Begin a call."""
        self._close()
        self._parts.append(ToolCallStart(self._n_calls, name))
        self._n_calls += 1

    def add_arguments(self, text: str) -> None:
        """Add text of the arguments of the call that began last."""
        self._add(ArgumentsDelta, text)

    def take(self) -> tuple[Part, ...]:
        """Return what was added since the last time."""
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

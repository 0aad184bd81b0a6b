"""What an answer consists of, as it is read while it comes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class Said:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Text of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class Called:
    """A tool is asked for; ``index`` counts the calls of the answer from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Argued:
    """Text of a call's arguments; all of it is JSON when the call is complete."""

    index: int
    text: str


Part: TypeAlias = Said | Thought | Called | Argued


class Reader(Protocol):
    """Reads one answer, in pieces of any size: however it is cut, its parts put together are the same."""

    @property
    def behind_thoughts(self) -> int | None:
        """Characters that stood behind the end of the thoughts in the piece that had it; ``None`` before that."""

    def feed(self, text: str) -> tuple[Part, ...]:
        """Take more of the answer and return what is certain by now."""

    def finish(self) -> tuple[Part, ...]:
        """Return what was held back, now that no more will come."""

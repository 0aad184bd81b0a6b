"""What is known of how a model writes: found once, from its template and its control tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from inferencecenter.sessions.formats.style import Style


@dataclass(frozen=True, slots=True)
class Thinking:
    """The texts around what a model thinks before it answers."""

    opens: str
    closes: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """How a model writes calls of tools and what it thinks; without a style it cannot ask for any tool.

    It may write ``several`` calls in an answer. Of the texts that set these off, ``control`` are control tokens, which
    an answer shows only where that is asked for.
    """

    style: Style | None = None
    several: bool = True
    thinking: Thinking | None = None
    control: frozenset[str] = frozenset()


PLAIN: Final = Written()
"""Text and nothing else."""

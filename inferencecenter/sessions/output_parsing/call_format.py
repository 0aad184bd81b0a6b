"""What a format of tool calls implements, and what is known of a model's template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inferencecenter.protocol.values import Tool
    from inferencecenter.sessions.output_parsing.char_stream import CharStream, Reading
    from inferencecenter.sessions.output_parsing.grammar_builder import GrammarBuilder
    from inferencecenter.sessions.output_parsing.parts import PartBuilder


@dataclass(frozen=True, slots=True)
class CallRules:
    """Expressions of a grammar: the first call behind its trigger, and each one that follows.

    The ``next`` ones come with all that stands between and around them; ``end`` is behind the last.
    """

    first: str
    next: str
    end: str = ""


class ToolCallFormat(Protocol):
    """One way in which models write calls of tools."""

    @property
    def trigger(self) -> str:
        """The text that a call begins with, wherever it stands."""

    @property
    def opening(self) -> str:
        """The text that a call begins with where nothing has been said, empty if it is the same."""

    @property
    def address(self) -> str:
        """What is before text where a trigger is before all that is said; empty where text needs nothing."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that set calls off; they may be control tokens."""

    def read(self, tape: CharStream, outlet: PartBuilder, *, tools: Mapping[str, Tool], trigger: str) -> Reading[bool]:
        """Read what follows a trigger, and settle the tape; if that is no call, tell nothing and return ``False``."""

    def rules(self, tools: Sequence[Tool], lark: GrammarBuilder) -> CallRules:
        """Add to a grammar what calls of ``tools`` consist of."""


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """The texts around what a model thinks before it answers."""

    opens: str
    closes: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateCapabilities:
    """How a model writes calls of tools and what it thinks; without a style it cannot ask for any tool.

    It may write ``several`` calls in an answer. Of the texts that set these off, ``control`` are control tokens, which
    an answer shows only where that is asked for.
    """

    call_format: ToolCallFormat | None = None
    several: bool = True
    thinking: ReasoningTags | None = None
    control: frozenset[str] = frozenset()


PLAIN: Final = TemplateCapabilities()
"""Text and nothing else."""

"""The interface of tool call formats, and the detected capabilities of a model's template."""

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
    """Grammar expressions: the ``first`` call after its trigger, each ``next`` one, and the ``end``.

    ``next`` includes the separator and the opening and closing texts; ``end`` follows the last call.
    """

    first: str
    next: str
    end: str = ""


class ToolCallFormat(Protocol):
    """A syntax in which models write tool calls."""

    @property
    def trigger(self) -> str:
        """The text that begins a call anywhere in the answer."""

    @property
    def initial_trigger(self) -> str:
        """The text that begins a call at the start of the answer, empty if it is the trigger."""

    @property
    def text_prefix(self) -> str:
        """The text between a trigger and plain text in formats where a trigger precedes everything, else empty."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that delimit calls; they may be control tokens."""

    def read(
        self, stream: CharStream, builder: PartBuilder, *, tools: Mapping[str, Tool], trigger: str
    ) -> Reading[bool]:
        """Parse what follows a trigger and commit the stream; return ``False``, without parts, if it is no call."""

    def rules(self, tools: Sequence[Tool], lark: GrammarBuilder) -> CallRules:
        """Add the rules for calls of ``tools`` to a grammar."""


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """The tags around the reasoning of a model."""

    opens: str
    closes: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateCapabilities:
    """How a model writes tool calls and reasoning; without a ``call_format`` it has no tools.

    With ``parallel_calls`` an answer may contain several. ``control`` are the delimiters that are control tokens, which
    the engine emits as text only on request. ``chooses_thinking`` if the template offers the choice. With
    ``omits_empty_thinking`` the template begins answers without reasoning with empty tags, and leaves these out of
    earlier answers.
    """

    call_format: ToolCallFormat | None = None
    parallel_calls: bool = True
    thinking: ReasoningTags | None = None
    chooses_thinking: bool = False
    omits_empty_thinking: bool = False
    control: frozenset[str] = frozenset()


PLAIN: Final = TemplateCapabilities()
"""Plain text only."""

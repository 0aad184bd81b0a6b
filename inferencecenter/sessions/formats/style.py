"""What a way of writing calls has to say of itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inferencecenter.protocol.values import Tool
    from inferencecenter.sessions.formats.lark import Lark
    from inferencecenter.sessions.formats.outlet import Outlet
    from inferencecenter.sessions.formats.tape import Reading, Tape


@dataclass(frozen=True, slots=True)
class CallRules:
    """Expressions of a grammar: the first call behind its trigger, and each one that follows.

    The ``next`` ones come with all that stands between and around them; ``end`` is behind the last.
    """

    first: str
    next: str
    end: str = ""


class Style(Protocol):
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

    def read(self, tape: Tape, outlet: Outlet, *, tools: Mapping[str, Tool], trigger: str) -> Reading[bool]:
        """Read what follows a trigger, and settle the tape; if that is no call, tell nothing and return ``False``."""

    def rules(self, tools: Sequence[Tool], lark: Lark) -> CallRules:
        """Add to a grammar what calls of ``tools`` consist of."""

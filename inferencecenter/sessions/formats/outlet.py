"""Where a reading puts the parts of an answer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from inferencecenter.sessions.formats.parts import Argued, Called, Said, Thought

if TYPE_CHECKING:
    from inferencecenter.sessions.formats.parts import Part


class Outlet:
    """Collects parts; neighbours of one kind become one."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._texts: list[str] = []  # of the last part
        self._n_calls = 0

    def say(self, text: str) -> None:
        """Add text of the answer."""
        self._add(Said(""), text)

    def think(self, text: str) -> None:
        """Add text of what the model thinks."""
        self._add(Thought(""), text)

    def call(self, name: str) -> None:
        """Begin a call."""
        self._close()
        self._parts.append(Called(self._n_calls, name))
        self._n_calls += 1

    def argue(self, text: str) -> None:
        """Add text of the arguments of the call that began last."""
        self._add(Argued(self._n_calls - 1, ""), text)

    def take(self) -> tuple[Part, ...]:
        """Return what was added since the last time."""
        self._close()
        parts, self._parts = tuple(self._parts), []
        return parts

    def _add(self, empty: Said | Thought | Argued, text: str) -> None:
        if not text:
            return
        if not self._parts or not self._texts or self._parts[-1] != empty:
            self._close()
            self._parts.append(empty)
        self._texts.append(text)

    def _close(self) -> None:
        if self._texts:
            last = self._parts[-1]
            assert not isinstance(last, Called)
            self._parts[-1] = replace(last, text="".join(self._texts))
            self._texts = []

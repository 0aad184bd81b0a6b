"""Where a reading puts the parts of an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from inferencecenter.sessions.formats.parts import Argued, Called, Said, Thought

if TYPE_CHECKING:
    from inferencecenter.sessions.formats.parts import Part

_Kind: TypeAlias = type[Said] | type[Thought] | type[Argued]


class Outlet:
    """Collects parts; neighbours of one kind become one.

    ``behind_thoughts`` is how much text was there already when the thoughts had ended, or it was clear that there are
    none.
    """

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._kind: _Kind = Said
        self._texts: list[str] = []  # of this kind, behind the parts
        self._n_calls = 0
        self.behind_thoughts: int | None = None

    def say(self, text: str) -> None:
        """Add text of the answer."""
        self._add(Said, text)

    def think(self, text: str) -> None:
        """Add text of what the model thinks."""
        self._add(Thought, text)

    def call(self, name: str) -> None:
        """Begin a call."""
        self._close()
        self._parts.append(Called(self._n_calls, name))
        self._n_calls += 1

    def argue(self, text: str) -> None:
        """Add text of the arguments of the call that began last."""
        self._add(Argued, text)

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
        if self._kind is Argued:
            self._parts.append(Argued(self._n_calls - 1, text))
        else:
            self._parts.append(Thought(text) if self._kind is Thought else Said(text))

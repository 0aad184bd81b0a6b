"""Label values that come from outside: made safe to expose, and not more of them than a monitor can bear."""

from __future__ import annotations

from typing import Final

OTHER: Final = "other"
_MAX_CHARS: Final = 64
_UNSHOWN: Final = "\N{REPLACEMENT CHARACTER}"


def label_text(text: str) -> str:
    """Return ``text`` without what cannot be shown or encoded, at most 64 characters of it."""
    return "".join(each if each.isprintable() else _UNSHOWN for each in text[:_MAX_CHARS])


class BoundedLabel:
    """Gives the first ``limit`` names a label value of their own, and all others ``other``.

    Who came first keeps its value: a series that changed hands would jump, and a counter that is taken out of ``other``
    would make that fall.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._values: dict[str, str] = {}

    def of(self, name: str) -> str:
        """Return the label value of a name."""
        found = self._values.get(name)
        if found is not None:
            return found
        if len(self._values) >= self._limit:
            return OTHER
        value = self._values[name] = label_text(name)
        return value

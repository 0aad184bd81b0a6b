"""Which of a schema's shared definitions a part of it needs, so that the part can stand alone without all of them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_GROUPS: Final = ("$defs", "definitions")
_POINTER: Final = re.compile(r"#/(\$defs|definitions)/([^/]+)", re.DOTALL)

_Place = tuple[str, str]


class Definitions:
    """The definitions beside a tool's parameters.

    Each is searched for references once, however many parameters refer to it.

    Args:
        schema: The whole schema of the tool's arguments, no deeper than ``check_depth`` allows.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._groups = {group: schema[group] for group in _GROUPS if isinstance(schema.get(group), dict)}
        self._refers: dict[_Place, frozenset[_Place] | None] = {}

    def beside(self, part: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``part`` with the definitions that it refers to, directly or not; its own take precedence.

        The time is proportional to the size of the result.
        """
        used: set[_Place] = set()
        waiting = [self._references(part)]
        while waiting:
            found = waiting.pop()
            if found is None:
                return {**self._groups, **part}
            for place in found - used:
                used.add(place)
                waiting.append(self._referred_by(place))
        kept: dict[str, dict[str, Any]] = {}
        for group, name in sorted(used):
            kept.setdefault(group, {})[name] = self._groups[group][name]
        return {**kept, **part}

    def _referred_by(self, place: _Place) -> frozenset[_Place] | None:
        if place not in self._refers:
            group, name = place
            self._refers[place] = self._references(self._groups[group][name])
        return self._refers[place]

    def _references(self, value: Any) -> frozenset[_Place] | None:
        """Return the definitions that ``value`` refers to; ``None`` where a reference may mean any of them."""
        if not self._groups:
            return frozenset()
        found: set[_Place] = set()
        for reference in _references_in(value):
            pointer = _POINTER.match(reference)
            if pointer is None:
                return None
            group, name = pointer[1], unquote(pointer[2]).replace("~1", "/").replace("~0", "~")
            if name in self._groups.get(group, ()):
                found.add((group, name))
        return frozenset(found)


def _references_in(value: Any) -> Iterator[str]:
    waiting = [value]
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, dict):
            yield from (inner[key] for key in ("$ref", "$dynamicRef") if isinstance(inner.get(key), str))
            waiting.extend(inner.values())
        elif isinstance(inner, list):
            waiting.extend(inner)

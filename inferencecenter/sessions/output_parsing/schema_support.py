"""The part of a JSON Schema that a grammar can enforce. Pure.

llguidance refuses a schema with a keyword that it does not implement, however useful the rest is. The schema of a tool
that is not strict, or of such a form, keeps the rest: ``enforceable`` returns the schema without these keywords, for
the grammar, and names them for the warnings of the turn. The model reads the whole schema in its prompt. Removing a
keyword only widens what the grammar accepts. Invariant: llguidance compiles ``enforceable`` schemas, except for errors
of the schema itself. Clients choose schemas, and this runs on the event loop: the work is linear in the schema's size,
and superlinear parts (comparing the options of ``oneOf``, compiling patterns) have a budget. Beyond it options count as
overlapping, and patterns as valid.
"""

from __future__ import annotations

import re
from itertools import combinations
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import regex

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

_UNIMPLEMENTED: Final = frozenset(
    (
        "propertyNames",
        "uniqueItems",
        "not",
        "if",
        "then",
        "else",
        "contains",
        "minContains",
        "maxContains",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "unevaluatedProperties",
        "unevaluatedItems",
        "$dynamicRef",
        "$dynamicAnchor",
        "$recursiveRef",
        "$recursiveAnchor",
    )
)
_FORMATS: Final = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
_TYPES: Final = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
_SATISFIED: Final[Mapping[str, Collection[Any]]] = {
    "uniqueItems": (False,),
    "unevaluatedProperties": (True,),
    "unevaluatedItems": (True,),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "propertyNames": (True, {}, {"type": "string"}),
}
"""Values with which a keyword demands nothing."""

_SCHEMA: Final = frozenset(("items", "additionalItems", "additionalProperties"))
_SCHEMAS: Final = frozenset(("items", "prefixItems", "allOf", "anyOf", "oneOf"))
_NAMED_SCHEMAS: Final = frozenset(("properties", "patternProperties", "$defs", "definitions"))
_NESTING: Final = _SCHEMA | _SCHEMAS | _NAMED_SCHEMAS
# Rust's regular expressions have no look-around and no backreferences, llguidance's no word boundaries.
_IRREGULAR: Final = re.compile(r"\\\\|\\[1-9kbBZGc]|\(\?(?:<?[=!]|>)|\(\?P=")


_MAX_COMPARISONS: Final = 5_000
_MAX_COMPARED: Final = 16
"""Listed values, and required properties, of a schema that are compared with those of another."""
_MAX_PATTERN_CHARS: Final = 8_192
_FLAGS: Final = re.compile(r"\(\?(?!:|P?<)")


class _Budget:
    """Work that is left for one schema."""

    def __init__(self) -> None:
        self._comparisons = _MAX_COMPARISONS
        self._pattern_chars = _MAX_PATTERN_CHARS

    def compare(self) -> bool:
        """Return whether two schemas may be compared, and count that."""
        self._comparisons -= 1
        return self._comparisons >= 0

    def compile(self, pattern: str) -> bool:
        """Return whether a pattern may be compiled, and count that."""
        self._pattern_chars -= len(pattern)
        return self._pattern_chars >= 0


class Unenforced(NamedTuple):
    """A keyword that a grammar cannot enforce, and the path of its schema, such as ``properties.a``."""

    path: str
    keyword: str

    def __str__(self) -> str:
        return f"{self.keyword} at {self.path}" if self.path else self.keyword


def enforceable(schema: Any, *, strict: bool) -> tuple[Any, list[Unenforced]]:
    """Return a schema without the keywords that a grammar cannot enforce, and these keywords.

    Unless ``strict``, ``oneOf`` accepts any of its schemas, as llguidance cannot always verify that only one matches.
    """
    found: list[Unenforced] = []
    return _enforceable(schema, (), found, _Budget(), coerce=not strict), found


def _enforceable(schema: Any, path: tuple[str, ...], found: list[Unenforced], budget: _Budget, *, coerce: bool) -> Any:
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _SATISFIED and value in _SATISFIED[key]:
            continue
        if not _supports(key, value, schema, budget):
            found.append(Unenforced(".".join(path), f"{key} {value}" if key == "format" else key))
            continue
        nests = key in _NESTING and isinstance(value, dict | list)
        kept[key] = _inner(key, value, (*path, key), found, budget, coerce=coerce) if nests else value
    options = kept.get("oneOf")
    if isinstance(options, list):
        if not all(_are_disjoint(one, other, budget) for one, other in combinations(options, 2)):
            found.append(Unenforced(".".join(path), "oneOf"))
        if coerce:
            del kept["oneOf"]
            _add_any_of(kept, options)
    return kept


def _inner(  # noqa: PLR0913 - of one recursion
    key: str, value: Any, path: tuple[str, ...], found: list[Unenforced], budget: _Budget, *, coerce: bool
) -> Any:
    """Return the value of a keyword, whose schemas are enforceable."""
    if key in _NAMED_SCHEMAS and isinstance(value, dict):
        return {
            name: _enforceable(inner, (*path, name), found, budget, coerce=coerce)
            for name, inner in value.items()
            if key != "patternProperties" or _is_regular(name, path, found, budget)
        }
    if key in _SCHEMAS and isinstance(value, list):
        return [
            _enforceable(inner, (*path, str(index)), found, budget, coerce=coerce) for index, inner in enumerate(value)
        ]
    return _enforceable(value, path, found, budget, coerce=coerce) if key in _SCHEMA else value


def _add_any_of(schema: dict[str, Any], options: list[Any]) -> None:
    if "anyOf" not in schema:
        schema["anyOf"] = options
    else:
        schema["allOf"] = [*schema.get("allOf", ()), {"anyOf": options}]


def _supports(key: str, value: Any, schema: Mapping[str, Any], budget: _Budget) -> bool:
    """Return whether a grammar can enforce a keyword."""
    match key, value:
        case "format", str():
            supported = value in _FORMATS or not _may_be_text(schema)
        case "pattern", str():
            supported = _compiles(value, budget)
        case "minProperties" | "maxProperties", int():
            supported = _are_all_required(schema) or (key == "minProperties" and value == 0)
        case "type", str() | list():
            supported = _TYPES.issuperset([value] if isinstance(value, str) else filter(_is_text, value))
        case "$ref", str():
            supported = value.startswith("#")
        case _:
            supported = key not in _UNIMPLEMENTED
    return supported


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _are_all_required(schema: Mapping[str, Any]) -> bool:
    required, properties = schema.get("required"), schema.get("properties")
    if not properties or not isinstance(properties, dict):
        return not properties
    return isinstance(required, list) and properties.keys() <= set(filter(_is_text, required))


def _may_be_text(schema: Mapping[str, Any]) -> bool:
    kinds = schema.get("type", "string")
    return kinds == "string" or (isinstance(kinds, list) and "string" in kinds)


def _is_regular(pattern: str, path: tuple[str, ...], found: list[Unenforced], budget: _Budget) -> bool:
    """Return whether a pattern of property names can be enforced; if not, it is added to ``found``."""
    if _compiles(pattern, budget):
        return True
    found.append(Unenforced(".".join(path), pattern))
    return False


def _compiles(pattern: str, budget: _Budget) -> bool:
    """Return whether Rust's regular expressions accept a pattern, as far as Python can determine.

    A pattern with flags is not compiled here: ignoring case takes time for each character of a range.
    """
    if any(mark[0] != "\\\\" for mark in _IRREGULAR.finditer(pattern)):
        return False
    if _FLAGS.search(pattern) or not budget.compile(pattern):
        return True
    try:
        regex.compile(pattern)
    except (regex.error, ValueError, OverflowError, RecursionError):
        return False
    return True


def _are_disjoint(one: Any, other: Any, budget: _Budget) -> bool:
    """Return whether no value matches both schemas, judged by types, constants and required properties."""
    if not budget.compare() or not isinstance(one, dict) or not isinstance(other, dict):
        return False
    values, others = _values(one), _values(other)
    if values is not None and others is not None:
        return not any(value in others for value in values)
    kinds, other_kinds = _kinds(one), _kinds(other)
    if kinds and other_kinds and not kinds & other_kinds:
        return True
    return kinds == other_kinds == {"object"} and any(
        _are_disjoint(_property(one, name), _property(other, name), budget)
        for name in _required(one) & _required(other)
    )


def _required(schema: Mapping[str, Any]) -> set[str]:
    required = schema.get("required")
    return set(filter(_is_text, required[:_MAX_COMPARED])) if isinstance(required, list) else set()


def _property(schema: Mapping[str, Any], name: str) -> Any:
    properties = schema.get("properties")
    return properties.get(name) if isinstance(properties, dict) else None


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that a schema lists, ``None`` if it lists none, or too many to compare."""
    if "const" in schema:
        return [schema["const"]]
    listed = schema.get("enum")
    return listed if isinstance(listed, list) and len(listed) <= _MAX_COMPARED else None


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    """Return the types of a schema, an integer being a number; empty if they are unknown."""
    kinds = schema.get("type")
    named = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []
    return {"number" if kind == "integer" else kind for kind in filter(_is_text, named)}

"""The part of a JSON Schema that a grammar can enforce. Pure.

llguidance refuses a schema with a keyword that it does not implement, or whose value is malformed, however useful the
rest is. The schema of a tool that is not strict, or of such a form, keeps the rest: ``enforceable`` returns the schema
without these keywords, for the grammar, and names them for the warnings of the turn. The model reads the whole schema
in its prompt. Removing a keyword only widens what the grammar accepts. Invariant: llguidance compiles ``enforceable``
schemas, except for those that no value satisfies, and for numbers and identifiers that it cannot represent. Clients
choose schemas, and this runs on the event loop: the work is linear in the schema's size, and superlinear parts
(comparing the options of ``oneOf``, compiling patterns) have a budget. Beyond it options count as overlapping, and
patterns as valid.
"""

from __future__ import annotations

import re
from itertools import combinations
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import unquote

import regex

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

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
_COUNTS: Final = frozenset(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"))
_NUMBERS: Final = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
_CONCERNS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("minLength", "maxLength", "pattern"), "string"),
    **dict.fromkeys(_NUMBERS, "number"),
    **dict.fromkeys(("items", "prefixItems", "minItems", "maxItems"), "array"),
    **dict.fromkeys(("properties", "patternProperties", "additionalProperties", "required"), "object"),
}
"""The type of value that a keyword is about; llguidance ignores it in schemas of other types."""
_EXCLUSIVE: Final = frozenset(("exclusiveMinimum", "exclusiveMaximum"))
"""Limits that are true or false in draft 4, which OpenAPI 3.0 took over."""
_DIALECTS: Final = re.compile(r"https?://json-schema\.org/(?:draft-0[4-7]|draft/(?:2019-09|2020-12))/schema#?")
# Rust's regular expressions have no look-around and no backreferences, llguidance's no word boundaries.
_IRREGULAR: Final = re.compile(r"\\\\|\\[1-9kbBZGc]|\(\?(?:<?[=!]|>)|\(\?P=")


_MAX_COMPARISONS: Final = 5_000
_MAX_COMPARED: Final = 16
"""Listed values, and required properties, of a schema that are compared with those of another."""
_MAX_PATTERN_CHARS: Final = 8_192
_MAX_DIGITS: Final = 10
"""Digits of an index in a reference."""
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
    if schema is None:
        return None, []
    reader = _SchemaReader(schema, coerce=not strict)
    return reader.read(schema, ()), reader.found


class _SchemaReader:
    """Reads one schema, and collects in ``found`` what cannot be enforced."""

    def __init__(self, root: Any, *, coerce: bool) -> None:
        self.found: list[Unenforced] = []
        self._root = root
        self._coerce = coerce
        self._budget = _Budget()
        self._anchors: frozenset[str] | None = None

    def read(self, schema: Any, path: tuple[str, ...]) -> Any:
        """Return the part of a schema that can be enforced."""
        if not isinstance(schema, dict):
            return schema if isinstance(schema, bool) else self._leave(path, "schema")
        kept: dict[str, Any] = {}
        for key, value in schema.items():
            if key in _SATISFIED and value in _SATISFIED[key]:
                continue
            if key == "$schema" and not (isinstance(value, str) and _DIALECTS.fullmatch(value)):
                continue  # a meta-schema demands nothing of a value
            if not self._supports(key, value, schema):
                self._leave(path, f"{key} {value}" if key == "format" and isinstance(value, str) else key)
                continue
            nests = key in _NESTING and isinstance(value, dict | list | bool)
            kept[key] = self._inner(key, value, (*path, key)) if nests else value
        options = kept.get("oneOf")
        if options is not None:
            if not all(_are_disjoint(one, other, self._budget) for one, other in combinations(options, 2)):
                self._leave(path, "oneOf")
            if self._coerce:
                del kept["oneOf"]
                _add_any_of(kept, options)
        return kept

    def _leave(self, path: tuple[str, ...], keyword: str) -> bool:
        """Add what cannot be enforced, and return the schema of any value."""
        self.found.append(Unenforced(".".join(path), keyword))
        return True

    def _inner(self, key: str, value: Any, path: tuple[str, ...]) -> Any:
        """Return the value of a keyword, whose schemas are enforceable."""
        if key in _NAMED_SCHEMAS and isinstance(value, dict):
            return {
                name: self.read(inner, (*path, name))
                for name, inner in value.items()
                if key != "patternProperties" or self._is_regular(name, path)
            }
        if key in _SCHEMAS and isinstance(value, list):
            return [self.read(inner, (*path, str(index))) for index, inner in enumerate(value)]
        return self.read(value, path) if key in _SCHEMA else value

    def _supports(self, key: str, value: Any, schema: Mapping[str, Any]) -> bool:
        """Return whether a grammar can enforce a keyword."""
        if isinstance(value, bool) and key in _EXCLUSIVE:
            return isinstance(self._root, dict) and "draft-04" in str(self._root.get("$schema"))
        is_well_formed = _WELL_FORMED.get(key)
        if is_well_formed is None:
            return key not in _UNIMPLEMENTED
        return (is_well_formed(value) and self._enforces(key, value, schema)) or not _concerns(key, schema)

    def _enforces(self, key: str, value: Any, schema: Mapping[str, Any]) -> bool:
        """Return whether a grammar can enforce a keyword with a well-formed value."""
        match key:
            case "format":
                supported = value in _FORMATS or not _may_be_text(schema)
            case "pattern":
                supported = _compiles(value, self._budget)
            case "minProperties" | "maxProperties":
                supported = _are_all_required(schema) or (key == "minProperties" and value == 0)
            case "$ref":
                supported = self._resolves(value)
            case _:
                supported = True
        return supported

    def _resolves(self, reference: str) -> bool:
        """Return whether a reference names a part of this schema that is kept."""
        fragment = unquote(reference.removeprefix("#"))
        if not reference.startswith("#") or not fragment:
            return reference == "#"
        if not fragment.startswith("/"):
            if self._anchors is None:
                self._anchors = _anchors(self._root)
            return fragment in self._anchors
        part, is_name = self._root, False
        for step in fragment[1:].split("/"):
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(part, dict):
                if not is_name and (name in _UNIMPLEMENTED or (name == "oneOf" and self._coerce)):
                    return False
                part, is_name = part.get(name), not is_name and name in _NAMED_SCHEMAS
            elif isinstance(part, list) and name.isascii() and name.isdigit() and len(name) < _MAX_DIGITS:
                part = part[int(name)] if int(name) < len(part) else None
            else:
                return False
        return isinstance(part, dict | bool)

    def _is_regular(self, pattern: str, path: tuple[str, ...]) -> bool:
        """Return whether a pattern of property names can be enforced; if not, it is added to ``found``."""
        if _compiles(pattern, self._budget):
            return True
        self._leave(path, pattern)
        return False


def _anchors(root: Any) -> frozenset[str]:
    """Return the names that parts of a schema have."""
    found, rest = set(), [root]
    while rest:
        part = rest.pop()
        if isinstance(part, dict):
            name = part.get("$anchor")
            if isinstance(name, str):
                found.add(name)
            rest += part.values()
        elif isinstance(part, list):
            rest += part
    return frozenset(found)


def _are_types(value: Any) -> bool:
    """Return whether the value of ``type`` names types, all of which exist."""
    kinds = [value] if isinstance(value, str) else value
    return isinstance(kinds, list) and bool(kinds) and all(isinstance(kind, str) and kind in _TYPES for kind in kinds)


def _concerns(key: str, schema: Mapping[str, Any]) -> bool:
    """Return whether a keyword is about values of the schema's types."""
    return key not in _CONCERNS or not _are_types(schema.get("type")) or _CONCERNS[key] in _kinds(schema)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_list(value: object) -> bool:
    return isinstance(value, list)


def _is_filled_list(value: object) -> bool:
    return isinstance(value, list) and bool(value)


def _is_list_of_texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _is_schema(value: object) -> bool:
    return isinstance(value, dict | bool)


def _is_schema_or_list(value: object) -> bool:
    return isinstance(value, dict | bool | list)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_divisor(value: object) -> bool:
    return _is_number(value) and value != 0


_WELL_FORMED: Final[Mapping[str, Callable[[Any], bool]]] = {
    "type": _are_types,
    "required": _is_list_of_texts,
    "items": _is_schema_or_list,
    "multipleOf": _is_divisor,
    **dict.fromkeys(("enum", "anyOf", "oneOf"), _is_filled_list),
    **dict.fromkeys(("allOf", "prefixItems"), _is_list),
    **dict.fromkeys(("properties", "patternProperties"), _is_object),
    **dict.fromkeys(("additionalItems", "additionalProperties"), _is_schema),
    **dict.fromkeys(_COUNTS, _is_count),
    **dict.fromkeys(_NUMBERS - {"multipleOf"}, _is_number),
    **dict.fromkeys(("pattern", "format", "$ref"), _is_text),
}
"""What the value of a keyword must be; an empty list of options would allow nothing."""


def _add_any_of(schema: dict[str, Any], options: list[Any]) -> None:
    if "anyOf" not in schema:
        schema["anyOf"] = options
    else:
        schema["allOf"] = [*schema.get("allOf", ()), {"anyOf": options}]


def _are_all_required(schema: Mapping[str, Any]) -> bool:
    required, properties = schema.get("required"), schema.get("properties")
    if not properties or not isinstance(properties, dict):
        return not properties
    return isinstance(required, list) and properties.keys() <= set(filter(_is_text, required))


def _may_be_text(schema: Mapping[str, Any]) -> bool:
    kinds = schema.get("type", "string")
    return kinds == "string" or (isinstance(kinds, list) and "string" in kinds)


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

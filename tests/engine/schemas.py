"""JSON Schemas for tests: one for each keyword that llguidance supports, and random ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random


@dataclass(frozen=True)
class Case:
    """A schema, with values that it accepts and others that it does not."""

    name: str
    schema: dict[str, Any] | bool
    valid: tuple[Any, ...]
    invalid: tuple[Any, ...] = ()


_PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}
_TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
            "required": ["v"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}

CASES = (
    Case("anything", {}, (None, True, 1, -2.5, "x", [], {}, {"a": [1, {"b": None}]})),
    Case("true", True, (1, "x")),
    Case("null", {"type": "null"}, (None,), (0, False, "null", [])),
    Case("boolean", {"type": "boolean"}, (True, False), (1, "true", None)),
    Case("integer", {"type": "integer"}, (0, -7, 12345), (1.5, "1", None)),
    Case("number", {"type": "number"}, (0, -7, 1.25, 1e20), ("1", None)),
    Case("string", {"type": "string"}, ("", "a b", "ü€😀", 'a"b\\c\n'), (1, None)),
    Case("types", {"type": ["string", "null"]}, ("x", None), (1, [])),
    Case("enum", {"enum": ["a", 1, None, [2]]}, ("a", 1, None, [2]), ("b", 2, [])),
    Case("const", {"const": {"a": 1}}, ({"a": 1},), ({"a": 2}, {}, 1)),
    Case("anyOf", {"anyOf": [{"type": "integer"}, {"const": "x"}]}, (3, "x"), ("y", None)),
    Case(
        "oneOf, where only one can match",
        {"oneOf": [{"type": "integer"}, {"type": "string"}]},
        (3, "x"),
        (None, 1.5),
    ),
    Case("allOf", {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, (3, 5), (2, 6, "4")),
    Case("minimum and maximum", {"type": "integer", "minimum": -2, "maximum": 11}, (-2, 0, 11), (-3, 12)),
    Case(
        "exclusive bounds",
        {"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 4},
        (2, 3),
        (1, 4),
    ),
    Case("bounds of numbers", {"type": "number", "minimum": 0, "maximum": 1}, (0, 0.5, 1), (-0.1, 1.5)),
    Case("multipleOf", {"type": "integer", "multipleOf": 3}, (0, 9, 27), (1, 10)),
    Case("lengths", {"type": "string", "minLength": 2, "maxLength": 3}, ("ab", "äöü"), ("a", "abcd")),
    Case("pattern", {"type": "string", "pattern": "^[a-c]{2}[0-9]?$"}, ("ab", "cc7"), ("ad", "abc", "ab12")),
    Case("date", {"type": "string", "format": "date"}, ("2026-02-28",), ("2026-2-28", "yesterday")),
    Case("date-time", {"type": "string", "format": "date-time"}, ("2026-02-28T10:11:12Z",), ("2026-02-28",)),
    Case(
        "uuid",
        {"type": "string", "format": "uuid"},
        ("123e4567-e89b-12d3-a456-426614174000",),
        ("123e4567",),
    ),
    Case("ipv4", {"type": "string", "format": "ipv4"}, ("127.0.0.1",), ("127.0.0", "256.1.1.1")),
    Case("items", {"type": "array", "items": {"type": "integer"}}, ([], [1], [1, 2, 3]), (["a"], [1, "a"], {})),
    Case(
        "numbers of items",
        {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
        ([True], [True, False]),
        ([], [True, True, True]),
    ),
    Case(
        "prefixItems",
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False, "minItems": 2},
        ([1, "a"],),
        ([1], ["a", 1], [1, "a", 2]),
    ),
    Case(
        "properties",
        _PERSON,
        ({"name": "Ada"}, {"name": "Ada", "age": 36}),
        ({}, {"age": 36}, {"name": 1}, {"name": "Ada", "age": -1}, {"name": "Ada", "x": 1}),
    ),
    Case(
        "additionalProperties",
        {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
        ({}, {"a": 1}, {"a": 1, "b": "x", "c": "y"}, {"b": "x"}),
        ({"a": "x"}, {"b": 1}),
    ),
    Case(
        "patternProperties",
        {"type": "object", "patternProperties": {"^n_": {"type": "integer"}}, "additionalProperties": False},
        ({}, {"n_a": 1, "n_b": 2}),
        ({"n_a": "x"}, {"m": 1}),
    ),
    Case(
        "numbers of properties",
        {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1, "maxProperties": 2},
        ({"a": 1}, {"a": 1, "b": 2}),
        ({}, {"a": 1, "b": 2, "c": 3}),
    ),
    Case(
        "a definition that names itself",
        _TREE,
        ({"v": 1}, {"v": 1, "next": {"v": 2, "next": {"v": 3}}}),
        ({}, {"v": 1, "next": {}}, {"v": 1, "next": 2}),
    ),
    Case(
        "names with every kind of character",
        {"type": "object", "properties": {'a"\\ü/\n': {"const": 1}}, "required": ['a"\\ü/\n']},
        ({'a"\\ü/\n': 1},),
        ({"a": 1},),
    ),
)

UNSUPPORTED = (
    {"type": "array", "uniqueItems": True},
    {"not": {"type": "string"}},
    {"if": {"type": "string"}, "then": {"minLength": 1}},
    {"type": "string", "format": "no-such-format"},
    {"type": "array", "contains": {"type": "integer"}},
    {"type": "object", "dependentRequired": {"a": ["b"]}},
    {"type": "object", "propertyNames": {"pattern": "^a"}},
    {"$ref": "https://example.invalid/schema.json"},
    {"oneOf": [{"type": "object"}, {"type": "object", "properties": {"a": {"type": "integer"}}}]},
)
"""Keywords that llguidance ignores: they must be refused, since they would have no effect otherwise."""


def random_schema(random: Random, *, depth: int = 3) -> dict[str, Any]:
    """Return a schema like those of applications: objects of a few fields, lists, choices."""
    kinds = ["string", "string", "integer", "number", "boolean", "enum", "null"]
    if depth:
        kinds += ["object", "object", "object", "array", "array", "anyOf"]
    kind = random.choice(kinds if depth < 3 else ["object", "array"])
    make: Callable[[Random], dict[str, Any]] | None = {
        "string": _random_string,
        "integer": _random_integer,
        "number": lambda random: {"type": "number", "minimum": 0, "maximum": random.randint(1, 100)},
        "enum": lambda random: {"enum": random.sample(["red", "green", 1, 2.5, None, True, [1], {"a": "b"}], 3)},
    }.get(kind)
    if make is not None:
        return make(random)
    if kind == "array":
        items = random_schema(random, depth=depth - 1)
        return {"type": "array", "items": items, "minItems": random.randint(0, 1), "maxItems": random.randint(1, 4)}
    if kind == "anyOf":
        return {"anyOf": [random_schema(random, depth=depth - 1) for _ in range(random.randint(1, 3))]}
    return _random_object(random, depth=depth) if kind == "object" else {"type": kind}


def _random_integer(random: Random) -> dict[str, Any]:
    low = random.randint(-50, 50)
    return {"type": "integer", "minimum": low, "maximum": low + random.randint(0, 1000)}


def _random_string(random: Random) -> dict[str, Any]:
    choices: tuple[dict[str, Any], ...] = (
        {"maxLength": random.randint(1, 24)},
        {"minLength": random.randint(0, 3), "maxLength": random.randint(3, 12)},
        {"pattern": random.choice(["^[A-Z][a-z]{2,8}$", "^(yes|no|maybe)$", "^[0-9]{3}-[0-9]{4}$"])},
        {"format": random.choice(["date", "time", "uuid", "ipv4"])},
    )
    return {"type": "string", **random.choice(choices)}


def _random_object(random: Random, *, depth: int) -> dict[str, Any]:
    names = random.sample(["name", "age", "ort", "größe", "tags", "is_ok", "id", 'quo"ted', "with space"], 4)
    properties = {name: random_schema(random, depth=depth - 1) for name in names[: random.randint(1, 4)]}
    return {
        "type": "object",
        "properties": properties,
        "required": random.sample(list(properties), random.randint(0, len(properties))),
        "additionalProperties": False,
    }

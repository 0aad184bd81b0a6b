"""Keywords of JSON Schema that a grammar cannot enforce are found by name, and the rest compiles."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from inferencecenter.sessions.output_parsing import schema_support
from inferencecenter.sessions.output_parsing.schema_support import enforceable

TEXT = {"type": "string"}
OBJECT = {"type": "object", "properties": {"a": TEXT}}
OTHER = {"type": "object", "properties": {"b": TEXT}}
TOKENIZER = LLTokenizer("byte")


def compiles(schema: Any) -> bool:
    """Return whether llguidance accepts a schema as it is."""
    grammar = "start: %json " + json.dumps(schema)
    return not LLMatcher(TOKENIZER, grammar, log_level=0).is_error()


def named(schema: Any) -> list[str]:
    """Return the keywords of a schema that cannot be enforced."""
    return [str(each) for each in enforceable(schema, strict=True)[1]]


def tagged(value: Any) -> dict[str, Any]:
    """Return an object whose kind is a constant."""
    return {"type": "object", "properties": {"kind": {"const": value}}, "required": ["kind"]}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({**OBJECT, "propertyNames": {"pattern": "^a"}}, ["propertyNames"]),
        ({"type": "array", "items": TEXT, "uniqueItems": True}, ["uniqueItems"]),
        ({**TEXT, "format": "uri-reference"}, ["format uri-reference"]),
        ({**TEXT, "format": "password"}, ["format password"]),
        ({"type": ["string", "null"], "format": "regex"}, ["format regex"]),
        ({"format": "binary"}, ["format binary"]),
        ({**TEXT, "not": {"const": "a"}}, ["not"]),
        ({**OBJECT, "if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": {}}, ["if", "then", "else"]),
        ({"type": "array", "contains": {"const": 1}}, ["contains"]),
        ({**OBJECT, "dependentRequired": {"a": ["b"]}}, ["dependentRequired"]),
        ({**OBJECT, "dependencies": {"a": ["b"]}}, ["dependencies"]),
        ({**OBJECT, "unevaluatedProperties": False}, ["unevaluatedProperties"]),
        ({**TEXT, "pattern": "^(?!x)a+$"}, ["pattern"]),
        ({**TEXT, "pattern": r"(?<=x)a"}, ["pattern"]),
        ({**TEXT, "pattern": r"(a)\1"}, ["pattern"]),
        ({**TEXT, "pattern": r"\ba\b"}, ["pattern"]),
        ({**TEXT, "pattern": "("}, ["pattern"]),
        ({"type": "object", "patternProperties": {"^(?!a)": TEXT}}, ["^(?!a) at patternProperties"]),
        ({**OBJECT, "minProperties": 1}, ["minProperties"]),
        ({**OBJECT, "maxProperties": 1}, ["maxProperties"]),
        ({"oneOf": [OBJECT, OTHER]}, ["oneOf"]),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, ["oneOf"]),
        ({"oneOf": [OBJECT], "anyOf": [OBJECT, {"oneOf": [OBJECT, OTHER]}]}, ["oneOf at anyOf.1"]),
        ({"type": "file"}, ["type"]),
        ({"$ref": "https://example.org/x.json"}, ["$ref"]),
        (
            {"type": "object", "properties": {"headers": {"type": "object", "propertyNames": TEXT | {"minLength": 1}}}},
            ["propertyNames at properties.headers"],
        ),
        ({"type": "array", "items": {"anyOf": [TEXT, {"not": TEXT}]}}, ["not at items.anyOf.1"]),
        ({"$ref": "#/$defs/gone"}, ["$ref"]),
        ({"$ref": "#gone"}, ["$ref"]),
        ({"$ref": "#/not", "not": TEXT}, ["$ref", "not"]),
        ({"properties": {"a": {"$ref": "#/required"}}, "required": ["a"]}, ["$ref at properties.a"]),
        ({**OBJECT, "required": True}, ["required"]),
        ({"properties": {"a": {"type": "integer", "minimum": True}}}, ["minimum at properties.a"]),
        ({"properties": {"a": {"type": "integer", "multipleOf": 0}}}, ["multipleOf at properties.a"]),
        ({"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]}, ["enum at properties.a"]),
        ({"type": "object", "properties": {"a": {"anyOf": []}}, "required": ["a"]}, ["anyOf at properties.a"]),
        ({"properties": {"a": "string"}}, ["schema at properties.a"]),
        (
            {"properties": {"a": {**TEXT, "minLength": "3", "pattern": 4, "format": 5}}},
            [
                "minLength at properties.a",
                "pattern at properties.a",
                "format at properties.a",
            ],
        ),
        ({"type": "array", "items": None}, ["items"]),
        ({"type": ["string", 5]}, ["type"]),
        ({"type": "object", "properties": [], "additionalProperties": 3}, ["properties", "additionalProperties"]),
    ],
)
def test_keyword_that_cannot_be_enforced_is_named_and_left_out(schema: dict[str, Any], expected: list[str]) -> None:
    """Llguidance refuses the schema, and takes what is left of it."""
    assert not compiles(schema)
    kept, left = enforceable(schema, strict=False)
    assert [str(each) for each in left] == expected
    assert compiles(kept)


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        OBJECT,
        {**TEXT, "format": "date-time", "minLength": 3},
        {"type": "integer", "format": "int32"},
        {**TEXT, "pattern": r"^[\w.-]+\/\\1$"},
        {**OBJECT, "required": ["a"], "minProperties": 1},
        {**OBJECT, "minProperties": 0},
        {"type": "object", "additionalProperties": TEXT, "minProperties": 1},
        {"oneOf": [TEXT, {"type": "integer"}]},
        {"oneOf": [tagged("a"), tagged("b")]},
        {"oneOf": [{"const": "a"}, {"const": "b"}]},
        {"properties": {"not": TEXT, "format": TEXT, "type": TEXT}},
        {"enum": [{"not": 1}], "default": {"if": 1}, "examples": [{"contains": 1}]},
        {"$defs": {"x": TEXT}, "properties": {"a": {"$ref": "#/$defs/x"}}},
        {"$defs": {"a b": TEXT, "c/d": TEXT}, "prefixItems": [{"$ref": "#/$defs/a%20b"}, {"$ref": "#/$defs/c~1d"}]},
        {"properties": {"if": TEXT, "a": {"$ref": "#/properties/if"}, "b": {"$ref": "#"}}},
        {"properties": {"a": {"$anchor": "here"}, "b": {"$ref": "#here"}}},
        {**TEXT, "required": True, "minimum": "1"},
        {"anyOf": [TEXT, {"type": "array", "items": {"$ref": "#/anyOf/0"}}]},
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "properties": {"a": {"type": "integer", "minimum": 1, "exclusiveMinimum": True}},
        },
    ],
)
def test_enforceable_schema_is_kept(schema: Any) -> None:
    """Nothing is named or removed, and llguidance accepts it."""
    assert compiles(schema)
    assert enforceable(schema, strict=True) == (schema, [])
    assert compiles(enforceable(schema, strict=False)[0])


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": False},
        {**OBJECT, "unevaluatedProperties": True},
        {**OBJECT, "propertyNames": {"type": "string"}},
        {**OBJECT, "$schema": "https://example.org/schema"},
    ],
)
def test_keyword_that_demands_nothing_is_dropped(schema: dict[str, Any]) -> None:
    """It is no reason for a warning or a refusal, though llguidance refuses it."""
    assert not compiles(schema)
    kept, left = enforceable(schema, strict=True)
    assert left == []
    assert compiles(kept)


def test_malformed_schema_raises_nothing() -> None:
    """What is wrong with it is left out."""
    schema: dict[str, Any] = {
        "type": [1, None],
        "required": "a",
        "properties": ["a"],
        "minProperties": 1,
        "oneOf": [{"required": [1], "properties": 3, "type": "object"}, 5, {"enum": 1, "type": {}}],
        "$ref": 4,
        "pattern": 3,
        "format": {},
        "uniqueItems": [],
        "items": 3,
        "patternProperties": [],
    }
    assert compiles(enforceable(schema, strict=False)[0])


def test_options_are_compared_within_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client chooses their number, and comparing them all takes the square of it; beyond the budget they overlap."""
    compared = 0

    def counting(schema: Any) -> list[Any] | None:
        nonlocal compared
        compared += 1
        return [schema["const"]]

    monkeypatch.setattr(schema_support, "_values", counting)
    options = [{"const": n} for n in range(50_000)]
    assert named({"oneOf": options, "properties": {"a": {"oneOf": options}}}) == [
        "oneOf at properties.a",
        "oneOf",
    ]
    assert compared <= 10_000


def test_long_lists_are_not_compared() -> None:
    """Values of long lists count as overlapping."""
    short, long = [{"enum": [0, 1]}, {"enum": [2, 3]}], [{"enum": [*range(9_000)]}, {"enum": [*range(9_000, 18_000)]}]
    assert named({"oneOf": short}) == []
    assert named({"oneOf": long}) == ["oneOf"]


def test_patterns_are_compiled_within_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond it, and with flags, the grammar's compiler judges them in its own process."""
    compiled = 0

    def counting(pattern: str) -> None:
        nonlocal compiled
        compiled += len(pattern)

    monkeypatch.setattr("regex.compile", counting)
    patterns = {f"p{n}": {**TEXT, "pattern": "a" * 100} for n in range(5_000)}
    assert named({"type": "object", "properties": patterns}) == []
    assert 8_000 < compiled <= 8_192
    assert named({**TEXT, "pattern": "(?i)a"}) == []
    assert named({**TEXT, "pattern": "(?=a)a"}) != []

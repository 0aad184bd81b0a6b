"""JSON Schema types in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_LIMITS: Final = (("Length", "characters"), ("Items", "entries"), ("Properties", "entries"))


def words(schema: Mapping[str, Any]) -> str:
    """Return what a value may be: its type and range; ``null`` is left to whoever says what absence means."""
    if "anyOf" in schema:
        return " or ".join(words(option) for option in schema["anyOf"] if option.get("type") != "null")
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "const" in schema or "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    return " ".join([_kind(schema), *_bounds(schema)])


def _kind(schema: Mapping[str, Any]) -> str:
    kind: str = schema.get("type", "any value")
    if schema.get("format") in ("path", "file-path"):
        return "path"
    if kind == "array":
        return f"list of {words(schema['items'])}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {words(schema['additionalProperties'])}"
    return kind


def _bounds(schema: Mapping[str, Any]) -> Iterator[str]:
    if "minimum" in schema:
        yield f"from {schema['minimum']:g}" if isinstance(schema["minimum"], float) else f"from {schema['minimum']}"
    if "exclusiveMinimum" in schema:
        yield f"above {schema['exclusiveMinimum']:g}"
    if "maximum" in schema:
        yield f"to {schema['maximum']:g}" if isinstance(schema["maximum"], float) else f"to {schema['maximum']}"
    for what, unit in _LIMITS:
        low, high = schema.get(f"min{what}", 0), schema.get(f"max{what}")
        if high is not None:
            yield f"({low} to {high} {unit})" if low else f"(at most {high} {unit})"
        elif low:
            yield f"(at least {low} {unit})"
    if "pattern" in schema:
        yield f"matching `{schema['pattern']}`"

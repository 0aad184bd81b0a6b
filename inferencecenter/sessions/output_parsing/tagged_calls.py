"""Calls with one tag per argument, as Qwen3-Coder writes them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

from inferencecenter.sessions.output_parsing.call_format import CallRules
from inferencecenter.sessions.output_parsing.char_stream import json_string
from inferencecenter.sessions.output_parsing.grammar_builder import (
    between_slashes,
    either,
    escaped,
    joined,
    optional,
    repeated,
    rule_name,
)
from inferencecenter.sessions.output_parsing.template_values import schema_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from inferencecenter.protocol.values import Tool
    from inferencecenter.sessions.output_parsing.char_stream import CharStream, Reading
    from inferencecenter.sessions.output_parsing.grammar_builder import GrammarBuilder
    from inferencecenter.sessions.output_parsing.parts import PartBuilder


_GROUPS: Final = ("$defs", "definitions")
_POINTER: Final = re.compile(r"#/(\$defs|definitions)/([^/]+)", re.DOTALL)

_DefinitionKey = tuple[str, str]


class SchemaDefinitions:
    """The definitions of a tool's schema.

    Each definition is searched for references once, however many parameters refer to it.

    Args:
        schema: The schema of the tool's arguments, within the limit of ``check_depth``.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._groups = {group: schema[group] for group in _GROUPS if isinstance(schema.get(group), dict)}
        self._refers: dict[_DefinitionKey, frozenset[_DefinitionKey] | None] = {}

    def resolve(self, part: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``part`` with the definitions that it refers to, transitively; its own take precedence.

        The run time is linear in the size of the result.
        """
        used: set[_DefinitionKey] = set()
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

    def _referred_by(self, place: _DefinitionKey) -> frozenset[_DefinitionKey] | None:
        if place not in self._refers:
            group, name = place
            self._refers[place] = self._references(self._groups[group][name])
        return self._refers[place]

    def _references(self, value: Any) -> frozenset[_DefinitionKey] | None:
        """Return the definitions that ``value`` refers to; ``None`` if a reference may mean any of them."""
        if not self._groups:
            return frozenset()
        found: set[_DefinitionKey] = set()
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


_OPENS: Final = "<tool_call>"
_CLOSES: Final = "</tool_call>"
_FUNCTION: Final = "<function="
_FUNCTION_ENDS: Final = "</function>"
_PARAMETER: Final = "<parameter="
_VALUE_ENDS: Final = "</parameter>"
_IN_VALUE: Final = re.compile(r"[^\n<]+")
_MAX_KEY_CHARS: Final = 256
_MAX_PATTERN_CHARS: Final = 8_192
_WHOLE: Final = re.compile(r"\^\(\?:(.+)\)\$", re.DOTALL)
_ANCHORS: Final = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|([$^])", re.DOTALL)


@dataclass(frozen=True, slots=True)
class TaggedCalls:
    """Calls as ``<tool_call> <function=name> <parameter=key> value </parameter> </function> </tool_call>``.

    A parameter whose schema has the type string is verbatim text; others are JSON, or text if they are not valid JSON.
    Of the schemas of strings only ``enum``, ``const`` and a ``pattern`` of the whole text, as that of a custom tool,
    constrain the answer; other strings are free text up to the closing tag.
    """

    trigger = _OPENS
    initial_trigger = ""
    text_prefix = ""
    markers = (_OPENS, _CLOSES)

    def read(
        self, stream: CharStream, builder: PartBuilder, *, tools: Mapping[str, Tool], trigger: str
    ) -> Reading[bool]:
        """Parse a call and emit its arguments as a JSON object."""
        yield from stream.read_blank()
        if not (yield from stream.accept(_FUNCTION)):
            return False
        name = yield from _read_up_to_bracket(stream)
        if name is None or name not in tools:
            return False
        stream.commit()
        builder.start_call(name)
        yield from _read_parameters(stream, builder.add_arguments, properties=_properties(tools[name]))
        yield from stream.read_blank()
        yield from stream.accept(_CLOSES)
        return True

    def rules(self, tools: Sequence[Tool], lark: GrammarBuilder) -> CallRules:
        lark.rule("open_text[lazy]", rf"/(.|\n)*\n{escaped(_VALUE_ENDS)}\n/")
        call = lark.rule("call", either(*(_call(index, tool, lark) for index, tool in enumerate(tools))))
        return CallRules(call, joined(lark.literal("\n", _OPENS), call))


def _call(index: int, tool: Tool, lark: GrammarBuilder) -> str:
    schema = schema_of(tool)
    properties = _properties(tool)
    required = _required(schema)
    definitions = SchemaDefinitions(schema)
    parameters = [
        _parameter(rule_name(f"argument_{index}_{place}", f"{tool.name}_{key}"), key, subschema, definitions, lark)
        for place, (key, subschema) in enumerate(properties.items())
    ]
    wanted = [
        parameter if key in required else optional(parameter)
        for key, parameter in zip(properties, parameters, strict=True)
    ]
    if not properties and schema.get("additionalProperties", True) is not False:
        wanted = [repeated(joined(lark.literal(_PARAMETER), r"/[^>\n]+/", lark.literal(">\n"), "open_text"))]
    head = lark.literal(f"\n{_FUNCTION}{tool.name}>\n")
    return joined(head, *wanted, lark.literal(f"{_FUNCTION_ENDS}\n", _CLOSES))


def _parameter(rule: str, key: str, subschema: Any, definitions: SchemaDefinitions, lark: GrammarBuilder) -> str:
    head = lark.literal(f"{_PARAMETER}{key}>\n")
    ends = f"\n{_VALUE_ENDS}\n"
    choices = _texts(subschema)
    if choices:
        return joined(head, either(*(lark.literal(choice + ends) for choice in choices)))
    if pattern := _whole_pattern(subschema):
        # One terminal, since a lexer that has begun the text does not return to a line feed in it.
        lark.rule(f"{rule}[lazy]", f"/(?:{between_slashes(pattern)}){escaped(ends)}/")
        return joined(head, rule)
    if _is_text(subschema):
        return joined(head, "open_text")
    if isinstance(subschema, dict):
        subschema = definitions.resolve(subschema)
    return joined(head, lark.schema(rule, subschema), lark.literal(ends))


def _required(schema: Mapping[str, Any]) -> frozenset[str]:
    required = schema.get("required")
    return frozenset(key for key in required if isinstance(key, str)) if isinstance(required, list) else frozenset()


def _properties(tool: Tool) -> Mapping[str, Any]:
    properties = schema_of(tool).get("properties")
    return properties if isinstance(properties, dict) else {}


def _is_text(subschema: Any) -> bool:
    return isinstance(subschema, dict) and subschema.get("type") == "string"


def _whole_pattern(subschema: Any) -> str:
    """Return the regular expression of a whole text, empty if there is none that stands between other expressions."""
    pattern = subschema.get("pattern") if _is_text(subschema) else None
    found = _WHOLE.fullmatch(pattern[:_MAX_PATTERN_CHARS]) if isinstance(pattern, str) else None
    if found is None or any(anchor[1] for anchor in _ANCHORS.finditer(found[1])):
        return ""
    try:
        re.compile(found[1])
    except (re.error, RecursionError, OverflowError):
        return ""
    return found[1]


def _texts(subschema: Any) -> list[str]:
    """Return the values that a schema of strings enumerates."""
    if not _is_text(subschema):
        return []
    choices = subschema.get("enum", [subschema["const"]] if "const" in subschema else [])
    return [choice for choice in choices if isinstance(choice, str)] if isinstance(choices, list) else []


def _read_parameters(
    stream: CharStream, emit: Callable[[str], None], *, properties: Mapping[str, Any]
) -> Reading[None]:
    """Parse parameters up to the end of the function and emit an object; a missing end leaves it open."""
    before = "{"
    while True:
        yield from stream.read_blank()
        if (yield from stream.accept(_FUNCTION_ENDS)):
            emit("{}" if before == "{" else "}")
            return
        key = (yield from _read_up_to_bracket(stream)) if (yield from stream.accept(_PARAMETER)) else None
        if key is None:
            return
        emit(f'{before}"{json_string(key)}": ')
        before = ", "
        yield from stream.accept("\n")
        if _is_text(properties.get(key)):
            emit('"')
            ended = yield from _read_value(stream, lambda text: emit(json_string(text)))
            emit('"' if ended else "")
        else:
            texts: list[str] = []
            ended = yield from _read_value(stream, texts.append)
            emit(_as_json("".join(texts)) if ended else "")
        if not ended:
            return


def _read_value(stream: CharStream, emit: Callable[[str], None]) -> Reading[bool]:
    """Read a value and the line feed after it; return whether it is terminated."""
    while True:
        emit(stream.match(_IN_VALUE))
        if (yield from stream.accept(f"\n{_VALUE_ENDS}", _VALUE_ENDS)):
            return True
        char = yield from stream.next()
        if not char:
            return False
        emit(char)


def _read_up_to_bracket(stream: CharStream) -> Reading[str | None]:
    text = ""
    while len(text) <= _MAX_KEY_CHARS:
        char = yield from stream.next()
        if char == ">":
            return text
        if not char:
            break
        text += char
    return None


def _as_json(text: str) -> str:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return text.strip()

"""Calls whose arguments stand in tags of their own, one for each, as Qwen3-Coder writes them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from inferencecenter.sessions.formats.definitions import Definitions
from inferencecenter.sessions.formats.json_text import quoted
from inferencecenter.sessions.formats.lark import either, escaped, joined, optional, repeated, rule_name
from inferencecenter.sessions.formats.style import CallRules
from inferencecenter.sessions.formats.values import schema_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from inferencecenter.protocol.values import Tool
    from inferencecenter.sessions.formats.lark import Lark
    from inferencecenter.sessions.formats.outlet import Outlet
    from inferencecenter.sessions.formats.tape import Reading, Tape

_OPENS: Final = "<tool_call>"
_CLOSES: Final = "</tool_call>"
_FUNCTION: Final = "<function="
_FUNCTION_ENDS: Final = "</function>"
_PARAMETER: Final = "<parameter="
_VALUE_ENDS: Final = "</parameter>"
_IN_VALUE: Final = re.compile(r"[^\n<]+")
_MAX_KEY_CHARS: Final = 256


@dataclass(frozen=True, slots=True)
class TaggedCalls:
    """Calls as ``<tool_call> <function=name> <parameter=key> value </parameter> </function> </tool_call>``.

    A parameter whose schema is of type string is text as it stands; others are JSON, or text where they are none.
    Of schemas of strings only ``enum`` and ``const`` hold an answer: the text stands open up to its end.
    """

    @property
    def trigger(self) -> str:
        """The outer tag."""
        return _OPENS

    @property
    def opening(self) -> str:
        """None but the outer tag."""
        return ""

    @property
    def address(self) -> str:
        """Nothing."""
        return ""

    @property
    def markers(self) -> tuple[str, ...]:
        """The outer tags."""
        return _OPENS, _CLOSES

    def read(self, tape: Tape, outlet: Outlet, *, tools: Mapping[str, Tool], trigger: str) -> Reading[bool]:
        """Read a call and tell its arguments as a JSON object."""
        yield from tape.blank()
        if not (yield from tape.found(_FUNCTION)):
            return False
        name = yield from _read_up_to_bracket(tape)
        if name is None or name not in tools:
            return False
        tape.settle()
        outlet.call(name)
        yield from _read_parameters(tape, outlet.argue, properties=_properties(tools[name]))
        yield from tape.blank()
        yield from tape.found(_CLOSES)
        return True

    def rules(self, tools: Sequence[Tool], lark: Lark) -> CallRules:
        """Add what calls of ``tools`` consist of."""
        lark.rule("open_text[lazy]", rf"/(.|\n)*\n{escaped(_VALUE_ENDS)}\n/")
        call = lark.rule("call", either(*(_call(index, tool, lark) for index, tool in enumerate(tools))))
        return CallRules(call, joined(lark.spelled("\n", _OPENS), call))


def _call(index: int, tool: Tool, lark: Lark) -> str:
    schema = schema_of(tool)
    properties = _properties(tool)
    required = _required(schema)
    definitions = Definitions(schema)
    parameters = [
        _parameter(rule_name(f"argument_{index}_{place}", f"{tool.name}_{key}"), key, subschema, definitions, lark)
        for place, (key, subschema) in enumerate(properties.items())
    ]
    wanted = [
        parameter if key in required else optional(parameter)
        for key, parameter in zip(properties, parameters, strict=True)
    ]
    if not properties and schema.get("additionalProperties", True) is not False:
        wanted = [repeated(joined(lark.spelled(_PARAMETER), r"/[^>\n]+/", lark.spelled(">\n"), "open_text"))]
    head = lark.spelled(f"\n{_FUNCTION}{tool.name}>\n")
    return joined(head, *wanted, lark.spelled(f"{_FUNCTION_ENDS}\n", _CLOSES))


def _parameter(rule: str, key: str, subschema: Any, definitions: Definitions, lark: Lark) -> str:
    head = lark.spelled(f"{_PARAMETER}{key}>\n")
    ends = f"\n{_VALUE_ENDS}\n"
    choices = _texts(subschema)
    if choices:
        return joined(head, either(*(lark.spelled(choice + ends) for choice in choices)))
    if _is_text(subschema):
        return joined(head, "open_text")
    if isinstance(subschema, dict):
        subschema = definitions.beside(subschema)
    return joined(head, lark.schema(rule, subschema), lark.spelled(ends))


def _required(schema: Mapping[str, Any]) -> frozenset[str]:
    required = schema.get("required")
    return frozenset(key for key in required if isinstance(key, str)) if isinstance(required, list) else frozenset()


def _properties(tool: Tool) -> Mapping[str, Any]:
    properties = schema_of(tool).get("properties")
    return properties if isinstance(properties, dict) else {}


def _is_text(subschema: Any) -> bool:
    return isinstance(subschema, dict) and subschema.get("type") == "string"


def _texts(subschema: Any) -> list[str]:
    """Return the texts that a schema of strings lets one choose from."""
    if not _is_text(subschema):
        return []
    choices = subschema.get("enum", [subschema["const"]] if "const" in subschema else [])
    return [choice for choice in choices if isinstance(choice, str)] if isinstance(choices, list) else []


def _read_parameters(tape: Tape, tell: Callable[[str], None], *, properties: Mapping[str, Any]) -> Reading[None]:
    """Read parameters up to the end of the function and tell them as an object; an end that never comes is not told."""
    before = "{"
    while True:
        yield from tape.blank()
        if (yield from tape.found(_FUNCTION_ENDS)):
            tell("{}" if before == "{" else "}")
            return
        key = (yield from _read_up_to_bracket(tape)) if (yield from tape.found(_PARAMETER)) else None
        if key is None:
            return
        tell(f'{before}"{quoted(key)}": ')
        before = ", "
        yield from tape.found("\n")
        if _is_text(properties.get(key)):
            tell('"')
            ended = yield from _read_value(tape, lambda text: tell(quoted(text)))
            tell('"' if ended else "")
        else:
            texts: list[str] = []
            ended = yield from _read_value(tape, texts.append)
            tell(_as_json("".join(texts)) if ended else "")
        if not ended:
            return


def _read_value(tape: Tape, tell: Callable[[str], None]) -> Reading[bool]:
    """Read a value and the line feed behind it; return whether it has come to its end."""
    while True:
        tell(tape.run(_IN_VALUE))
        if (yield from tape.found(f"\n{_VALUE_ENDS}", _VALUE_ENDS)):
            return True
        char = yield from tape.next()
        if not char:
            return False
        tell(char)


def _read_up_to_bracket(tape: Tape) -> Reading[str | None]:
    text = ""
    while len(text) <= _MAX_KEY_CHARS:
        char = yield from tape.next()
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

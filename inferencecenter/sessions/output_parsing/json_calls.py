"""Calls that are JSON objects with a name and arguments: Hermes and Qwen, Llama 3, Mistral."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from inferencecenter.sessions.output_parsing.call_format import CallRules
from inferencecenter.sessions.output_parsing.char_stream import read_arguments, read_key, read_value
from inferencecenter.sessions.output_parsing.grammar_builder import either, joined, rule_name
from inferencecenter.sessions.output_parsing.template_values import schema_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inferencecenter.protocol.values import Tool
    from inferencecenter.sessions.output_parsing.char_stream import CharStream, Reading
    from inferencecenter.sessions.output_parsing.grammar_builder import GrammarBuilder
    from inferencecenter.sessions.output_parsing.parts import PartBuilder

_ARGUMENT_KEYS: Final = ("arguments", "parameters")
_PYTHON_TAG: Final = "<|python_tag|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonCalls:
    """Calls between two texts, as ``<tool_call>`` and ``</tool_call>``.

    What begins with nothing is the whole answer, as Llama 3 has it, or what follows its ``<|python_tag|>``. In an
    ``array`` all calls of an answer stand between the two texts, in brackets.

    ``lead`` stands before an object or the array, ``trail`` behind it, and ``between`` between two calls. ``key`` is
    that of the arguments.
    """

    opens: str = ""
    closes: str = ""
    lead: str = ""
    trail: str = ""
    between: str = ""
    key: str = "arguments"
    array: bool = False

    @property
    def trigger(self) -> str:
        """The text that calls begin with."""
        return self.opens or _PYTHON_TAG

    @property
    def opening(self) -> str:
        """The brace of an object that is the whole answer."""
        return "" if self.opens else "{"

    @property
    def address(self) -> str:
        """Nothing."""
        return ""

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts around calls."""
        return (self.trigger, self.closes) if self.closes else (self.trigger,)

    def read(self, tape: CharStream, outlet: PartBuilder, *, tools: Mapping[str, Tool], trigger: str) -> Reading[bool]:
        """Read the calls behind a trigger."""
        if trigger == self.opening:
            called = yield from _read_members(tape, outlet, tools=tools)
        else:
            called = yield from self._read_behind_mark(tape, outlet, tools=tools)
        if called and self.closes:
            yield from tape.read_blank()
            yield from tape.accept(self.closes)
        elif called:
            yield from self._read_separator(tape)
        return called

    def _read_behind_mark(self, tape: CharStream, outlet: PartBuilder, *, tools: Mapping[str, Tool]) -> Reading[bool]:
        yield from tape.read_blank()
        if self.array and (yield from tape.accept("[")):
            return (yield from _read_array(tape, outlet, tools=tools))
        return (yield from _read_call(tape, outlet, tools=tools))

    def _read_separator(self, tape: CharStream) -> Reading[None]:
        separator = self.between.strip()
        if separator and not self.array:
            yield from tape.read_blank()
            yield from tape.accept(separator)

    def rules(self, tools: Sequence[Tool], lark: GrammarBuilder) -> CallRules:
        """Add what calls of ``tools`` consist of."""
        call = lark.rule("call", either(*(self._object(index, tool, lark) for index, tool in enumerate(tools))))
        if self.array:
            return CallRules(
                joined(lark.spelled(self.lead, "["), call),
                joined(lark.spelled(self.between), call),
                lark.spelled("]", self.trail, self.closes),
            )
        ends = lark.spelled(self.trail, self.closes)
        return CallRules(
            joined(lark.spelled(self.lead), call, ends),
            joined(lark.spelled(self.between, self.opens, self.lead), call, ends),
        )

    def _object(self, index: int, tool: Tool, lark: GrammarBuilder) -> str:
        arguments = lark.schema(rule_name(f"arguments_{index}", tool.name), schema_of(tool))
        head = f'{{"name": {json.dumps(tool.name)}, "{self.key}": '
        return joined(lark.spelled(head), arguments, lark.spelled("}"))


def _read_array(tape: CharStream, outlet: PartBuilder, *, tools: Mapping[str, Tool]) -> Reading[bool]:
    """Read calls up to the bracket that closes them, or as long as they are calls."""
    called = False
    while True:
        yield from tape.read_blank()
        if not (yield from _read_call(tape, outlet, tools=tools)):
            if called:
                tape.rollback()
            return called
        called = True
        yield from tape.read_blank()
        if not (yield from tape.accept(",")):
            yield from tape.accept("]")
            return True
        tape.mark()


def _read_call(tape: CharStream, outlet: PartBuilder, *, tools: Mapping[str, Tool]) -> Reading[bool]:
    if not (yield from tape.accept("{")):
        return False
    return (yield from _read_members(tape, outlet, tools=tools))


def _read_members(tape: CharStream, outlet: PartBuilder, *, tools: Mapping[str, Tool]) -> Reading[bool]:
    """Read an object that is a call: its name comes first, or behind other short texts."""
    name = None
    while True:
        key = yield from _read_member(tape)
        if key in _ARGUMENT_KEYS:
            break
        value = None if key is None else (yield from read_key(tape))
        if value is None:
            return False
        if key == "name":
            name = value
        yield from tape.read_blank()
        follows = yield from tape.accept(",", "}")
        if follows == "}" and name in tools:
            _begin(tape, outlet, name)
            outlet.add_arguments("{}")
            return True
        if not follows:
            return False
    if name not in tools:
        return False
    _begin(tape, outlet, name)
    yield from read_arguments(tape, outlet.add_arguments)
    yield from _read_remainder(tape)
    return True


def _begin(tape: CharStream, outlet: PartBuilder, name: str | None) -> None:
    assert name is not None
    tape.commit()
    outlet.start_call(name)


def _read_member(tape: CharStream) -> Reading[str | None]:
    """Read a key up to where its value begins."""
    yield from tape.read_blank()
    key = yield from read_key(tape)
    yield from tape.read_blank()
    if not (yield from tape.accept(":")):
        return None
    yield from tape.read_blank()
    return key


def _read_remainder(tape: CharStream) -> Reading[None]:
    """Read what else an object has behind its arguments."""
    while True:
        yield from tape.read_blank()
        follows = yield from tape.accept("}", ",")
        if follows != ",":
            return
        if (yield from _read_member(tape)) is None:
            return
        yield from read_value(tape, _ignore)


def _ignore(text: str) -> None:
    pass

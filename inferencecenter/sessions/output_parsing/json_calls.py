"""Calls with arguments in JSON.

``JsonCalls`` are objects with a name and arguments: Hermes, Qwen, Llama 3, Mistral. ``NamedCalls`` are a name followed
by arguments: Functionary, Llama's custom functions, newer Mistral.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
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
_OF_NAME: Final = re.compile(r"[A-Za-z0-9_.-]")
_MAX_NAME_CHARS: Final = 64
_CALL_ID: Final = "[CALL_ID]"
_ALL_RECIPIENTS: Final = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonCalls:
    """Calls between two delimiters, such as ``<tool_call>`` and ``</tool_call>``.

    Without an opening delimiter a call is the whole answer or follows ``<|python_tag|>``, as in Llama 3. With ``array``
    all calls of an answer are one JSON array between the delimiters.

    ``lead`` precedes an object or the array, ``trail`` follows it, and ``between`` separates calls. ``key`` is the
    member that holds the arguments.
    """

    opens: str = ""
    closes: str = ""
    lead: str = ""
    trail: str = ""
    between: str = ""
    key: str = "arguments"
    array: bool = False

    text_prefix = ""

    @property
    def trigger(self) -> str:
        return self.opens or _PYTHON_TAG

    @property
    def initial_trigger(self) -> str:
        """The brace of an object that is the whole answer."""
        return "" if self.opens else "{"

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.trigger, self.closes) if self.closes else (self.trigger,)

    def read(
        self, stream: CharStream, builder: PartBuilder, *, tools: Mapping[str, Tool], trigger: str
    ) -> Reading[bool]:
        if trigger == self.initial_trigger:
            called = yield from _read_members(stream, builder, tools=tools)
        else:
            called = yield from self._read_after_trigger(stream, builder, tools=tools)
        if called and self.closes:
            yield from _read_end(stream, self.closes)
        elif called:
            yield from self._read_separator(stream)
        return called

    def _read_after_trigger(
        self, stream: CharStream, builder: PartBuilder, *, tools: Mapping[str, Tool]
    ) -> Reading[bool]:
        yield from stream.read_blank()
        if self.array and (yield from stream.accept("[")):
            return (yield from _read_array(stream, builder, tools=tools))
        return (yield from _read_call(stream, builder, tools=tools))

    def _read_separator(self, stream: CharStream) -> Reading[None]:
        separator = self.between.strip()
        if separator and not self.array:
            yield from _read_end(stream, separator)

    def rules(self, tools: Sequence[Tool], lark: GrammarBuilder) -> CallRules:
        call = lark.rule("call", either(*(self._object(index, tool, lark) for index, tool in enumerate(tools))))
        if self.array:
            return CallRules(
                joined(lark.literal(self.lead, "["), call),
                joined(lark.literal(self.between), call),
                lark.literal("]", self.trail, self.closes),
            )
        ends = lark.literal(self.trail, self.closes)
        return CallRules(
            joined(lark.literal(self.lead), call, ends),
            joined(lark.literal(self.between, self.opens, self.lead), call, ends),
        )

    def _object(self, index: int, tool: Tool, lark: GrammarBuilder) -> str:
        arguments = _arguments(index, tool, lark)
        # The terminals of JSON, so that a form in place of a call may begin in the same way.
        head = ("{", '"name"', ": ", json.dumps(tool.name), ", ", json.dumps(self.key), ": ")
        return joined(*map(lark.literal, head), arguments, lark.literal("}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedCalls:
    """Calls such as ``<function=name>{…}</function>``: ``opens``, name, ``then``, arguments, ``closes``.

    With ``call_ids`` an id follows the name, as in newer Mistral models. With ``recipients`` every part of an answer is
    addressed, as in Functionary: text is addressed to ``all``.
    """

    opens: str
    then: str
    closes: str = ""
    between: str = ""
    call_ids: bool = False
    recipients: bool = False

    initial_trigger = ""

    @property
    def trigger(self) -> str:
        """The text before a name."""
        return self.opens

    @property
    def text_prefix(self) -> str:
        """The recipient ``all``, in formats with recipients."""
        return f"{_ALL_RECIPIENTS}{self.then}" if self.recipients else ""

    @property
    def markers(self) -> tuple[str, ...]:
        texts = (self.opens, _CALL_ID if self.call_ids else "", self.then, self.closes)
        return tuple(text for text in texts if text)

    def read(
        self, stream: CharStream, builder: PartBuilder, *, tools: Mapping[str, Tool], trigger: str
    ) -> Reading[bool]:
        """Parse a call, or the recipient of text."""
        name = yield from _read_name(stream)
        if self.call_ids and (yield from stream.accept(_CALL_ID)):
            yield from _read_name(stream)
        if not (yield from stream.accept(self.then)):
            return False
        if self.recipients and name == _ALL_RECIPIENTS:
            stream.commit()
            return True
        if name not in tools:
            return False
        stream.commit()
        builder.start_call(name)
        yield from stream.read_blank()
        yield from read_arguments(stream, builder.add_arguments)
        if self.closes:
            yield from _read_end(stream, self.closes)
        return True

    def rules(self, tools: Sequence[Tool], lark: GrammarBuilder) -> CallRules:
        """Add the rules for calls of ``tools``.

        Raises:
            InferenceCenterError: ``invalid_request`` for a tool named ``all`` in a format with recipients.
        """
        call = lark.rule("call", either(*(self._call(index, tool, lark) for index, tool in enumerate(tools))))
        return CallRules(call, joined(lark.literal(self.between, self.opens), call))

    def _call(self, index: int, tool: Tool, lark: GrammarBuilder) -> str:
        if self.recipients and tool.name == _ALL_RECIPIENTS:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST,
                f'a tool for this model cannot be named "{_ALL_RECIPIENTS}", by which it addresses the user',
                field="tools",
            )
        arguments = _arguments(index, tool, lark)
        if self.call_ids:
            head = joined(lark.literal(tool.name, _CALL_ID), "/[A-Za-z0-9]{9}/", lark.literal(self.then))
        else:
            head = lark.literal(tool.name, self.then)
        return joined(head, arguments, lark.literal(self.closes))


def _arguments(index: int, tool: Tool, lark: GrammarBuilder) -> str:
    return lark.schema(rule_name(f"arguments_{index}", tool.name), schema_of(tool))


def _read_end(stream: CharStream, end: str) -> Reading[None]:
    yield from stream.read_blank()
    yield from stream.accept(end)


def _read_array(stream: CharStream, builder: PartBuilder, *, tools: Mapping[str, Tool]) -> Reading[bool]:
    """Parse calls up to the closing bracket, or up to the first element that is no call."""
    called = False
    while True:
        yield from stream.read_blank()
        if not (yield from _read_call(stream, builder, tools=tools)):
            if called:
                stream.rollback()
            return called
        called = True
        yield from stream.read_blank()
        if not (yield from stream.accept(",")):
            yield from stream.accept("]")
            return True
        stream.mark()


def _read_call(stream: CharStream, builder: PartBuilder, *, tools: Mapping[str, Tool]) -> Reading[bool]:
    if not (yield from stream.accept("{")):
        return False
    return (yield from _read_members(stream, builder, tools=tools))


def _read_members(stream: CharStream, builder: PartBuilder, *, tools: Mapping[str, Tool]) -> Reading[bool]:
    """Parse the members of a call: the name comes first, or after other short texts."""
    name = None
    while True:
        key = yield from _read_member(stream)
        if key in _ARGUMENT_KEYS:
            break
        value = None if key is None else (yield from read_key(stream))
        if value is None:
            return False
        if key == "name":
            name = value
        yield from stream.read_blank()
        follows = yield from stream.accept(",", "}")
        if follows == "}" and name in tools:
            _begin(stream, builder, name)
            builder.add_arguments("{}")
            return True
        if not follows:
            return False
    if name not in tools:
        return False
    _begin(stream, builder, name)
    yield from read_arguments(stream, builder.add_arguments)
    yield from _read_remainder(stream)
    return True


def _begin(stream: CharStream, builder: PartBuilder, name: str | None) -> None:
    assert name is not None
    stream.commit()
    builder.start_call(name)


def _read_member(stream: CharStream) -> Reading[str | None]:
    """Read a key and its colon, up to the value."""
    yield from stream.read_blank()
    key = yield from read_key(stream)
    yield from stream.read_blank()
    if not (yield from stream.accept(":")):
        return None
    yield from stream.read_blank()
    return key


def _read_remainder(stream: CharStream) -> Reading[None]:
    """Skip the members after the arguments."""
    while True:
        yield from stream.read_blank()
        follows = yield from stream.accept("}", ",")
        if follows != ",":
            return
        if (yield from _read_member(stream)) is None:
            return
        yield from read_value(stream, _ignore)


def _ignore(text: str) -> None:
    pass


def _read_name(stream: CharStream) -> Reading[str]:
    name = ""
    while len(name) < _MAX_NAME_CHARS and (char := (yield from stream.next())):
        if not _OF_NAME.match(char):
            stream.push_back(char)
            break
        name += char
    return name

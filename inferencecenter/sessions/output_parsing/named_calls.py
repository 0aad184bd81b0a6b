"""Calls as a name followed by JSON arguments: Functionary, Llama's custom functions, newer Mistral."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.sessions.output_parsing.call_format import CallRules
from inferencecenter.sessions.output_parsing.char_stream import read_arguments
from inferencecenter.sessions.output_parsing.grammar_builder import either, joined, rule_name
from inferencecenter.sessions.output_parsing.template_values import schema_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inferencecenter.protocol.values import Tool
    from inferencecenter.sessions.output_parsing.char_stream import CharStream, Reading
    from inferencecenter.sessions.output_parsing.grammar_builder import GrammarBuilder
    from inferencecenter.sessions.output_parsing.parts import PartBuilder

_OF_NAME: Final = re.compile(r"[A-Za-z0-9_.-]")
_MAX_NAME_CHARS: Final = 64
_CALL_ID: Final = "[CALL_ID]"
_ALL_RECIPIENTS: Final = "all"


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
            yield from stream.read_blank()
            yield from stream.accept(self.closes)
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
        arguments = lark.schema(rule_name(f"arguments_{index}", tool.name), schema_of(tool))
        if self.call_ids:
            head = joined(lark.literal(tool.name, _CALL_ID), "/[A-Za-z0-9]{9}/", lark.literal(self.then))
        else:
            head = lark.literal(tool.name, self.then)
        return joined(head, arguments, lark.literal(self.closes))


def _read_name(stream: CharStream) -> Reading[str]:
    name = ""
    while len(name) < _MAX_NAME_CHARS and (char := (yield from stream.next())):
        if not _OF_NAME.match(char):
            stream.push_back(char)
            break
        name += char
    return name

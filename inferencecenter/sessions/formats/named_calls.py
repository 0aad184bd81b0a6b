"""Calls that are a name and then arguments as JSON: Functionary, Llama's custom functions, newer Mistral."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.sessions.formats.json_text import read_arguments
from inferencecenter.sessions.formats.lark import either, joined, rule_name
from inferencecenter.sessions.formats.style import CallRules
from inferencecenter.sessions.formats.values import schema_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inferencecenter.protocol.values import Tool
    from inferencecenter.sessions.formats.lark import Lark
    from inferencecenter.sessions.formats.outlet import Outlet
    from inferencecenter.sessions.formats.tape import Reading, Tape

_OF_NAME: Final = re.compile(r"[A-Za-z0-9_.-]")
_MAX_NAME_CHARS: Final = 64
_CALL_ID: Final = "[CALL_ID]"
_EVERYBODY: Final = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedCalls:
    """Calls as ``<function=name>{…}</function>``: ``opens``, the name, ``then``, the arguments and ``closes``.

    With ``call_ids`` an id stands behind the name, as newer models of Mistral write it. With ``recipients`` all that an
    answer says is addressed, as Functionary does it: what is for ``all`` is text.
    """

    opens: str
    then: str
    closes: str = ""
    between: str = ""
    call_ids: bool = False
    recipients: bool = False

    @property
    def trigger(self) -> str:
        """The text before a name."""
        return self.opens

    @property
    def opening(self) -> str:
        """None but the trigger."""
        return ""

    @property
    def address(self) -> str:
        """Everybody, where what is said is addressed."""
        return f"{_EVERYBODY}{self.then}" if self.recipients else ""

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts before a name and behind it."""
        texts = (self.opens, _CALL_ID if self.call_ids else "", self.then, self.closes)
        return tuple(text for text in texts if text)

    def read(self, tape: Tape, outlet: Outlet, *, tools: Mapping[str, Tool], trigger: str) -> Reading[bool]:
        """Read a call, or who the text is for."""
        name = yield from _read_name(tape)
        if self.call_ids and (yield from tape.found(_CALL_ID)):
            yield from _read_name(tape)
        if not (yield from tape.found(self.then)):
            return False
        if self.recipients and name == _EVERYBODY:
            tape.settle()
            return True
        if name not in tools:
            return False
        tape.settle()
        outlet.call(name)
        yield from tape.blank()
        yield from read_arguments(tape, outlet.argue)
        if self.closes:
            yield from tape.blank()
            yield from tape.found(self.closes)
        return True

    def rules(self, tools: Sequence[Tool], lark: Lark) -> CallRules:
        """Add what calls of ``tools`` consist of.

        Raises:
            InferenceCenterError: ``invalid_request`` for a tool whose name is that of everybody.
        """
        call = lark.rule("call", either(*(self._call(index, tool, lark) for index, tool in enumerate(tools))))
        return CallRules(call, joined(lark.spelled(self.between, self.opens), call))

    def _call(self, index: int, tool: Tool, lark: Lark) -> str:
        if self.recipients and tool.name == _EVERYBODY:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST,
                f'a tool for this model cannot be named "{_EVERYBODY}", by which it addresses the user',
                field="tools",
            )
        arguments = lark.schema(rule_name(f"arguments_{index}", tool.name), schema_of(tool))
        if self.call_ids:
            head = joined(lark.spelled(tool.name, _CALL_ID), "/[A-Za-z0-9]{9}/", lark.spelled(self.then))
        else:
            head = lark.spelled(tool.name, self.then)
        return joined(head, arguments, lark.spelled(self.closes))


def _read_name(tape: Tape) -> Reading[str]:
    name = ""
    while len(name) < _MAX_NAME_CHARS and (char := (yield from tape.next())):
        if not _OF_NAME.match(char):
            tape.back(char)
            break
        name += char
    return name

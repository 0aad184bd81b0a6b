"""How one turn's answer is written and read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import orjson

from inferencecenter.ipc.messages import Grammar
from inferencecenter.sessions.formats.plain import PlainReader

if TYPE_CHECKING:
    from inferencecenter.protocol.requests import Infer
    from inferencecenter.sessions.formats.parts import Reader
    from inferencecenter.sessions.formats.written import Written


@dataclass(frozen=True, slots=True)
class Speech:
    """What the engine holds an answer to, and how it is read.

    The ``markers`` are control tokens whose text must be shown. A ``plain`` answer is text and nothing else: a reader
    would return it as it is.
    """

    grammar: Grammar | None = None
    markers: tuple[str, ...] = ()
    plain: bool = True

    def reader(self) -> Reader:
        """Return a new reader of the answer."""
        return PlainReader()


def speech_of(request: Infer, *, written: Written, asked: str) -> Speech:
    """Return how the answer to ``request`` is written and read.

    Args:
        request: What is asked for.
        written: How the model writes.
        asked: The text that the model was given; its end says whether the model thinks already.
    """
    return Speech(_form(request))


def _form(request: Infer) -> Grammar | None:
    if request.json_schema is not None:
        return Grammar("json_schema", orjson.dumps(request.json_schema).decode())
    if request.regex is not None:
        return Grammar("regex", request.regex)
    if request.grammar is not None:
        return Grammar("gbnf" if "::=" in request.grammar else "lark", request.grammar)
    return None

"""How one turn's answer is written and read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.values import NamedTool
from inferencecenter.sessions.formats.grammar import Start, calls_grammar, form_grammar, silent_grammar
from inferencecenter.sessions.formats.plain import PlainReader
from inferencecenter.sessions.formats.reader import SpeechReader

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inferencecenter.ipc.messages import Grammar
    from inferencecenter.protocol.requests import Infer
    from inferencecenter.protocol.values import Tool
    from inferencecenter.sessions.formats.parts import Reader
    from inferencecenter.sessions.formats.style import Style
    from inferencecenter.sessions.formats.written import Thinking, Written


@dataclass(frozen=True, slots=True, kw_only=True)
class Speech:
    """What the engine holds an answer to, and how it is read.

    The ``markers`` are control tokens whose text must be shown. ``begun`` is what the prompt has of the answer already;
    without ``thinking`` and ``style`` the answer is text and nothing else.
    """

    grammar: Grammar | None = None
    markers: tuple[str, ...] = ()
    begun: str = ""
    thinking: Thinking | None = None
    style: Style | None = None
    tools: Mapping[str, Tool] = field(default_factory=dict)

    @property
    def plain(self) -> bool:
        """Whether a reader would return every text as what is said."""
        return self.thinking is None and self.style is None

    def reader(self) -> Reader:
        """Return a new reader of the answer."""
        if self.plain:
            return PlainReader()
        return SpeechReader(self.begun, thinking=self.thinking, style=self.style, tools=self.tools)


def speech_of(request: Infer, *, written: Written, asked: str) -> Speech:
    """Return how the answer to ``request`` is written and read.

    Args:
        request: What is asked for.
        written: How the model writes.
        asked: The text that the model was given; its end says whether the model thinks already.

    Raises:
        InferenceCenterError: ``invalid_request`` for tools that the model has no way to ask for, and see
            ``form_grammar`` and ``calls_grammar``.
    """
    style = written.style
    if request.tools and style is None:
        raise InferenceCenterError(ErrorCode.INVALID_REQUEST, "this session's model knows no tools", field="tools")
    begun = style.trigger if style is not None and style.address and asked.endswith(style.trigger) else ""
    thinks = _thinks(request, written, asked=asked)
    start = Start(
        control=written.control,
        thinking=None if thinks == "not" else written.thinking,
        opened=thinks == "already",
        begun=bool(begun),
        address=style.address if style is not None and begun else "",
    )
    opened = written.thinking.opens if written.thinking is not None and start.opened else ""
    calls = bool(request.tools) and request.tool_choice != "none"
    read_style = style if calls or start.address else None
    marks = (written.thinking.opens, written.thinking.closes) if written.thinking is not None else ()
    return Speech(
        grammar=form_grammar(request, start) or _calls(request, written, start),
        markers=tuple(
            mark for mark in (*marks, *(read_style.markers if read_style else ())) if mark in written.control
        ),
        begun=begun or opened,
        thinking=written.thinking,
        style=read_style,
        tools={tool.name: tool for tool in request.tools or ()} if calls else {},
    )


def _calls(request: Infer, written: Written, start: Start) -> Grammar | None:
    style, tools, choice = written.style, request.tools, request.tool_choice
    if style is None or not tools:
        return None
    if choice == "none":
        return silent_grammar(style, start=start)
    named = isinstance(choice, NamedTool)
    return calls_grammar(
        style,
        [tool for tool in tools if tool.name == choice.name] if isinstance(choice, NamedTool) else tools,
        start=start,
        demands=named or choice == "required",
        several=request.parallel_tool_calls and written.several and not named,
    )


def _thinks(request: Infer, written: Written, *, asked: str) -> Literal["already", "perhaps", "not"]:
    """Tell whether the model thinks, by the end of the prompt."""
    thinking = written.thinking
    if thinking is None or request.thinking is False:
        return "not"
    if asked.rstrip().endswith(thinking.opens):
        return "already"
    return "not" if asked.rstrip().endswith(thinking.closes) else "perhaps"

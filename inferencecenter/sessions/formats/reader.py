"""Reading an answer while it comes: what the model thinks, what it says, and the tools that it asks for."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from inferencecenter.sessions.formats.outlet import Outlet
from inferencecenter.sessions.formats.tape import Tape

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from inferencecenter.protocol.values import Tool
    from inferencecenter.sessions.formats.parts import Part
    from inferencecenter.sessions.formats.style import Style
    from inferencecenter.sessions.formats.tape import Reading
    from inferencecenter.sessions.formats.written import Thinking

_WHATEVER: Final = re.compile(r".+", re.DOTALL)


class SpeechReader:
    """Reads one answer.

    White space around calls and around thoughts is neither's, nor is it said. What begins like a call but names no tool
    that was offered is said; once a call is told, whatever stands where its arguments should are its arguments.

    Args:
        begun: What the prompt has of the answer already, as the mark at which the model begins to think.
        thinking: What is around thoughts, if the model has any.
        style: How it writes calls; without it there are none.
        tools: What was offered, by name.
    """

    def __init__(
        self, begun: str, *, thinking: Thinking | None, style: Style | None, tools: Mapping[str, Tool]
    ) -> None:
        self._tape = Tape()
        self._outlet = Outlet()
        self._reading = _read_answer(self._tape, self._outlet, thinking=thinking, style=style, tools=tools)
        self.feed(begun)

    @property
    def behind_thoughts(self) -> int | None:
        """Characters that stood behind the end of the thoughts in the piece that had it; ``None`` before that."""
        return self._outlet.behind_thoughts

    def feed(self, text: str) -> tuple[Part, ...]:
        """Take more of the answer and return what is certain by now."""
        self._tape.extend(text)
        next(self._reading, None)
        return self._outlet.take()

    def finish(self) -> tuple[Part, ...]:
        """Return what was held back, now that no more will come."""
        self._tape.ended = True
        return self.feed("")


def _read_answer(
    tape: Tape, outlet: Outlet, *, thinking: Thinking | None, style: Style | None, tools: Mapping[str, Tool]
) -> Reading[None]:
    thought = thinking is not None and (yield from _read_thoughts(tape, outlet, thinking))
    outlet.behind_thoughts = tape.n_unread
    if style is None:
        if thought:
            yield from tape.blank()
        yield from _read_rest(tape, outlet)
    else:
        yield from _read_speech(tape, outlet, style=style, tools=tools, fresh=thought)


def _read_rest(tape: Tape, outlet: Outlet) -> Reading[None]:
    while char := (yield from tape.next()):
        outlet.say(char)
        outlet.say(tape.run(_WHATEVER))


def _read_thoughts(tape: Tape, outlet: Outlet, thinking: Thinking) -> Reading[bool]:
    """Read what the model thinks, if it begins with that."""
    blank = yield from tape.blank()
    if not (yield from tape.found(thinking.opens)):
        tape.back(blank)
        return False
    yield from tape.blank()
    yield from _read_until(tape, outlet.think, thinking.closes)
    return True


def _read_speech(tape: Tape, outlet: Outlet, *, style: Style, tools: Mapping[str, Tool], fresh: bool) -> Reading[None]:
    """Read text and calls.

    It is ``fresh`` where only thoughts and calls have been, behind which white space says nothing.
    """
    first = True
    while True:
        blank = yield from tape.blank()
        opening = (fresh or first) and style.opening
        trigger = (yield from tape.found(style.trigger, opening)) if opening else ""
        if not trigger:
            tape.back("" if fresh else blank)
            blank, trigger = yield from _read_until(tape, outlet.say, style.trigger)
        if not trigger:
            outlet.say(blank)
            return
        tape.try_on()
        fresh = yield from style.read(tape, outlet, tools=tools, trigger=trigger)
        if not fresh:
            tape.give_up()
            outlet.say(blank + trigger)
        first = False


def _read_until(tape: Tape, tell: Callable[[str], None], end: str) -> Reading[tuple[str, str]]:
    """Tell text up to ``end``; return the white space before it, which is not told, and ``end`` itself if it came."""
    # Words and the white space before them; possessive, so that nothing is looked at twice.
    ordinary = re.compile(rf"(?:\s*+[^\s{re.escape(end[0])}]++)++")
    while True:
        tell(tape.run(ordinary))
        blank = yield from tape.blank()
        if (yield from tape.found(end)):
            return blank, end
        char = yield from tape.next()
        if not char:
            return blank, ""
        tell(blank + char)

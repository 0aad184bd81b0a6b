"""How a turn looks: on a terminal with a spinner and figures, in a pipe as the answer's text and nothing else."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final, Protocol

from rich.text import Text

from inferencecenter.protocol.events import ContextShifted, End, Progress, Queued, Token

if TYPE_CHECKING:
    from rich.console import Console

    from inferencecenter.client import TurnStreamEvent

# A model may write anything; escape sequences would move the cursor or rename the window.
_CONTROLS: Final = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])


class TurnView(Protocol):
    """Shows one turn after the other."""

    def begin(self) -> None:
        """Get ready for an answer."""

    def show(self, event: TurnStreamEvent) -> None:
        """Show one event of it."""

    def finish(self) -> None:
        """Leave the screen ready for the next line, also after a failure."""


class PlainView:
    """The answer's text, as it comes, and a line's end."""

    def begin(self) -> None:
        """Nothing to prepare."""

    def show(self, event: TurnStreamEvent) -> None:
        """Write the text of a token."""
        if isinstance(event, Token):
            sys.stdout.write(event.content)
            sys.stdout.flush()

    def finish(self) -> None:
        """End the line."""
        sys.stdout.write("\n")
        sys.stdout.flush()


class TerminalView:
    """Says what the turn waits for until its first token; ends with its figures."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status("waiting", spinner_style="dim")

    def begin(self) -> None:
        """Show that something happens."""
        self._status.update("waiting")
        self._status.start()

    def show(self, event: TurnStreamEvent) -> None:
        """Show waiting, reading, text or the end."""
        match event:
            case Queued(position=position) if position:
                self._status.update(f"number {position} in the queue")
            case Progress(done=done, total=total):
                self._status.update(f"reading {done} of {total} tokens")
            case ContextShifted():
                self._status.stop()
                self._console.print(Text(f"\n{describe_shift(event)}", style="dim"), soft_wrap=True)
                self._status.update("reading what is left")
                self._status.start()
            case Token(content=content):
                self._status.stop()
                self._console.print(Text(content.translate(_CONTROLS)), end="", soft_wrap=True)
            case End():
                self._status.stop()
                self._console.print(Text(f"\n{describe(event)}", style="dim"), end="", soft_wrap=True)

    def finish(self) -> None:
        """Stop the spinner and end the line."""
        self._status.stop()
        self._console.print()


def describe_shift(shift: ContextShifted) -> str:
    """Return in one line what is no longer read."""
    turns = "the oldest turn is" if shift.dropped_turns == 1 else f"the oldest {shift.dropped_turns} turns are"
    return f"the context was full: {turns} no longer read"


def describe(end: End) -> str:
    """Return the figures of a finished turn in one line."""
    stats = end.stats
    figures = f"{stats.tokens} tokens, {stats.tps:.1f} a second, the first after {stats.ttft_ms:.0f} ms"
    reason = "" if end.finish_reason == "stop" else f", ended by {end.finish_reason}"
    return "".join([figures, reason, *(f"\nwarning: {warning}" for warning in end.warnings)])

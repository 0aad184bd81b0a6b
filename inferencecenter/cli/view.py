"""Display of a turn: on a terminal with a spinner and statistics, in a pipe the answer's text only."""

from __future__ import annotations

import sys
from datetime import datetime
from typing import TYPE_CHECKING, Final, Protocol

from rich.cells import cell_len
from rich.control import Control
from rich.segment import ControlType
from rich.table import Table
from rich.text import Text

from inferencecenter.cli.output import stderr
from inferencecenter.client import Reconnecting
from inferencecenter.protocol.events import (
    ContextShifted,
    End,
    EngineChanged,
    GoingAway,
    ModelChanged,
    Progress,
    Queued,
    Reasoning,
    StorageChanged,
    Thermal,
    Token,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from inferencecenter.client import Notice, TurnStreamEvent
    from inferencecenter.protocol.events import SessionResumed
    from inferencecenter.protocol.values import SessionSummary

# A model may generate anything, including escape sequences for the terminal.
_CONTROLS: Final = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])
_TAB_COLUMNS: Final = 8
_ENGINE_WORDS: Final = {
    "starting": "the engine is starting…",
    "restarting": "the engine was lost and is restarting…",
    "asleep": "the engine is asleep until the next prompt",
    "failed": "the engine has failed",
}


class TurnView(Protocol):
    """Shows one turn after the other."""

    def begin(self) -> None:
        """Prepare for an answer."""

    def loading(self, model: str | None) -> None:
        """Show that the answer waits for its model to load; ``model`` is its name if known."""

    def show(self, event: TurnStreamEvent) -> None: ...

    def notice(self, notice: Notice) -> None:
        """Show a change of the connection or the engine, separate from the answer."""

    def finish(self) -> None:
        """End the output line, also after a failure."""


class PlainView:
    """The answer's text, as it arrives, and a line break."""

    def begin(self) -> None:
        """Nothing to prepare."""

    def loading(self, model: str | None) -> None:
        """Show nothing: the answer is only delayed."""

    def show(self, event: TurnStreamEvent) -> None:
        """Write the text of a token."""
        if isinstance(event, Token):
            sys.stdout.write(event.content)
            sys.stdout.flush()

    def notice(self, notice: Notice) -> None:
        """Report a lost connection once on standard error."""
        if isinstance(notice, Reconnecting) and notice.attempt == 1:
            stderr.print(describe_notice(notice), markup=False)

    def finish(self) -> None:
        """End the line."""
        sys.stdout.write("\n")
        sys.stdout.flush()


class TerminalView:
    """Shows what a turn waits for until its first token, then its text, then its statistics.

    Connection changes are shown in a dim line below the answer, which disappears when the answer continues. Other
    notifications get a dim line before or after the answer; only the latest of each kind is shown.

    Args:
        console: The terminal.
        model: The chosen model, if any; notifications about other models' engines are not shown.
    """

    def __init__(self, console: Console, *, model: str | None = None) -> None:
        self._console = console
        self._model = model
        self._pending_changes: dict[type[ModelChanged | Thermal], str] = {}
        self._status = console.status("waiting", spinner_style="dim")
        self._shows_turn = False
        self._thinks = False
        self._column: int | None = None
        self._notice = ""
        self._is_drawn = False

    def begin(self) -> None:
        """Start the spinner."""
        self._shows_turn, self._thinks = True, False
        self._print_changes()
        self._wait("waiting")
        self._status.start()

    def loading(self, model: str | None) -> None:
        """Show what the turn waits for."""
        self._wait(f"loading {model or 'the model'}…")

    def show(self, event: TurnStreamEvent) -> None:
        """Show queue position, prefill progress, text or the end."""
        match event:
            case Queued(position=position):
                self._wait(f"number {position} in the queue" if position else "waiting")
            case Progress(done=done, total=total):
                self._wait(f"reading {done} of {total} tokens")
            case ContextShifted():
                self._write()
                self._console.print(Text(f"\n{describe_shift(event)}", style="dim"), soft_wrap=True)
                self._column = None
                self._wait("reading the remaining tokens")
                self._status.start()
            case Token(content=content):
                if self._thinks:
                    self._write("\n")
                self._thinks = False
                self._write(content.translate(_CONTROLS).expandtabs(_TAB_COLUMNS))
                # Text sent before the notification may arrive after it.
                self._draw_notice()
            case Reasoning(content=content):
                self._thinks = True
                self._write(content.translate(_CONTROLS).expandtabs(_TAB_COLUMNS), style="dim")
                self._draw_notice()
            case End():
                self._write()
                self._console.print(Text(f"\n{describe(event)}", style="dim"), end="", soft_wrap=True)

    def notice(self, notice: Notice) -> None:
        """Show what the turn waits for while it waits; ignored at the prompt."""
        if isinstance(notice, EngineChanged) and notice.model not in (None, self._model):
            return
        if isinstance(notice, ModelChanged | Thermal):
            self._queue_change(notice)
            return
        self._remove_notice()
        self._notice = describe_notice(notice)
        if self._shows_turn:
            self._wait("waiting")
        self._draw_notice()

    def finish(self) -> None:
        """Stop the spinner and end the line."""
        self._remove_notice()
        self._status.stop()
        self._shows_turn, self._column = False, None
        self._console.print()
        self._print_changes()

    def _queue_change(self, change: ModelChanged | Thermal) -> None:
        """Show a notification at once if neither the model nor the user is writing."""
        if isinstance(change, ModelChanged) and self._model is not None:
            return
        self._pending_changes[type(change)] = describe_change(change)
        if self._shows_turn and self._column is None:
            self._print_changes()

    def _print_changes(self) -> None:
        changes, self._pending_changes = self._pending_changes, {}
        for line in changes.values():
            self._console.print(Text(line.translate(_CONTROLS), style="dim"), soft_wrap=True)

    def _wait(self, why: str) -> None:
        """Show what the first token waits for, unless a notice takes precedence."""
        if self._column is None:
            self._status.update(self._notice or why)

    def _write(self, text: str = "", *, style: str = "") -> None:
        """Write text of the answer, replacing a spinner or a notice."""
        self._status.stop()
        self._remove_notice()
        self._console.print(Text(text, style=style), end="", soft_wrap=True)
        self._column = column_after(self._column or 0, text, width=self._console.width)

    def _draw_notice(self) -> None:
        """Draw the notice below the answer, so that the answer's line is unaffected by scrolling."""
        if not self._notice or self._column is None:
            return
        if self._column == self._console.width:
            self._console.print()
            self._column = 0
        line = Text(self._notice, style="dim", no_wrap=True, overflow="crop")
        line.truncate(self._console.width - 1)
        self._console.print()
        self._console.print(line, end="")
        self._is_drawn = True

    def _remove_notice(self) -> None:
        if not self._is_drawn:
            return
        self._is_drawn = False
        self._console.control(
            Control(
                ControlType.CARRIAGE_RETURN,
                (ControlType.ERASE_IN_LINE, 2),
                (ControlType.CURSOR_UP, 1),
                (ControlType.CURSOR_MOVE_TO_COLUMN, self._column or 0),
            )
        )


def column_after(column: int, text: str, *, width: int) -> int:
    """Return the cursor's column after writing ``text`` from ``column`` on.

    Columns count from 0; ``width`` stands for a full line that the terminal has not wrapped yet.
    """
    _before, newline, last = text.rpartition("\n")
    column = cell_len(last) + (0 if newline else column)
    return (column - 1) % width + 1 if column else 0


def describe_notice(notice: Notice) -> str:
    """Return the notice as one line; empty when the problem is resolved."""
    match notice:
        case Reconnecting(attempt=1):
            return "connection lost, reconnecting…"
        case Reconnecting(attempt=attempt):
            return f"connection lost, reconnecting… (attempt {attempt})"
        case EngineChanged(state=state):
            return _ENGINE_WORDS.get(state, "")
        case StorageChanged(state="unavailable"):
            return "the daemon cannot store the answer and withholds it…"
        case GoingAway():
            return "the daemon is about to restart…"
    return ""


def describe_change(change: ModelChanged | Thermal) -> str:
    """Return the change as one line."""
    if isinstance(change, ModelChanged):
        return f"{change.model} is the model from now on, with a context of {change.n_ctx} tokens"
    temperature = "" if change.temp is None else f" at {change.temp:.0f} °C"
    return f"the GPU is {change.state}{temperature}: {change.action}"


def sessions_table(sessions: Sequence[SessionSummary], *, current: str | None) -> Table:
    """Return sessions as a table, numbered from 1; the current one is marked."""
    table = Table(box=None, pad_edge=False)
    for heading in ("", "session", "last used", "messages"):
        table.add_column(heading, no_wrap=True)
    table.add_column("begins with", overflow="ellipsis", no_wrap=True)
    for number, session in enumerate(sessions, start=1):
        used = datetime.fromtimestamp(session.last_used_at).astimezone()
        mark = "*" if session.session_id == current else " "
        title = Text(session.metadata.get("title", "").translate(_CONTROLS))
        table.add_row(f"{number}{mark}", session.session_id, f"{used:%Y-%m-%d %H:%M}", str(session.messages), title)
    return table


def describe_past(resumed: SessionResumed) -> Text:
    """Return the end of a resumed conversation: the last prompt, and its answer if complete."""
    messages = resumed.transcript or ()
    last_question = max((index for index, message in enumerate(messages) if message.role == "user"), default=None)
    if last_question is None:
        return Text("no messages yet", style="dim")
    earlier = sum(message.role == "user" for message in messages[:last_question])
    lines = [f"{earlier} earlier questions" if earlier != 1 else "1 earlier question"] if earlier else []
    lines.append(f"> {messages[last_question].content}")
    lines += [message.content for message in messages[last_question + 1 :]]
    return Text("\n".join(lines).translate(_CONTROLS), style="dim")


def describe_shift(shift: ContextShifted) -> str:
    """Return a line that describes what was dropped from the context."""
    turns = "the oldest turn is" if shift.dropped_turns == 1 else f"the oldest {shift.dropped_turns} turns are"
    return f"the context was full: {turns} no longer in the context"


def describe(end: End) -> str:
    """Return the statistics of an ended turn as one line."""
    stats = end.stats
    figures = f"{stats.tokens} tokens, {stats.tps:.1f} a second, the first after {stats.ttft_ms:.0f} ms"
    reason = "" if end.finish_reason == "stop" else f", ended by {end.finish_reason}"
    return "".join([figures, reason, *(f"\nwarning: {warning}" for warning in end.warnings)])

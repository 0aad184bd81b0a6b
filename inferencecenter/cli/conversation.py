"""A conversation line by line: prompts, commands that begin with a slash, and what Ctrl-C means at each moment."""

from __future__ import annotations

import contextlib
import json
import signal
from typing import TYPE_CHECKING, Any, Final

from rich.table import Table

from inferencecenter.cli.output import report, stdout
from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.events import End
from inferencecenter.protocol.params import parse_params
from inferencecenter.protocol.requests import START

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from anyio.from_thread import BlockingPortal

    from inferencecenter.cli.view import TurnView
    from inferencecenter.client import Client, ClientSession

_HELP: Final = """\
/new                   begin a new conversation
/undo                  take back the last question and its answer
/fork                  go on in a copy of this conversation
/back                  leave the copy for the conversation it was made of
/params                show the parameters of the next turns
/params name value     set one, as /params temperature 0.2
/params reset          forget them all
/stats                 figures of the last turn
/help                  this list
/quit                  leave; so does Ctrl-D, and Ctrl-C at the prompt
Ctrl-C while an answer runs ends the answer. A line that begins with // is sent with one slash."""
_LOST: Final = frozenset({ErrorCode.DAEMON_UNREACHABLE, ErrorCode.NOT_AUTHENTICATED})


class Conversation:
    """The state of one chat: its session, its parameters, the last turn's figures.

    Args:
        portal: Runs what talks to the daemon, in its own thread; this one may block at a prompt meanwhile.
        client: The connection.
        view: Shows answers.
        system: System prompt of every session.
        params: Parameters of every turn, as the user wrote them.
        interactive: Somebody is there: Ctrl-C ends an answer and not the program, and a refused turn is reported where
            a script would end. Needs the main thread.
    """

    def __init__(  # noqa: PLR0913 - all by name
        self,
        portal: BlockingPortal,
        client: Client,
        *,
        view: TurnView,
        system: str | None,
        params: dict[str, Any],
        interactive: bool,
    ) -> None:
        self._portal = portal
        self._client = client
        self._view = view
        self._system = system
        self._params = params
        self._interactive = interactive
        self._last: End | None = None
        self._session = self._new_session()
        self._turns: list[str] = []
        self._left: list[tuple[ClientSession, list[str]]] = []
        self._commands: dict[str, Callable[[list[str]], None]] = {
            "/new": self._command_new,
            "/undo": self._command_undo,
            "/fork": self._command_fork,
            "/back": self._command_back,
            "/params": self._command_params,
            "/stats": self._command_stats,
            "/help": lambda _words: stdout.print(_HELP, markup=False),
        }

    def run(self, read_line: Callable[[], str]) -> None:
        """Take lines until there are no more, or ``/quit``.

        Args:
            read_line: Returns the next line, raises ``EOFError`` after the last.

        Raises:
            InferenceCenterError: The connection is lost, or anything else when nobody is there to go on.
        """
        with contextlib.suppress(EOFError):
            while (line := read_line().strip()) != "/quit":
                try:
                    self._take(line)
                except InferenceCenterError as error:
                    if not self._interactive or error.code in _LOST:
                        raise
                    report(error)

    def _take(self, line: str) -> None:
        if not line:
            return
        if not line.startswith("/") or line.startswith("//"):
            self._ask(line.removeprefix("/"))
            return
        name, *words = line.split(maxsplit=2)
        command = self._commands.get(name)
        if command is None:
            raise InferenceCenterError(ErrorCode.INVALID_REQUEST, f"no command {name}", hint="/help lists them.")
        command(words)

    def _ask(self, prompt: str) -> None:
        abort = _interrupts(self._abort) if self._interactive else contextlib.nullcontext()
        with abort:
            self._view.begin()
            try:
                self._portal.start_task_soon(self._stream, prompt).result()
            finally:
                self._view.finish()

    def _abort(self) -> None:
        self._portal.start_task_soon(self._session.abort)

    async def _stream(self, prompt: str) -> None:
        async for event in self._session.infer(prompt, params=self._params or None):
            self._view.show(event)
            if isinstance(event, End):
                self._last = event
                self._turns.append(event.turn_id)

    def _new_session(self) -> ClientSession:
        async def create() -> ClientSession:
            return await self._client.create_session(system=self._system)

        return self._portal.call(create)

    def _command_new(self, _words: list[str]) -> None:
        self._portal.call(self._session.close)
        self._session = self._new_session()
        self._turns = []
        self._last = None

    def _command_undo(self, _words: list[str]) -> None:
        if not self._turns:
            raise InferenceCenterError(ErrorCode.INVALID_REQUEST, "nothing was said yet that could be taken back")
        self._portal.call(self._session.rewind, self._turns[-2] if len(self._turns) > 1 else START)
        self._turns.pop()

    def _command_fork(self, _words: list[str]) -> None:
        fork = self._portal.call(self._session.fork)
        self._left.append((self._session, self._turns))
        self._session, self._turns = fork, list(self._turns)

    def _command_back(self, _words: list[str]) -> None:
        if not self._left:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST, "this conversation is no copy", hint="/fork makes one."
            )
        self._portal.call(self._session.close)
        self._session, self._turns = self._left.pop()

    def _command_params(self, words: list[str]) -> None:
        if words == ["reset"]:
            self._params = {}
        elif len(words) == 2:
            changed = {**self._params, words[0]: read_value(words[1])}
            parse_params(changed)
            self._params = changed
        elif words:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST, f"/params {words[0]} has no value", hint="Write /params name value."
            )
        shown = [f"{name} {json.dumps(value, ensure_ascii=False)}" for name, value in self._params.items()]
        stdout.print("\n".join(shown) or "no parameters set; the model's and the daemon's hold", markup=False)

    def _command_stats(self, _words: list[str]) -> None:
        if self._last is None:
            stdout.print("no turn yet")
            return
        table = Table(show_header=False)
        for name, value in {**self._last.stats.model_dump(), "finish_reason": self._last.finish_reason}.items():
            table.add_row(name, str(value))
        stdout.print(table)


@contextlib.contextmanager
def _interrupts(action: Callable[[], object]) -> Iterator[None]:
    """Let Ctrl-C do ``action`` while inside, in place of an exception that may surface anywhere."""
    before = signal.signal(signal.SIGINT, lambda _number, _frame: action())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def read_value(text: str) -> Any:
    """Return a parameter's value: JSON where it is JSON, else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text

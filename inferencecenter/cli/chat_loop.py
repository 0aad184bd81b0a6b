"""The chat's read loop: prompts, slash commands, and the handling of Ctrl-C in each state."""

from __future__ import annotations

import contextlib
import json
import signal
from concurrent.futures import CancelledError
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio
from rich.table import Table

from inferencecenter.cli.options import read_value
from inferencecenter.cli.output import report, stdout
from inferencecenter.cli.view import describe_past, sessions_table
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.events import End
from inferencecenter.protocol.params import parse_params
from inferencecenter.protocol.requests import START

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from concurrent.futures import Future

    from anyio.from_thread import BlockingPortal

    from inferencecenter.cli.view import TurnView
    from inferencecenter.client import Client, ClientSession, ClientTurn, MessageImage
    from inferencecenter.protocol.values import SessionSummary


_LOADING_POLL_S: Final = 0.5


async def until_ready(client: Client, report_status: Callable[[str], None] = lambda _message: None) -> None:
    """Wait until the daemon's model is loaded.

    Args:
        client: The connection.
        report_status: Called with the daemon's status message.

    Raises:
        InferenceCenterError: The connection is lost.
    """
    hello = client.hello
    while hello.status == "loading":
        report_status(hello.message)
        await anyio.sleep(_LOADING_POLL_S)
        hello = await client.refresh_hello()


_HELP: Final = """\
/new                   start a new conversation
/undo                  discard the last question and its answer
/fork                  continue in a copy of this conversation
/back                  return from the copy to its original
/sessions              list all conversations of this account
/resume                continue the latest other one; /resume 2, or /resume ID, another one of the list
/close                 delete one of the list: /close 2, or /close ID
/params                show the parameters of the following turns
/params name value     set one, such as /params temperature 0.2
/params reset          reset all of them
/image FILE            send an image with the next question; /image alone takes all back
/stats                 statistics of the last turn
/help                  this list
/quit                  quit, like Ctrl-D, and Ctrl-C at the prompt
Ctrl-C during an answer aborts the answer. A line that starts with // is sent with one slash."""
_TITLE_CHARS: Final = 60
_CLOSE_ONE: Final = "/sessions lists your conversations; /close with a number of the list deletes one."


class ChatLoop:
    """State of one chat: its session, its parameters, the statistics of the last turn.

    Args:
        portal: Runs the client in its own thread, while this one blocks at the prompt.
        client: The connection.
        view: Shows answers.
        system: System prompt of new sessions.
        model: Model of new sessions; ``None`` for the daemon's default.
        params: Parameters of every turn, as entered.
        interactive: A user is present: Ctrl-C aborts an answer instead of the program, a refused turn is
            reported instead of ending the program, and sessions are kept. Needs the main thread.
    """

    def __init__(  # noqa: PLR0913 - all by name
        self,
        portal: BlockingPortal,
        client: Client,
        *,
        view: TurnView,
        system: str | None,
        model: str | None,
        params: dict[str, Any],
        interactive: bool,
    ) -> None:
        self._portal = portal
        self._client = client
        self._view = view
        self._system = system
        self._model = model
        self._params = params
        self._interactive = interactive
        self._last: End | None = None
        self._reading: Future[None] | None = None
        self._is_loading = False
        # Opened by the first question, so that starting the chat leaves no empty session.
        self._session: ClientSession | None = None
        self._opened: list[ClientSession] = []
        self._set_aside: list[ClientSession] = []
        self._images: list[MessageImage] = []
        self._turns: list[str] = []
        self._listed: tuple[SessionSummary, ...] = ()
        self._left: list[tuple[ClientSession, list[str]]] = []
        self._commands: dict[str, Callable[[list[str]], None]] = {
            "/new": self._command_new,
            "/undo": self._command_undo,
            "/fork": self._command_fork,
            "/back": self._command_back,
            "/sessions": self._command_sessions,
            "/resume": self._command_resume,
            "/close": self._command_close,
            "/params": self._command_params,
            "/image": self._command_image,
            "/stats": self._command_stats,
            "/help": lambda _words: stdout.print(_HELP, markup=False),
        }

    def run(self, read_line: Callable[[], str]) -> None:
        """Process lines until the input ends, or ``/quit``.

        Args:
            read_line: Returns the next line, raises ``EOFError`` after the last.

        Raises:
            InferenceCenterError: The connection is lost; when not interactive, any error.
        """
        try:
            with contextlib.suppress(EOFError):
                while (line := read_line().strip()) != "/quit":
                    self._take_or_report(line)
        finally:
            if not self._interactive:
                self._portal.call(self._leave)

    def resume(self, session_id: str | None) -> None:
        """Resume a session; without an id, the most recent one.

        Raises:
            InferenceCenterError: ``session_not_found``, or the connection is lost.
        """
        if session_id is None:
            session_id = self._choose([])
        session, resumed = self._portal.call(self._client.resume, session_id)
        self._set_aside += [parent for parent, _turns in self._left]
        if self._session is not None:
            self._set_aside.append(self._session)
        self._set_aside = [other for other in self._set_aside if other is not session]
        self._session, self._left = session, []
        self._turns = [turn.turn_id for turn in resumed.turns or ()]
        self._last = None
        if self._interactive:
            stdout.print(describe_past(resumed), soft_wrap=True)
            if resumed.turn_id is not None:
                self._show(self._read(session.follow()))
        else:
            self._portal.call(self._wait_for_end, session)

    def _take_or_report(self, line: str) -> None:
        try:
            self._take(line)
        except InferenceCenterError as error:
            if not self._interactive or self._client.ended is not None:
                raise
            report(error)

    def _take(self, line: str) -> None:
        if not line:
            return
        if not line.startswith("/") or line.startswith("//"):
            self._send_prompt(line.removeprefix("/"))
            return
        name, *words = line.split(maxsplit=2)
        command = self._commands.get(name)
        if command is None:
            raise InferenceCenterError(ErrorCode.INVALID_REQUEST, f"no command {name}", hint="/help lists them.")
        command(words)

    def _send_prompt(self, prompt: str) -> None:
        self._show(self._answer(prompt))

    def _show(self, reading: Coroutine[Any, Any, None]) -> None:
        """Run the reader of a turn; Ctrl-C aborts the turn."""
        abort = _interrupts(self._abort) if self._interactive else contextlib.nullcontext()
        with abort:
            self._view.begin()
            try:
                self._reading = self._portal.start_task_soon(lambda: reading)
                self._reading.result()
            except CancelledError:
                # The turn is not running yet.
                self._is_loading = False
            finally:
                self._view.finish()

    def _abort(self) -> None:
        if self._is_loading and self._reading is not None:
            self._reading.cancel()
        elif self._session is not None:
            self._portal.start_task_soon(self._session.abort)

    async def _answer(self, prompt: str) -> None:
        # After a restart the daemon is reachable before its model is loaded.
        await until_ready(self._client)
        if self._session is None:
            self._session = await self._create(" ".join(prompt.split())[:_TITLE_CHARS])
        session = self._session
        # The model of a resumed session may not have been loaded since the daemon started.
        images, self._images = self._images, []
        try:
            await self._read(session.infer(prompt, images=images, params=self._params or None, on_loading=self._loads))
        except InferenceCenterError:
            self._images = images
            raise

    async def _create(self, title: str) -> ClientSession:
        """Open a session; at the session limit, a script closes the first one that it opened and left.

        An interactive user's sessions are kept until the user closes one.
        """
        try:
            session = await self._client.create_session(
                system=self._system, model=self._model, metadata={"title": title}, on_loading=self._loads
            )
        except InferenceCenterError as error:
            if error.code is not ErrorCode.SESSION_LIMIT:
                raise
            if self._interactive:
                raise InferenceCenterError(error.code, error.message, hint=_CLOSE_ONE) from error
            spare = next((session for session in self._set_aside if session in self._opened), None)
            if spare is None:
                raise
            self._set_aside.remove(spare)
            await spare.close()
            return await self._create(title)
        finally:
            self._is_loading = False
        self._opened.append(session)
        return session

    def _loads(self, _message: str) -> None:
        self._is_loading = True
        self._view.loading(self._model)

    async def _read(self, turn: ClientTurn) -> None:
        async for event in turn.events():
            self._is_loading = False
            self._view.show(event)
            if isinstance(event, End):
                self._last = event
                self._turns.append(event.turn_id)

    async def _wait_for_end(self, session: ClientSession) -> None:
        """Wait for the end of a running turn, whose answer is discarded."""
        async for event in session.follow().events():
            if isinstance(event, End):
                self._turns.append(event.turn_id)

    async def _leave(self) -> None:
        """Close the opened sessions of a script: later sessions might otherwise evict one that is still needed."""
        for session in self._opened:
            if self._client.connected:
                with contextlib.suppress(InferenceCenterError):
                    await session.close()

    def _open_session(self) -> ClientSession:
        if self._session is None:
            raise InferenceCenterError(ErrorCode.INVALID_REQUEST, "this conversation has not started yet")
        return self._session

    def _choose(self, words: list[str]) -> str:
        """Return the session id for a number of the list or an id; without an argument, the latest other session."""
        if words and words[0].isdecimal() and self._listed:
            number = int(words[0])
            if not 1 <= number <= len(self._listed):
                raise InferenceCenterError(
                    ErrorCode.INVALID_REQUEST, f"{number} is not in the list", hint=f"It has {len(self._listed)} lines."
                )
            return self._listed[number - 1].session_id
        if words:
            return words[0]
        current = self._session.session_id if self._session else None
        others = [session.session_id for session in self._latest_first() if session.session_id != current]
        if not others:
            raise InferenceCenterError(ErrorCode.SESSION_NOT_FOUND, "there is no conversation to continue")
        return others[0]

    def _latest_first(self) -> tuple[SessionSummary, ...]:
        sessions = self._portal.call(self._client.sessions)
        return tuple(sorted(sessions, key=lambda session: session.last_used_at, reverse=True))

    def _command_sessions(self, _words: list[str]) -> None:
        self._listed = self._latest_first()
        current = self._session.session_id if self._session else None
        stdout.print(sessions_table(self._listed, current=current) if self._listed else "no conversations")

    def _command_resume(self, words: list[str]) -> None:
        self.resume(self._choose(words))

    def _command_close(self, words: list[str]) -> None:
        if not words:
            raise InferenceCenterError(ErrorCode.INVALID_REQUEST, "/close needs a number or an id", hint=_CLOSE_ONE)
        session, _resumed = self._portal.call(self._client.resume, self._choose(words))
        if session is self._session:
            self._command_new([])
        self._portal.call(session.close)
        self._opened = [other for other in self._opened if other is not session]
        self._set_aside = [other for other in self._set_aside if other is not session]
        self._left = [(other, turns) for other, turns in self._left if other is not session]

    def _command_new(self, _words: list[str]) -> None:
        if self._session is not None:
            self._set_aside.append(self._session)
        self._session = None
        self._turns = []
        self._last = None

    def _command_undo(self, _words: list[str]) -> None:
        if not self._turns:
            raise InferenceCenterError(ErrorCode.INVALID_REQUEST, "there is no turn to undo")
        self._portal.call(self._open_session().rewind, self._turns[-2] if len(self._turns) > 1 else START)
        self._turns.pop()

    def _command_fork(self, _words: list[str]) -> None:
        session = self._open_session()
        fork = self._portal.call(session.fork)
        self._opened.append(fork)
        self._left.append((session, self._turns))
        self._session, self._turns = fork, list(self._turns)

    def _command_back(self, _words: list[str]) -> None:
        if not self._left:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST, "this conversation is not a copy", hint="/fork creates one."
            )
        fork = self._open_session()
        self._portal.call(fork.close)
        self._opened.remove(fork)
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
        stdout.print(
            "\n".join(shown) or "no parameters set; the defaults of the model and the daemon apply", markup=False
        )

    def _command_image(self, words: list[str]) -> None:
        if not words:
            self._images = []
            return
        path = Path(" ".join(words)).expanduser()
        try:
            file = path.read_bytes()
        except OSError as error:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST, f"{path} cannot be read: {error.strerror}", hint="Name an image file."
            ) from None
        image = self._portal.call(self._client.add_image, file).model_copy(update={"alt": path.name})
        self._images.append(image)
        stdout.print(f"{path.name}: {image.width} x {image.height} pixels, sent with the next question", markup=False)

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
    """Handle Ctrl-C inside the block by calling ``action`` instead of raising ``KeyboardInterrupt``."""
    before = signal.signal(signal.SIGINT, lambda _number, _frame: action())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

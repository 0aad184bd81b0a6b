"""This project's daemon as a target: sessions in raw mode over one WebSocket for each client.

A conversation's session is opened before the turn's clock starts, as a connection is; the clock runs from ``infer`` to
``end``. Each ``token`` frame is one piece of text. The daemon joins pieces only for clients that fall behind, and says
in ``end`` how many tokens there were. An abort is measured from ``abort`` to ``end``: the turn holds no slot any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec
import websockets
from websockets.asyncio.client import connect
from websockets.typing import Subprotocol

from inferencecenter.bench.peers.prompts import calibrate
from inferencecenter.bench.peers.sampling import sampling
from inferencecenter.bench.target import AbortTrace, TargetFacts, TurnTrace, Work
from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.base import PROTOCOL_VERSION, SUBPROTOCOL

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from websockets.asyncio.client import ClientConnection

    from inferencecenter.bench.peers.prompts import Prompts
    from inferencecenter.bench.target import TargetSpec

_MAX_FRAME_BYTES: Final = 2**26
_COUNTING: Final = Work(prompt_tokens=0, max_tokens=1, seed=0)


class _Usage(msgspec.Struct):
    """The turn's token counts."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class _Frame(msgspec.Struct):
    """What is read of a frame: the protocol's models say more, and cost ten times as much for each token."""

    op: str
    id: str | None = None
    session_id: str | None = None
    finish_reason: str | None = None
    usage: _Usage | None = None
    message: str = ""
    reason: str = ""
    values: dict[str, float | int | str | None] = msgspec.field(default_factory=dict)


_LAST_OPS: Final = frozenset({"end", "error"})
_read_frame: Final = msgspec.json.Decoder(_Frame).decode


class Daemon:
    """A running daemon.

    Args:
        spec: ``token`` is an account's token.
    """

    def __init__(self, spec: TargetSpec) -> None:
        self._spec = spec
        self._prompts: Prompts | None = None
        self._calibrating = asyncio.Lock()

    async def facts(self) -> TargetFacts:
        """Ask the daemon what it runs; sizes and slots are told to accounts with the operator scope.

        Raises:
            InferenceCenterError: ``daemon_unreachable`` or ``not_authenticated``.
        """
        async with self._connect() as line:
            model = (await line.ask(op="status", type="model")).values
            memory = (await line.ask(op="status", type="memory")).values
        return TargetFacts(
            name=self._spec.name,
            kind="inferencecenter",
            url=self._spec.url,
            model=str(model.get("name") or ""),
            model_bytes=_whole(memory.get("model_bytes")),
            n_params=_whole(model.get("parameters")),
            library=str(model.get("library") or ""),
            threads=_whole(model.get("threads")),
            slots=_whole(memory.get("slots")),
            n_ctx=_whole(model.get("n_ctx")),
        )

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[DaemonSession]:
        """Open a connection for one client; the first one also finds out which words are one token.

        Raises:
            InferenceCenterError: ``daemon_unreachable`` or ``not_authenticated``.
        """
        async with self._connect() as line:
            async with self._calibrating:
                if self._prompts is None:
                    self._prompts = await calibrate(line.count)
            yield DaemonSession(line, self._prompts)

    @contextlib.asynccontextmanager
    async def _connect(self) -> AsyncIterator[_Line]:
        async with contextlib.AsyncExitStack() as stack:
            try:
                socket = await stack.enter_async_context(
                    connect(
                        self._spec.url,
                        subprotocols=[Subprotocol(SUBPROTOCOL)],
                        compression=None,
                        max_size=_MAX_FRAME_BYTES,
                    )
                )
            except (OSError, websockets.WebSocketException) as error:
                raise InferenceCenterError(
                    ErrorCode.DAEMON_UNREACHABLE, f"no daemon answers at {self._spec.url}: {error}"
                ) from error
            line = _Line(socket)
            answer = await line.ask(op="auth", token=self._spec.token, protocol=PROTOCOL_VERSION)
            if answer.op != "auth_success":
                raise InferenceCenterError(ErrorCode.NOT_AUTHENTICATED, answer.reason or answer.message)
            yield line


class _Line:
    """A socket on which one thing happens at a time.

    All methods raise ``daemon_unreachable`` when it is closed.
    """

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._n_sent = 0

    async def send(self, **request: Any) -> str:
        """Send a frame, and return the id it got."""
        self._n_sent += 1
        request["id"] = f"b{self._n_sent}"
        try:
            await self._socket.send(msgspec.json.encode(request), text=True)
        except websockets.ConnectionClosed as error:
            raise InferenceCenterError(ErrorCode.DAEMON_UNREACHABLE, f"the connection is lost: {error}") from error
        return str(request["id"])

    async def receive(self) -> _Frame:
        """Return the next frame."""
        try:
            return _read_frame(await self._socket.recv(decode=False))
        except websockets.ConnectionClosed as error:
            raise InferenceCenterError(ErrorCode.DAEMON_UNREACHABLE, f"the connection is lost: {error}") from error

    async def ask(self, **request: Any) -> _Frame:
        """Send a frame and return the direct reply, whatever it is."""
        request_id = await self.send(**request)
        while (frame := await self.receive()).id != request_id:
            pass
        return frame

    async def create_session(self) -> str:
        """Open a session in raw mode that ends with the connection, so that no repetition finds those of another.

        Raises:
            InferenceCenterError: ``session_limit`` when the daemon refuses.
        """
        created = await self.ask(op="create_session", mode="raw", store=False, on_disconnect="close")
        if created.op != "session_created" or created.session_id is None:
            raise InferenceCenterError(ErrorCode.SESSION_LIMIT, created.message)
        return created.session_id

    async def turn(self, session_id: str, text: str, work: Work) -> AsyncIterator[_Frame]:
        """Start a turn and yield its frames; the last is ``end`` or ``error``."""
        params = {**sampling(work), "max_tokens": work.max_tokens}
        request_id = await self.send(op="infer", session_id=session_id, prompt=text, params=params)
        while True:
            frame = await self.receive()
            if frame.session_id == session_id or frame.id == request_id:
                yield frame
                if frame.op in _LAST_OPS:
                    return

    async def count(self, text: str) -> int:
        """Return the tokens of a text, by a turn that generates one token.

        Raises:
            InferenceCenterError: ``engine_unavailable`` when no turn can run.
        """
        session_id = await self.create_session()
        last = [frame async for frame in self.turn(session_id, text, _COUNTING)][-1]
        await self.send(op="close_session", session_id=session_id)
        if last.usage is None:
            raise InferenceCenterError(ErrorCode.ENGINE_UNAVAILABLE, last.message)
        return last.usage.prompt_tokens


class DaemonSession:
    """One client's socket and its conversations."""

    def __init__(self, line: _Line, prompts: Prompts) -> None:
        self._line = line
        self._prompts = prompts
        self._conversations: dict[str, str] = {}

    async def turn(self, work: Work, *, on_text: Callable[[], None] | None = None) -> TurnTrace:
        """Run a turn to its end; a failure of the turn is the trace's ``error``."""
        started_s = time.monotonic()
        times_s: list[float] = []
        usage, error = None, None
        try:
            session_id, text = await self._prepare(work)
            started_s = time.monotonic()
            async for frame in self._line.turn(session_id, text, work):
                if frame.op == "token":
                    times_s.append(time.monotonic())
                    if on_text is not None:
                        on_text()
                elif frame.op in _LAST_OPS:
                    usage, error = frame.usage, frame.message or None
            ended_s = time.monotonic()
            await self._leave(work, session_id)
        except InferenceCenterError as failure:
            ended_s, error = time.monotonic(), str(failure)
        return TurnTrace(
            started_s=started_s,
            token_times_s=tuple(times_s),
            ended_s=ended_s,
            prompt_tokens=usage.prompt_tokens if usage else 0,
            tokens=usage.completion_tokens if usage else 0,
            cached_tokens=usage.cached_tokens if usage else None,
            error=error,
        )

    async def turn_then_abort(self, work: Work, *, after_tokens: int | None) -> AbortTrace:
        """Abort a turn after so many pieces of text, or when it is first said how much of its prompt has been read."""
        started_s = time.monotonic()
        times_s: list[float] = []
        aborted_s, error = None, None
        try:
            session_id, text = await self._prepare(work)
            started_s = time.monotonic()
            async for frame in self._line.turn(session_id, text, work):
                if frame.op == "token":
                    times_s.append(time.monotonic())
                elif frame.op in _LAST_OPS:
                    error = _why_not_aborted(frame, too_late=after_tokens is None and bool(times_s))
                is_due = frame.op == "progress" if after_tokens is None else len(times_s) >= after_tokens
                if aborted_s is None and is_due:
                    aborted_s = time.monotonic()
                    await self._line.send(op="abort", session_id=session_id)
            ended_s = time.monotonic()
            await self._leave(work, session_id)
        except InferenceCenterError as failure:
            ended_s, error = time.monotonic(), str(failure)
        return AbortTrace(
            started_s=started_s,
            token_times_s=tuple(times_s),
            aborted_s=ended_s if aborted_s is None else aborted_s,
            ended_s=ended_s,
            error=error,
        )

    async def _prepare(self, work: Work) -> tuple[str, str]:
        """Return the session and the text of a turn."""
        known = self._conversations.get(work.history_id) if work.history_id is not None else None
        text = self._prompts.text(work, first=known is None)
        session_id = known or await self._line.create_session()
        if work.history_id is not None:
            self._conversations[work.history_id] = session_id
        return session_id, text

    async def _leave(self, work: Work, session_id: str) -> None:
        """Close the session of a conversation that is over."""
        if work.history_id is None:
            await self._line.send(op="close_session", session_id=session_id)


def _why_not_aborted(last: _Frame, *, too_late: bool) -> str | None:
    """Return why a turn that ended so does not tell how long an abort takes."""
    if last.op == "error":
        return last.message
    if last.finish_reason != "aborted":
        return "the turn ended by itself"
    return "the whole prompt was read before the turn could be aborted" if too_late else None


def _whole(value: float | str | None) -> int | None:
    return int(value) if isinstance(value, int | float) else None

"""The wire protocol without the SDK, which would hide pauses, repetitions and lost connections."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

import msgspec
import websockets
from websockets.asyncio.client import connect
from websockets.typing import Subprotocol

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.base import PROTOCOL_VERSION, SUBPROTOCOL

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from websockets.asyncio.client import ClientConnection

    from benchmarks.target import TargetSpec

LAST_OPS: Final = frozenset({"end", "error"})
"""The end of a turn."""
_MAX_FRAME_BYTES: Final = 2**26


class TurnUsage(msgspec.Struct):
    """A turn's token counts."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class Message(msgspec.Struct):
    """A message of a transcript."""

    role: str
    content: str


class Frame(msgspec.Struct):
    """The parsed fields of a frame: validating the protocol's full models costs ten times as much per token."""

    op: str
    id: str | None = None
    session_id: str | None = None
    turn_id: str | None = None
    seq: int | None = None
    content: str | None = None
    finish_reason: str | None = None
    usage: TurnUsage | None = None
    code: str = ""
    message: str = ""
    reason: str | None = None
    values: dict[str, float | int | str | None] = msgspec.field(default_factory=dict)
    # Of sessions:
    epoch: str | None = None
    resumed: bool | None = None
    state: str | None = None
    transcript: list[Message] | None = None
    # Of models:
    plan: msgspec.Raw = msgspec.Raw()
    phase: str | None = None
    detail: str = ""


_read_frame: Final = msgspec.json.Decoder(Frame).decode


class Line:
    """A socket that is used by one task at a time; ``open_line`` opens one.

    All methods raise ``daemon_unreachable`` when it is closed.
    """

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._n_sent = 0

    async def send(self, **request: Any) -> str:
        """Send a frame with a new id, and return the id."""
        self._n_sent += 1
        request["id"] = f"b{self._n_sent}"
        try:
            await self._socket.send(msgspec.json.encode(request), text=True)
        except websockets.ConnectionClosed as error:
            raise _lost(error) from error
        return str(request["id"])

    async def receive(self) -> Frame:
        """Return the next frame."""
        try:
            return _read_frame(await self._socket.recv(decode=False))
        except websockets.ConnectionClosed as error:
            raise _lost(error) from error

    async def request(self, *, on_other: Callable[[Frame], None] | None = None, **fields: Any) -> Frame:
        """Send a frame and return its direct reply; ``on_other`` is called with the events before it."""
        request_id = await self.send(**fields)
        while (frame := await self.receive()).id != request_id:
            if on_other is not None:
                on_other(frame)
        return frame

    async def create_session(self, *, stored: bool = False, chat: bool = False) -> Frame:
        """Open a session, in raw mode unless it is for ``chat``, and return the reply.

        Without ``stored`` it is not stored and ends with the connection, so that repetitions are independent.

        Raises:
            InferenceCenterError: With the daemon's code when it refuses.
        """
        on_disconnect = "detach" if stored else "close"
        return succeeded(
            await self.request(
                op="create_session", mode="chat" if chat else "raw", store=stored, on_disconnect=on_disconnect
            ),
            "session_created",
        )

    async def turn(
        self, session_id: str, text: str, params: dict[str, Any], *, json_schema: msgspec.Raw | None = None
    ) -> AsyncIterator[Frame]:
        """Start a turn and yield its frames; the last is ``end`` or ``error``."""
        schema = {} if json_schema is None else {"json_schema": json_schema}
        request_id = await self.send(op="infer", session_id=session_id, prompt=text, params=params, **schema)
        while True:
            frame = await self.receive()
            if frame.session_id == session_id or frame.id == request_id:
                yield frame
                if frame.op in LAST_OPS:
                    return

    async def count(self, text: str, *, chat: bool = False) -> int:
        """Return the tokens of a text, with the template's where it is for ``chat``, by a turn that generates one.

        Raises:
            InferenceCenterError: ``engine_unavailable`` when no turn can run.
        """
        session_id = named(await self.create_session(chat=chat))
        last = [frame async for frame in self.turn(session_id, text, {"max_tokens": 1, "ignore_eos": True})][-1]
        await self.send(op="close_session", session_id=session_id)
        if last.usage is None:
            raise InferenceCenterError(ErrorCode.ENGINE_UNAVAILABLE, last.message)
        return last.usage.prompt_tokens

    def drop(self) -> None:
        """Drop the connection without a closing handshake, as a phone does."""
        self._socket.transport.abort()


@contextlib.asynccontextmanager
async def open_line(spec: TargetSpec) -> AsyncIterator[Line]:
    """Connect to a daemon and authenticate with the token of ``spec``.

    Raises:
        InferenceCenterError: ``daemon_unreachable`` or ``not_authenticated``.
    """
    async with contextlib.AsyncExitStack() as stack:
        try:
            socket = await stack.enter_async_context(
                connect(
                    spec.url,
                    subprotocols=[Subprotocol(SUBPROTOCOL)],
                    compression=None,
                    max_size=_MAX_FRAME_BYTES,
                    # Events of other sessions are not read between turns; a full queue would hold up the close frame.
                    max_queue=None,
                )
            )
        except (OSError, websockets.WebSocketException) as error:
            raise InferenceCenterError(
                ErrorCode.DAEMON_UNREACHABLE, f"no daemon answers at {spec.url}: {error}"
            ) from error
        line = Line(socket)
        answer = await line.request(op="auth", token=spec.token, protocol=PROTOCOL_VERSION)
        if answer.op != "auth_success":
            raise InferenceCenterError(ErrorCode.NOT_AUTHENTICATED, answer.reason or answer.message)
        yield line


def succeeded(frame: Frame, op: str) -> Frame:
    """Return a reply that must be an ``op``.

    Raises:
        InferenceCenterError: With the daemon's code when it refused, ``internal`` when it answered something else.
    """
    if frame.op == op:
        return frame
    known = frame.op == "error" and frame.code in set(ErrorCode)
    raise InferenceCenterError(
        ErrorCode(frame.code) if known else ErrorCode.INTERNAL, frame.message or f"{op} was answered with {frame.op}"
    )


def named(frame: Frame) -> str:
    """Return the session that a frame is about, which must name one."""
    assert frame.session_id is not None, f"{frame.op} names its session"
    return frame.session_id


def _lost(error: websockets.ConnectionClosed) -> InferenceCenterError:
    return InferenceCenterError(ErrorCode.DAEMON_UNREACHABLE, f"the connection is lost: {error}")

"""The abusive client: its requests and the replies."""

from __future__ import annotations

import asyncio
import base64
import itertools
from collections import Counter, deque
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import urlsplit

import msgspec
import websockets
from websockets.asyncio.client import connect
from websockets.typing import Subprotocol

from benchmarks.peers.line import Frame
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.base import PROTOCOL_VERSION, SUBPROTOCOL

if TYPE_CHECKING:
    from collections.abc import Iterable

    from websockets.asyncio.client import ClientConnection

    from benchmarks.target import TargetSpec

_MAX_FRAME_BYTES: Final = 2**26
_HTTP_TIMEOUT_S: Final = 60.0
_KEY: Final = base64.b64encode(bytes(16)).decode()
_UPGRADED: Final = b"HTTP/1.1 101"
_read_frame: Final = msgspec.json.Decoder(Frame).decode


class Attacker:
    """A client that continues after any reply: refusals are counted, and a closed socket is reopened.

    ``outcomes`` counts the answers: an op, an error's code, ``closed`` with a close code, or an HTTP status.
    """

    def __init__(self, spec: TargetSpec) -> None:
        self._spec = spec
        self._open = AsyncExitStack()
        self._socket: ClientConnection | None = None
        self._ids = itertools.count(1)
        self._unauthenticated: deque[asyncio.StreamWriter] = deque()
        self.outcomes: Counter[str] = Counter()
        self.numbers = itertools.count(1)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()
        for socket in self._unauthenticated:
            socket.transport.abort()

    async def send(self, **request: Any) -> str:
        """Send a frame without waiting for its answer, and return its id.

        Raises:
            InferenceCenterError: The daemon cannot be reached.
        """
        socket = await self._connected()
        request["id"] = f"a{next(self._ids)}"
        try:
            await socket.send(msgspec.json.encode(request), text=True)
        except websockets.ConnectionClosed as closed:
            self._lost(closed)
        return str(request["id"])

    async def request(self, **fields: Any) -> Frame | None:
        """Send a frame and return its answer; ``None`` when the socket is closed instead.

        Raises:
            InferenceCenterError: The daemon cannot be reached.
        """
        answers = await self.answers([await self.send(**fields)])
        return answers[0] if answers else None

    async def answers(self, request_ids: Iterable[str]) -> list[Frame]:
        """Return the replies to sent frames, in order of arrival.

        Frames without a reply are missing if the socket was closed.
        """
        missing, found = set(request_ids), list[Frame]()
        while missing and self._socket is not None:
            try:
                frame = _read_frame(await self._socket.recv(decode=False))
            except websockets.ConnectionClosed as closed:
                self._lost(closed)
                break
            if frame.id in missing:
                missing.remove(frame.id)
                found.append(frame)
                self.outcomes[frame.code or frame.op] += 1
            elif frame.op == "error":
                self.outcomes[frame.code] += 1
        return found

    async def send_raw(self, data: str | bytes) -> None:
        """Send a frame that may be no JSON, and wait until the daemon has answered something later.

        Raises:
            InferenceCenterError: The daemon cannot be reached.
        """
        socket = await self._connected()
        with suppress(websockets.ConnectionClosed):
            await socket.send(data)
        await self.request(op="ping")

    async def open_session(self, *, mode: str) -> str | None:
        """Open a session and return its id; ``None`` when that is refused."""
        created = await self.request(op="create_session", mode=mode)
        return created.session_id if created is not None and created.op == "session_created" else None

    async def connect_without_token(self, *, keep: int) -> None:
        """Open a socket that never authenticates; the latest ``keep`` stay open.

        The handshake is fixed bytes: a library would use more CPU time than the daemon itself.
        """
        request = (
            f"GET / HTTP/1.1\r\nHost: {self._netloc}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {_KEY}\r\n\r\n"
        )
        try:
            async with asyncio.timeout(_HTTP_TIMEOUT_S):
                reader, writer = await self._connect()
                writer.write(request.encode())
                head = await reader.readuntil(b"\r\n\r\n")
        except (OSError, asyncio.IncompleteReadError) as refusal:
            self.outcomes[type(refusal).__name__] += 1
            return
        if head.startswith(_UPGRADED):
            self.outcomes["upgraded"] += 1
            self._unauthenticated.append(writer)
        else:
            self.outcomes[head[9:12].decode()] += 1
            writer.transport.abort()
        while len(self._unauthenticated) > keep:
            self._unauthenticated.popleft().transport.abort()

    async def get(self, path: str) -> None:
        """Fetch a page without a token, on a new connection."""
        await self._http(f"GET {path} HTTP/1.1\r\nHost: {self._netloc}\r\nConnection: close\r\n\r\n".encode())

    async def post(self, path: str, body: bytes, *, hang_up: bool = False) -> None:
        """Post JSON with the token; with ``hang_up`` the connection is closed as soon as the body is sent."""
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {self._netloc}\r\nAuthorization: Bearer {self._spec.token}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        await self._http(head.encode() + body, hang_up=hang_up)

    @property
    def _netloc(self) -> str:
        return urlsplit(self._spec.url).netloc

    async def _http(self, request: bytes, *, hang_up: bool = False) -> None:
        try:
            async with asyncio.timeout(_HTTP_TIMEOUT_S):
                reader, writer = await self._connect()
                writer.write(request)
                await writer.drain()
                answer = b"" if hang_up else await reader.read()
                writer.transport.abort()
        except OSError as error:  # a timeout too
            self.outcomes[type(error).__name__] += 1
            return
        self.outcomes["hung up" if hang_up else answer[9:12].decode(errors="replace") or "closed"] += 1

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = self._netloc.rpartition(":")
        return await asyncio.open_connection(host.strip("[]"), int(port))

    async def _connected(self) -> ClientConnection:
        if self._socket is None:
            try:
                socket = await connect(
                    self._spec.url,
                    subprotocols=[Subprotocol(SUBPROTOCOL)],
                    max_size=_MAX_FRAME_BYTES,
                    ping_interval=None,
                )
            except (OSError, websockets.WebSocketException) as error:
                raise InferenceCenterError(ErrorCode.DAEMON_UNREACHABLE, f"{self._spec.url}: {error}") from error
            self._open.push_async_callback(socket.close)
            self._socket = socket
            await self.request(op="auth", token=self._spec.token, protocol=PROTOCOL_VERSION)
            if self._socket is None:
                raise InferenceCenterError(ErrorCode.DAEMON_UNREACHABLE, "the daemon closed the socket at its login")
        return self._socket

    def _lost(self, closed: websockets.ConnectionClosed) -> None:
        self._socket = None
        self.outcomes[f"closed {closed.rcvd.code if closed.rcvd else 'without a code'}"] += 1

"""A scripted daemon that records what a client sends and answers as a test says."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any, Protocol

from websockets import ConnectionClosed
from websockets.asyncio.server import ServerConnection, serve
from websockets.typing import Subprotocol

from inferencecenter.protocol.base import SUBPROTOCOL

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Script = Callable[["Peer"], Awaitable[None]]

    class Start(Protocol):
        """Starts a scripted daemon and returns its address."""

        async def __call__(self, *scripts: Script) -> str:
            """Start it."""


HELLO = {
    "op": "hello",
    "status": "ready",
    "message": "ready",
    "uptime_seconds": 1,
    "requires_auth": True,
    "protocol": 1,
    "server": "InferenceCenter",
    "version": "0.1.0",
    "model": "demo",
    "limits": {"max_frame_bytes": 1048576, "auth_timeout_s": 5.0},
}
AUTH_SUCCESS = {
    "op": "auth_success",
    "client_id": "admin",
    "max_sessions": 16,
    "scopes": ["user"],
    "priority": "normal",
    "limits": {"max_sessions": 16, "max_connections": 32},
}
STATS = {
    "ttft_ms": 1.0,
    "total_ms": 2.0,
    "tokens": 2,
    "tps": 3.0,
    "prompt_tokens": 4,
    "cached_tokens": 0,
    "queue_ms": 0.0,
    "preempted": 0,
}
USAGE = {"prompt_tokens": 4, "cached_tokens": 0, "completion_tokens": 2}


class Peer:
    """The daemon's end of one socket."""

    def __init__(self, socket: ServerConnection, seqs: dict[str, int]) -> None:
        self.socket = socket
        self.received: list[dict[str, Any]] = []
        self._seqs = seqs

    async def send(self, **event: Any) -> None:
        """Send one event."""
        await self.socket.send(json.dumps(event))

    async def receive(self) -> dict[str, Any]:
        """Return the client's next frame."""
        frame: dict[str, Any] = json.loads(await self.socket.recv())
        self.received.append(frame)
        return frame

    async def welcome(self) -> None:
        """Send hello and accept any credential."""
        await self.send(**HELLO)
        auth = await self.receive()
        await self.send(**AUTH_SUCCESS, id=auth["id"])

    async def open_session(self, session_id: str = "s1") -> None:
        """Answer a ``create_session``."""
        frame = await self.receive()
        created = {"epoch": "e", "model": "demo", "n_ctx": 1024, "params": {}, "warnings": []}
        await self.send(op="session_created", id=frame["id"], session_id=session_id, **created)

    async def numbered(self, op: str, session_id: str = "s1", **fields: Any) -> None:
        """Send an event of a session with the number that comes next."""
        self._seqs[session_id] = self._seqs.get(session_id, 0) + 1
        await self.send(op=op, session_id=session_id, seq=self._seqs[session_id], **fields)

    def skip(self, n_events: int, session_id: str = "s1") -> None:
        """Skip sequence numbers of events sent with explicit numbers."""
        self._seqs[session_id] = self._seqs.get(session_id, 0) + n_events

    async def begin(self, turn_id: str = "t1") -> dict[str, Any]:
        """Receive an ``infer``, acknowledge it and return it."""
        infer = await self.receive()
        assert infer["op"] == "infer", infer
        await self.numbered("queued", infer["session_id"], id=infer["id"], turn_id=turn_id, position=0)
        return infer

    async def token(self, turn_id: str, content: str, session_id: str = "s1") -> None:
        """Send a token of an answer."""
        await self.numbered("token", session_id, turn_id=turn_id, content=content)

    async def end(self, turn_id: str, session_id: str = "s1", **fields: Any) -> None:
        """End a turn."""
        body: dict[str, Any] = {"finish_reason": "stop", "warnings": [], "usage": USAGE, "stats": STATS, **fields}
        await self.numbered("end", session_id, turn_id=turn_id, **body)

    async def resumed(self, **fields: Any) -> dict[str, Any]:
        """Receive a ``resume_session``, answer it and return it; by default no event was missed."""
        request = await self.receive()
        assert request["op"] == "resume_session", request
        session_id = request["session_id"]
        seq = self._seqs.get(session_id, 0)
        body: dict[str, Any] = {"resumed": True, "state": "busy", "epoch": "e", "seq": seq, **fields}
        await self.send(op="session_resumed", id=request["id"], session_id=session_id, **body)
        return request

    async def close_sessions(self) -> None:
        """Close every session that the client closes, until it disconnects."""
        with contextlib.suppress(ConnectionClosed):
            while True:
                frame = await self.receive()
                if frame["op"] == "close_session":
                    await self.send(op="session_closed", id=frame["id"], session_id=frame["session_id"])

    async def refuse(self, request: dict[str, Any], code: str, **fields: Any) -> None:
        """Answer a request with an error."""
        body = {"message": code, "error": code, "retryable": False, **fields}
        await self.send(op="error", id=request["id"], code=code, **body)


@contextlib.asynccontextmanager
async def scripted_daemon() -> AsyncIterator[Start]:
    """Yield a function that starts a daemon and returns its address.

    The first socket follows the first script, the next socket the next one, and all later sockets the last one.
    """
    async with contextlib.AsyncExitStack() as stack:

        async def start(*scripts: Script) -> str:
            left = list(scripts)
            seqs: dict[str, int] = {}

            async def handle(socket: ServerConnection) -> None:
                script = left.pop(0) if len(left) > 1 else left[0]
                peer = Peer(socket, seqs)
                await script(peer)
                await peer.close_sessions()

            server = await stack.enter_async_context(
                serve(handle, "127.0.0.1", 0, subprotocols=[Subprotocol(SUBPROTOCOL)], ping_interval=None)
            )
            port = next(iter(server.sockets)).getsockname()[1]
            return f"ws://127.0.0.1:{port}/"

        yield start

"""A daemon that follows a script, to see what a client says and does."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

from websockets.asyncio.server import ServerConnection, serve
from websockets.typing import Subprotocol

from inferencecenter.protocol.base import SUBPROTOCOL

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Script = Callable[["Peer"], Awaitable[None]]
    Start = Callable[[Script], Awaitable[str]]

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

    def __init__(self, socket: ServerConnection) -> None:
        self.socket = socket
        self.heard: list[dict[str, Any]] = []

    async def say(self, **event: Any) -> None:
        """Send one event."""
        await self.socket.send(json.dumps(event))

    async def hear(self) -> dict[str, Any]:
        """The next frame of the client."""
        frame: dict[str, Any] = json.loads(await self.socket.recv())
        self.heard.append(frame)
        return frame

    async def welcome(self) -> None:
        """Greet, and accept whatever credential comes."""
        await self.say(**HELLO)
        auth = await self.hear()
        await self.say(**AUTH_SUCCESS, id=auth["id"])

    async def open_session(self, session_id: str = "s1") -> None:
        """Answer a ``create_session``."""
        frame = await self.hear()
        created = {"epoch": "e", "model": "demo", "n_ctx": 1024, "params": {}, "warnings": []}
        await self.say(op="session_created", id=frame["id"], session_id=session_id, **created)

    async def token(self, turn_id: str, content: str, session_id: str = "s1") -> None:
        """Send a piece of an answer."""
        await self.say(op="token", session_id=session_id, seq=2, turn_id=turn_id, content=content)

    async def end(self, turn_id: str, session_id: str = "s1", **fields: Any) -> None:
        """End a turn."""
        body: dict[str, Any] = {"finish_reason": "stop", "warnings": [], "usage": USAGE, "stats": STATS, **fields}
        await self.say(op="end", session_id=session_id, seq=3, turn_id=turn_id, **body)


@contextlib.asynccontextmanager
async def scripted_daemon() -> AsyncIterator[Start]:
    """Yield what starts a daemon that follows a script on each socket, and returns its address."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(script: Script) -> str:
            async def handle(socket: ServerConnection) -> None:
                await script(Peer(socket))
                await socket.wait_closed()

            server = await stack.enter_async_context(
                serve(handle, "127.0.0.1", 0, subprotocols=[Subprotocol(SUBPROTOCOL)])
            )
            port = next(iter(server.sockets)).getsockname()[1]
            return f"ws://127.0.0.1:{port}/"

        yield start

"""Helpers for the Responses endpoints on a server with a scripted engine."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from tests.api.http_client import HttpResponse, post, request, tick

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection, connect

    from inferencecenter.ipc.messages import Submit
    from tests.server.harness import Running

PATH = "/v1/responses"
TIMEOUT_S = 60.0


def text_of(submitted: Submit) -> str:
    """Return the text submitted to the engine, without the parts known as tokens."""
    return "".join(piece.text for piece in submitted.pieces)


async def begin_turns(server: Running, n_turns: int = 1) -> list[str]:
    """Wait until this many turns are submitted, begin all, and return their ids."""
    async with asyncio.timeout(TIMEOUT_S):
        while len(server.engine.turns) < n_turns:
            server.engine.submitted.clear()
            await server.engine.submitted.wait()
    turns = list(server.engine.turns)
    for turn in turns:
        server.engine.begin(turn)
    return turns


async def wait_turns_left(server: Running, n_turns: int = 0) -> None:
    """Wait until at most this many turns are left in the engine."""
    async with asyncio.timeout(TIMEOUT_S):
        while len(server.engine.turns) > n_turns:
            await tick()


async def create_response(
    server: Running, body: Any, *texts: str, reason: str = "stop", **options: Any
) -> HttpResponse:
    """Create a response, have the engine answer, and return the HTTP response."""
    pending = asyncio.get_running_loop().create_task(post(server, PATH, body, **options))
    (turn,) = await begin_turns(server)
    for text in texts or ("Good day",):
        server.engine.say(turn, text)
    server.engine.finish(turn, reason=reason)
    return await pending


async def get(server: Running, name: str, more: str = "", **options: Any) -> HttpResponse:
    """Get a response, or a subresource of it."""
    return await request(server, "GET", f"{PATH}/{name}{more}", **options)


def frames_of(heard: HttpResponse) -> list[dict[str, Any]]:
    """Return the events of a stream, checking its framing."""
    *blocks, done, rest = heard.body.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    frames = []
    for block in blocks:
        name, data = block.split("\n")
        frame = json.loads(data.removeprefix("data: "))
        assert name == f"event: {frame['type']}"
        frames.append(frame)
    return frames


def socket(server: Running, **options: Any) -> connect:
    """Open a WebSocket for responses."""
    headers = {"Authorization": f"Bearer {options.pop('token', server.token)}"}
    return server.connect(PATH, additional_headers=headers, **options)


async def send(connection: ClientConnection, kind: str = "response.create", **fields: Any) -> None:
    """Send a frame."""
    await connection.send(json.dumps({"type": kind, **fields}))


async def receive(connection: ClientConnection, *kinds: str) -> dict[str, Any]:
    """Return the next frame, or the next of these types."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            frame: dict[str, Any] = json.loads(await connection.recv())
            if not kinds or frame["type"] in kinds:
                return frame

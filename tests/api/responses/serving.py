"""Responses of a server whose engine says what a test tells it."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from tests.api.asking import Heard, post, request, tick

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection, connect

    from inferencecenter.ipc.messages import Submit
    from tests.server.harness import Running

PATH = "/v1/responses"
PATIENCE_S = 60.0


def text_of(submitted: Submit) -> str:
    """Return what the engine was given to read, less what it knew as tokens."""
    return "".join(piece.text for piece in submitted.pieces)


async def begun(server: Running, n_turns: int = 1) -> list[str]:
    """Wait until so many turns are with the engine, and return all of them, begun."""
    async with asyncio.timeout(PATIENCE_S):
        while len(server.engine.turns) < n_turns:
            server.engine.submitted.clear()
            await server.engine.submitted.wait()
    turns = list(server.engine.turns)
    for turn in turns:
        server.engine.begin(turn)
    return turns


async def left(server: Running, n_turns: int = 0) -> None:
    """Wait until so many turns are left with the engine."""
    async with asyncio.timeout(PATIENCE_S):
        while len(server.engine.turns) > n_turns:
            await tick()


async def made(server: Running, body: Any, *said: str, reason: str = "stop", **options: Any) -> Heard:
    """Ask for a response, have the engine answer, and return what comes back."""
    asking = asyncio.get_running_loop().create_task(post(server, PATH, body, **options))
    (turn,) = await begun(server)
    for text in said or ("Good day",):
        server.engine.say(turn, text)
    server.engine.finish(turn, reason=reason)
    return await asking


async def get(server: Running, name: str, more: str = "", **options: Any) -> Heard:
    """Ask for a response, or for something of it."""
    return await request(server, "GET", f"{PATH}/{name}{more}", **options)


def frames_of(heard: Heard) -> list[dict[str, Any]]:
    """Return the events of a stream, which ends as OpenAI's do and names each event."""
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
    """Open a socket for responses."""
    headers = {"Authorization": f"Bearer {options.pop('token', server.token)}"}
    return server.connect(PATH, additional_headers=headers, **options)


async def send(connection: ClientConnection, kind: str = "response.create", **fields: Any) -> None:
    """Send a frame."""
    await connection.send(json.dumps({"type": kind, **fields}))


async def hear(connection: ClientConnection, *kinds: str) -> dict[str, Any]:
    """Return the next frame, or the next of these kinds."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            frame: dict[str, Any] = json.loads(await connection.recv())
            if not kinds or frame["type"] in kinds:
                return frame

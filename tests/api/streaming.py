"""Streaming helpers: an engine that answers on command, and readers that may disconnect at any time."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.server.harness import Running

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}


@asynccontextmanager
async def open_stream(server: Running, body: dict[str, Any], path: str = CHAT) -> AsyncIterator[asyncio.StreamReader]:
    """Request a stream and read it as it arrives; the connection is aborted at the end."""
    data = json.dumps({**body, "stream": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=2**24)
    lines = [f"POST {path} HTTP/1.1", "host: test", f"authorization: Bearer {server.token}"]
    writer.write("\r\n".join([*lines, f"content-length: {len(data)}", "", ""]).encode() + data)
    try:
        yield reader
    finally:
        writer.transport.abort()


async def next_chunk(reader: asyncio.StreamReader) -> Any:
    """Return the data of the next event of a stream."""
    line = await reader.readuntil(b"data: ")
    assert line.endswith(b"data: ")
    return json.loads(await reader.readuntil(b"\n\n"))


async def next_turn(server: Running) -> str:
    """Wait for a submitted turn and return its id."""
    await server.engine.submitted.wait()
    server.engine.submitted.clear()
    return list(server.engine.turns)[-1]


async def send_answer(server: Running, *texts: str, reason: str = "stop") -> None:
    """Answer the next turn."""
    turn = await next_turn(server)
    server.engine.begin(turn)
    for text in texts:
        server.engine.say(turn, text)
    server.engine.finish(turn, reason=reason)


async def send_answers(server: Running, *texts: str) -> None:
    """Answer one turn for each text once all of them are submitted."""
    async with asyncio.timeout(60):
        while len(server.engine.turns) < len(texts):  # noqa: ASYNC110 - each of them sets the event
            await asyncio.sleep(0)
    for turn, text in zip(list(server.engine.turns), texts, strict=True):
        server.engine.begin(turn)
        server.engine.say(turn, text)
        server.engine.finish(turn)


async def requests_done(server: Running) -> None:
    """Wait until no request is being answered."""
    async with asyncio.timeout(60):
        while server.context.hub.participants:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0)

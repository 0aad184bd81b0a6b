"""Plain HTTP for tests: what is sent is what a test writes, and what comes back is read to the byte."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.server.harness import Running

PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Heard:
    """An answer: its body is decoded, chunks joined."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """What is said of a failure, in OpenAI's shape."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        return dict(error)

    @property
    def events(self) -> list[Any]:
        """The data of server-sent events."""
        assert self.headers["content-type"].startswith("text/event-stream")
        blocks = self.body.decode().split("\n\n")
        assert blocks.pop() == ""
        return [json.loads(block.removeprefix("data: ")) for block in blocks if not block.startswith(":")]


async def exchange(port: int, request: bytes) -> Heard:
    """Send bytes on a connection of their own, and return the answer; the connection must end after it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(PATIENCE_S):
            writer.write(request)
            return read_answer(await reader.read())
    finally:
        writer.close()


def read_answer(data: bytes) -> Heard:
    """Return the answer that is written in ``data``."""
    head, _, body = data.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = _joined(body)
    return Heard(int(status.split()[1]), headers, body)


async def request(
    server: Running,
    method: str,
    path: str,
    *,
    body: object = None,
    headers: Mapping[str, str] | None = None,
    token: str | None = "",
) -> Heard:
    """Make a request; ``body`` is bytes or becomes JSON. Without ``token`` it is the server's, ``None`` sends none."""
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", f"Host: 127.0.0.1:{server.port}", "Connection: close"]
    if token is not None:
        lines.append(f"Authorization: Bearer {token or server.token}")
    if data:
        lines.append(f"Content-Length: {len(data)}")
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return await exchange(server.port, "\r\n".join([*lines, "", ""]).encode() + data)


async def post(server: Running, path: str, body: object, **options: Any) -> Heard:
    """Send a body; see ``request``."""
    return await request(server, "POST", path, body=body, **options)


def _joined(chunked: bytes) -> bytes:
    found = []
    while chunked:
        size, _, rest = chunked.partition(b"\r\n")
        found.append(rest[: int(size, 16)])
        chunked = rest[int(size, 16) + 2 :]
    return b"".join(found)


async def tick(times: int = 1) -> None:
    """Let the server go on."""
    for _ in range(times):
        await asyncio.sleep(0)

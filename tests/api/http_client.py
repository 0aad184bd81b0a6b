"""A raw HTTP client for tests: requests are sent byte for byte and responses are parsed without a library."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.server.harness import Running

TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """An HTTP response with a decoded body."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object in OpenAI's shape."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        return dict(error)

    @property
    def events(self) -> list[Any]:
        """The data of the server-sent events."""
        assert self.headers["content-type"].startswith("text/event-stream")
        blocks = self.body.decode().split("\n\n")
        assert blocks.pop() == ""
        return [json.loads(block.removeprefix("data: ")) for block in blocks if not block.startswith(":")]


async def exchange(port: int, request: bytes) -> HttpResponse:
    """Send bytes on a new connection and return the response; the server must close the connection after it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            writer.write(request)
            return parse_response(await reader.read())
    finally:
        writer.close()


def parse_response(data: bytes) -> HttpResponse:
    """Parse a whole HTTP response."""
    head, _, body = data.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = _dechunk(body)
    return HttpResponse(int(status.split()[1]), headers, body)


async def request(
    server: Running,
    method: str,
    path: str,
    *,
    body: object = None,
    headers: Mapping[str, str] | None = None,
    token: str | None = "",
) -> HttpResponse:
    """Send a request; ``body`` is bytes or JSON. ``token`` defaults to the server's, ``None`` sends none."""
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", f"Host: 127.0.0.1:{server.port}", "Connection: close"]
    if token is not None:
        lines.append(f"Authorization: Bearer {token or server.token}")
    if data:
        lines.append(f"Content-Length: {len(data)}")
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return await exchange(server.port, "\r\n".join([*lines, "", ""]).encode() + data)


async def post(server: Running, path: str, body: object, **options: Any) -> HttpResponse:
    """Send a POST request; see ``request``."""
    return await request(server, "POST", path, body=body, **options)


def _dechunk(chunked: bytes) -> bytes:
    found = []
    while chunked:
        size, _, rest = chunked.partition(b"\r\n")
        found.append(rest[: int(size, 16)])
        chunked = rest[int(size, 16) + 2 :]
    return b"".join(found)


async def tick(times: int = 1) -> None:
    """Run the event loop for this many iterations."""
    for _ in range(times):
        await asyncio.sleep(0)

"""A fake external authentication provider on a loopback port, which answers as a test configures it."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator

YES: dict[str, Any] = {"authorized": True}


@dataclass
class AuthRequest:
    """A received request: its path, and headers by lower-case name."""

    target: str
    headers: dict[str, str]

    @property
    def query(self) -> dict[str, list[str]]:
        """The parameters of the query."""
        return parse_qs(urlsplit(self.target).query)


@dataclass
class FakeAuthProvider:
    """Answers with ``status`` and ``body`` while ``answering`` is set; ``requests`` has all requests so far."""

    port: int = 0
    scheme: str = "http"
    status: int = 200
    body: bytes = json.dumps(YES).encode()
    head: str = ""
    requests: list[AuthRequest] = field(default_factory=list)
    answering: asyncio.Event = field(default_factory=asyncio.Event)
    arrived: asyncio.Condition = field(default_factory=asyncio.Condition)
    writers: set[asyncio.StreamWriter] = field(default_factory=set)
    most_at_once: int = 0

    @property
    def url(self) -> str:
        """Its URL."""
        return f"{self.scheme}://localhost:{self.port}/auth/internal"

    def respond(self, **answer: Any) -> None:
        """Set the answer of the following requests."""
        self.body = json.dumps(answer).encode()

    async def wait_requests(self, count: int) -> None:
        """Wait until this many requests have arrived."""
        async with asyncio.timeout(60), self.arrived:
            await self.arrived.wait_for(lambda: len(self.requests) >= count)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        self.writers.add(writer)
        self.most_at_once = max(self.most_at_once, len(self.writers))
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await self._answer(head.decode("latin-1"), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.writers.discard(writer)
            writer.close()

    async def _answer(self, head: str, writer: asyncio.StreamWriter) -> None:
        first, *lines = head.strip().split("\r\n")
        pairs = (line.partition(": ") for line in lines)
        self.requests.append(AuthRequest(first.split()[1], {name.lower(): value for name, _, value in pairs}))
        async with self.arrived:
            self.arrived.notify_all()
        await self.answering.wait()
        answer = f"HTTP/1.1 {self.status} So\r\nContent-Length: {len(self.body)}\r\n{self.head}\r\n".encode()
        writer.write(answer + self.body)
        await writer.drain()


@asynccontextmanager
async def fake_auth_provider(*, tls: ssl.SSLContext | None = None) -> AsyncIterator[FakeAuthProvider]:
    """Run the provider; it accepts every client immediately."""
    provider = FakeAuthProvider(scheme="http" if tls is None else "https")
    provider.answering.set()
    server = await asyncio.start_server(provider.serve, "127.0.0.1", 0, ssl=tls)
    provider.port = server.sockets[0].getsockname()[1]
    try:
        yield provider
    finally:
        provider.answering.set()
        server.close()
        for writer in list(provider.writers):
            writer.transport.abort()
        await server.wait_closed()

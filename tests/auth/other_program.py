"""A program that knows clients, as a test wants it to answer, on a loopback port."""

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
class Question:
    """What was asked: the address, and headers by their lower-case names."""

    target: str
    headers: dict[str, str]

    @property
    def query(self) -> dict[str, list[str]]:
        """The address's parameters."""
        return parse_qs(urlsplit(self.target).query)


@dataclass
class OtherProgram:
    """Answers with ``status`` and ``body`` when ``answering`` is set; ``asked`` has all questions so far."""

    port: int = 0
    scheme: str = "http"
    status: int = 200
    body: bytes = json.dumps(YES).encode()
    head: str = ""
    asked: list[Question] = field(default_factory=list)
    answering: asyncio.Event = field(default_factory=asyncio.Event)
    arrived: asyncio.Condition = field(default_factory=asyncio.Condition)
    writers: set[asyncio.StreamWriter] = field(default_factory=set)
    most_at_once: int = 0

    @property
    def url(self) -> str:
        """Where it is."""
        return f"{self.scheme}://localhost:{self.port}/auth/internal"

    def say(self, **answer: Any) -> None:
        """Answer with this from now on."""
        self.body = json.dumps(answer).encode()

    async def until_asked(self, count: int) -> None:
        """Return when so many questions have arrived."""
        async with asyncio.timeout(60), self.arrived:
            await self.arrived.wait_for(lambda: len(self.asked) >= count)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer what comes on one connection."""
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
        self.asked.append(Question(first.split()[1], {name.lower(): value for name, _, value in pairs}))
        async with self.arrived:
            self.arrived.notify_all()
        await self.answering.wait()
        answer = f"HTTP/1.1 {self.status} So\r\nContent-Length: {len(self.body)}\r\n{self.head}\r\n".encode()
        writer.write(answer + self.body)
        await writer.drain()


@asynccontextmanager
async def other_program(*, tls: ssl.SSLContext | None = None) -> AsyncIterator[OtherProgram]:
    """Run the program; it says yes to everything at once."""
    program = OtherProgram(scheme="http" if tls is None else "https")
    program.answering.set()
    server = await asyncio.start_server(program.serve, "127.0.0.1", 0, ssl=tls)
    program.port = server.sockets[0].getsockname()[1]
    try:
        yield program
    finally:
        program.answering.set()
        server.close()
        for writer in list(program.writers):
            writer.transport.abort()
        await server.wait_closed()

"""A proxy between a browser and a daemon whose connections can be cut."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_PIECE_BYTES = 65_536


class Wire:
    """Carries TCP connections to a port; out of its socket it carries none, and those who try are counted.

    Attributes:
        tries: Connections that were tried since it was pulled out.
    """

    def __init__(self, port: int) -> None:
        self.tries = 0
        self._port = port
        self._plugged = True
        self._tried = asyncio.Condition()
        self._ends: set[asyncio.StreamWriter] = set()

    def pull_out(self) -> None:
        """Cut what is connected, and let nothing through from now on."""
        self.tries = 0
        self._plugged = False
        self.cut()

    def plug_in(self) -> None:
        """Let connections through again."""
        self._plugged = True

    def cut(self) -> None:
        """Cut what is connected now."""
        for end in self._ends:
            end.transport.abort()

    async def tried(self, times: int) -> None:
        """Wait until this many attempts have failed."""
        async with self._tried:
            await self._tried.wait_for(lambda: self.tries >= times)

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection until one of its ends is gone."""
        if not self._plugged:
            writer.transport.abort()
            async with self._tried:
                self.tries += 1
                self._tried.notify_all()
            return
        with contextlib.suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
            ends = {writer, far_writer}
            self._ends |= ends
            await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
            self._ends -= ends

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_PIECE_BYTES):
                writer.write(data)
                await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def wire_to(port: int) -> AsyncIterator[tuple[Wire, str]]:
    """A wire, and where a page comes from at its near end."""
    wire = Wire(port)
    server = await asyncio.start_server(wire.carry, "127.0.0.1", 0)
    try:
        yield wire, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        wire.pull_out()
        server.close()
        await server.wait_closed()

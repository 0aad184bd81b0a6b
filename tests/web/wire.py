"""A proxy between browser and daemon whose connections can be cut."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_PIECE_BYTES = 65_536


class CuttableProxy:
    """Forwards TCP connections to a port; while disconnected it refuses and counts them.

    Attributes: tries counts the connections attempted since it was disconnected.
    """

    def __init__(self, port: int) -> None:
        self.tries = 0
        self._port = port
        self._plugged = True
        self._tried = asyncio.Condition()
        self._ends: set[asyncio.StreamWriter] = set()

    def pull_out(self) -> None:
        """Cut all connections and refuse new ones."""
        self.tries = 0
        self._plugged = False
        self.cut()

    def plug_in(self) -> None:
        """Accept connections again."""
        self._plugged = True

    def cut(self) -> None:
        """Cut all connections."""
        for end in self._ends:
            end.transport.abort()

    async def tried(self, times: int) -> None:
        """Wait until so many attempts have failed."""
        async with self._tried:
            await self._tried.wait_for(lambda: self.tries >= times)

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection until one end closes."""
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
async def proxy_to(port: int) -> AsyncIterator[tuple[CuttableProxy, str]]:
    """Yield a proxy and the page's origin behind it."""
    wire = CuttableProxy(port)
    server = await asyncio.start_server(wire.carry, "127.0.0.1", 0)
    try:
        yield wire, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        wire.pull_out()
        server.close()
        await server.wait_closed()

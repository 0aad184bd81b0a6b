"""The process of tunnels and hosts of RPC servers, all in this process, with a server that returns what it gets."""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import msgspec

from inferencecenter.cluster.certificates import FRONT_NAME, ClusterCertificates
from inferencecenter.cluster.rpc_host import RpcHost
from inferencecenter.cluster.rpc_tunnel import (
    ExpectHost,
    ForgetHost,
    HostConnected,
    HostLost,
    RpcTunnelProcess,
    TunnelListening,
    TunnelSettings,
)
from inferencecenter.ipc.link import LinkTicket
from inferencecenter.ipc.rpc_tunnel import RpcServerEnded
from tests.supervisor.harness import TIMEOUT_S

if TYPE_CHECKING:
    import ssl
    from pathlib import Path

    from inferencecenter.cluster.rpc_tunnel import TunnelEvent

Told = TypeVar("Told", TunnelListening, HostConnected, HostLost)
KEY = "a key"
NAME = "model/rpc/box"


class EchoServer:
    """Returns what it gets; stands for ``RpcServer``."""

    def __init__(self) -> None:
        self.port = 0
        self.connections: list[asyncio.StreamWriter] = []
        self.connected = asyncio.Event()
        self.closed = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()
        self.end: asyncio.Future[RpcServerEnded] = asyncio.get_running_loop().create_future()

    async def open(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        """Stop listening, and close the connections."""
        self._server.close()
        for writer in self.connections:
            writer.transport.abort()

    async def ended(self) -> RpcServerEnded:
        """Wait for ``end``."""
        return await asyncio.shield(self.end)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.append(writer)
        self.connected.set()
        with suppress(ConnectionError):
            while data := await reader.read(65_536):
                await self.reads.wait()
                writer.write(data)
                await writer.drain()
        writer.close()
        self.closed.set()


@dataclass
class TunnelBench:
    """Tunnels with what they tell."""

    certificates: ClusterCertificates
    lost_after_s: float = 3.0
    events: asyncio.Queue[TunnelEvent] = field(default_factory=asyncio.Queue)
    commands: asyncio.StreamReader = field(default_factory=asyncio.StreamReader)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    servers: list[EchoServer] = field(default_factory=list)
    port: int = 0

    @classmethod
    async def open(cls, folder: Path, *, lost_after_s: float = 3.0) -> TunnelBench:
        """Start the tunnels."""
        bench = cls(ClusterCertificates(folder / "cluster"), lost_after_s)
        certificate, key = bench.certificates.issue_server()
        settings = TunnelSettings(
            host="127.0.0.1",
            port=0,
            authority=bench.certificates.authority,
            certificate=certificate,
            certificate_key=key,
            lost_after_s=lost_after_s,
        )
        bench.spawn(RpcTunnelProcess(settings, tell=bench.events.put_nowait).run(bench.commands))
        listening = await bench.next(TunnelListening)
        bench.port = listening.port
        return bench

    def spawn(self, coroutine: object) -> asyncio.Task[None]:
        """Run something until ``close``."""
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(coroutine)  # type: ignore[arg-type]
        self.tasks.add(task)
        return task

    async def next(self, kind: type[Told]) -> Told:
        """Return the next event, which is of this kind."""
        event = await asyncio.wait_for(self.events.get(), TIMEOUT_S)
        assert isinstance(event, kind), event
        return event

    def send(self, command: ExpectHost | ForgetHost) -> None:
        """Command the tunnels."""
        self.commands.feed_data(msgspec.json.encode(command) + b"\n")

    def ticket(self, key: str = KEY) -> LinkTicket:
        """Have a host with ``KEY`` expected, and return its ticket, or one with another key."""
        self.send(ExpectHost(NAME, hashlib.sha256(KEY.encode()).hexdigest()))
        certificate, certificate_key = self.certificates.issue(NAME)
        return LinkTicket(
            engine=NAME,
            epoch=0,
            key=key,
            address=("127.0.0.1", self.port),
            authority=self.certificates.authority,
            certificate=certificate,
            certificate_key=certificate_key,
            lost_after_s=self.lost_after_s,
            orphan_s=0,
        )

    def run_host(self, ticket: LinkTicket, server: EchoServer) -> tuple[RpcHost, asyncio.Task[None]]:
        """Run the host of a server."""
        host = RpcHost(ticket, server)  # type: ignore[arg-type]
        return host, self.spawn(host.serve())

    async def connected(self, server: EchoServer) -> tuple[RpcHost, asyncio.Task[None], int]:
        """Run an accepted host; return it with the port at which engines connect."""
        await server.open()
        self.servers.append(server)
        host, task = self.run_host(self.ticket(), server)
        return host, task, (await self.next(HostConnected)).port

    async def connect(
        self, address: tuple[str, int], context: ssl.SSLContext | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return a connection that ``close`` closes."""
        name = FRONT_NAME if context else None
        reader, writer = await asyncio.open_connection(*address, ssl=context, server_hostname=name)
        self.writers.append(writer)
        return reader, writer

    async def engine(self, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return a connection as an engine's."""
        return await self.connect(("127.0.0.1", port))

    async def lost(self) -> HostLost:
        """Return the loss of the host."""
        return await self.next(HostLost)

    async def close(self) -> None:
        """End everything."""
        for writer in self.writers:
            writer.transport.abort()
            with suppress(OSError):
                await writer.wait_closed()
        self.commands.feed_eof()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for server in self.servers:
            server.close()
        await asyncio.sleep(0.05)  # transports are closed in later turns of the loop

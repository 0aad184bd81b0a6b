"""Hosts in processes of this machine, behind a proxy that can break their connections."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from inferencecenter.cluster.certificates import ClusterCertificates
from inferencecenter.cluster.file_transfer import FileServer
from inferencecenter.cluster.node import DIRECTORY_VARIABLE
from inferencecenter.config.sections import EngineSettings
from inferencecenter.supervisor.remote import HostListener, HostRegistry, RemoteLauncher

if TYPE_CHECKING:
    from pathlib import Path

    from inferencecenter.ipc.link import LinkTicket

STUB_HOST = "tests.cluster.stub_host"
HOST = "inferencecenter.cluster.engine_host"


@dataclass
class LocalStarter:
    """Starts hosts as children, and keeps their tickets; implements ``HostStarter``.

    Each is a machine of its own unless they share the directory of the first. ``within`` is what makes a command run in
    a network namespace.
    """

    directory: Path
    shares_directory: bool = False
    module: str = STUB_HOST
    address: tuple[str, int] | None = None
    within: tuple[str, ...] = ()
    tickets: list[LinkTicket] = field(default_factory=list)
    hosts: list[subprocess.Popen[bytes]] = field(default_factory=list)
    started: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self, ticket: LinkTicket) -> None:
        """Start a host, which connects to ``address`` if one is given."""
        self.tickets.append(ticket)
        if self.address is not None:
            ticket = msgspec.structs.replace(ticket, address=self.address)
        self.hosts.append(await asyncio.to_thread(self._spawn, ticket))
        self.started.set()

    def _spawn(self, ticket: LinkTicket) -> subprocess.Popen[bytes]:
        number = "0" if self.shares_directory else str(len(self.hosts))
        host = subprocess.Popen(
            [*self.within, sys.executable, "-m", self.module],
            stdin=subprocess.PIPE,
            env={**os.environ, DIRECTORY_VARIABLE: str(self.directory / number)},
        )
        assert host.stdin is not None
        host.stdin.write(msgspec.json.encode(ticket) + b"\n")
        host.stdin.flush()
        return host

    def signal(self, which: signal.Signals) -> None:
        """Send the last host a signal."""
        self.hosts[-1].send_signal(which)

    async def ended(self) -> None:
        """Wait until the last host has ended."""
        await asyncio.to_thread(self.hosts[-1].wait, 60)

    def clean_up(self) -> None:
        """End all hosts."""
        for host in self.hosts:
            assert host.stdin is not None
            host.stdin.close()
            host.kill()
            host.wait(60)


class Proxy:
    """Forwards TCP connections, until it is told to hold or to reset them."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._flows = asyncio.Event()
        self._flows.set()
        self._refuses = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._pumps: set[asyncio.Task[None]] = set()

    async def open(self) -> tuple[str, int]:
        """Listen, and return the address."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return ("127.0.0.1", self._server.sockets[0].getsockname()[1])

    def hold(self) -> None:
        """Forward nothing until ``release``: a partition, in which no end is told of anything."""
        self._flows.clear()

    def release(self) -> None:
        """Forward again, what was sent meanwhile first."""
        self._flows.set()

    def cut(self, *, refuse: bool = False) -> None:
        """Reset all connections, and with ``refuse`` those that follow."""
        self._refuses = refuse
        for writer in tuple(self._writers):
            writer.transport.abort()

    async def close(self) -> None:
        """Stop listening, and drop all connections."""
        assert self._server is not None
        self._server.close()
        self.cut()
        for pump in tuple(self._pumps):
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refuses:
            writer.transport.abort()
            return
        there, back = await asyncio.open_connection(*self._target)
        self._writers |= {writer, back}
        for source, sink in ((reader, back), (there, writer)):
            pump = asyncio.get_running_loop().create_task(self._pump(source, sink))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(65_536):
                await self._flows.wait()
                sink.write(data)
                await sink.drain()
        self._writers.discard(sink)
        sink.close()


@dataclass
class Front:
    """A front's listener with its starter, and a proxy between them and the hosts."""

    state_dir: Path
    starter: LocalStarter
    listener: HostListener
    launcher: RemoteLauncher
    proxy: Proxy
    files: FileServer

    @classmethod
    async def open(
        cls,
        state_dir: Path,
        *,
        starter: LocalStarter | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        orphan_s: float = 30.0,
    ) -> Front:
        """Return a front with this state directory, which listens on ``host``."""
        certificates, registry = ClusterCertificates(state_dir / "cluster"), HostRegistry(state_dir / "hosts.json")
        listener = HostListener(
            certificates,
            registry,
            lost_after_s=3.0,
            orphan_s=orphan_s,
        )
        await listener.open(host, port)
        proxy = Proxy(listener.address)
        starter = starter or LocalStarter(state_dir / "node")
        starter.address = starter.address or await proxy.open()
        files = FileServer(certificates, registry, bytes_per_s=0)
        files.open("127.0.0.1", 0)
        launcher = RemoteLauncher(
            "stub", EngineSettings(backend="echo"), listener=listener, starter=starter, files=files
        )
        return cls(state_dir, starter, listener, launcher, proxy, files)

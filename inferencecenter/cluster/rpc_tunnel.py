"""The tunnels to RPC servers on other machines, in a process of their own beside the daemon.

``python -m inferencecenter.cluster.rpc_tunnel`` reads ``TunnelSettings`` as a line of JSON from standard input, then
commands, and writes events. Hosts of RPC servers connect to it by TLS. For each it listens on a free port of the
loopback interface, to which engines of the daemon connect; llama.cpp knows neither encryption nor authentication. What
an engine computes on another machine passes through here, so none of it is work of the daemon's event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias, cast

import msgspec
import structlog
import uvloop

from inferencecenter import __version__
from inferencecenter.cluster.certificates import server_context
from inferencecenter.cluster.rpc_streams import TunnelEnd, TunnelStream
from inferencecenter.core.errors import reason_of
from inferencecenter.core.tasks import TaskGroup
from inferencecenter.ipc.engine_child import die_with_parent
from inferencecenter.ipc.link import MAX_HELLO_BYTES
from inferencecenter.ipc.rpc_tunnel import (
    MAX_TUNNEL_FRAME_BYTES,
    FromRpcHost,
    RpcServerEnded,
    StreamOpened,
    ToRpcHost,
    TunnelHello,
    TunnelRefused,
    TunnelWelcome,
    from_rpc_host_decoder,
)
from inferencecenter.supervisor.remote import HELLO_TIMEOUT_S, MAX_STRANGERS

if TYPE_CHECKING:
    from collections.abc import Callable

_LOOPBACK: Final = "127.0.0.1"
_MAX_LINE_BYTES: Final = 2**20
_log = structlog.get_logger(__name__)


class TunnelSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where hosts connect, and the certificates; all are PEM."""

    host: str
    port: int
    authority: str
    certificate: str
    certificate_key: str
    lost_after_s: float


class ExpectHost(msgspec.Struct, frozen=True, tag=True):
    """Accept one host of this name with the key of this SHA-256 digest, and drop an earlier one."""

    name: str
    key_digest: str


class ForgetHost(msgspec.Struct, frozen=True, tag=True):
    """Drop the host of this name, and accept none."""

    name: str


class TunnelListening(msgspec.Struct, frozen=True, tag=True):
    """Hosts can connect at this port, or cannot because of ``error``."""

    port: int = 0
    error: str = ""


class HostConnected(msgspec.Struct, frozen=True, tag=True):
    """Engines reach the server of this name at this port of the loopback interface."""

    name: str
    port: int


class HostLost(msgspec.Struct, frozen=True, tag=True):
    """The tunnel of this name has ended; ``server`` says how the server ended, if it is that."""

    name: str
    reason: str
    server: RpcServerEnded | None = None


TunnelCommand: TypeAlias = ExpectHost | ForgetHost
TunnelEvent: TypeAlias = TunnelListening | HostConnected | HostLost


class _HostTunnel(TunnelEnd[ToRpcHost, FromRpcHost]):
    """The tunnel of one host, from its connection on.

    Args:
        admit: Returns the answer to the first message.
        lost_after_s: See ``TunnelEnd``; before the first message it is ``HELLO_TIMEOUT_S``.
    """

    def __init__(
        self, *, admit: Callable[[_HostTunnel, TunnelHello], TunnelWelcome | TunnelRefused], lost_after_s: float
    ) -> None:
        self._decoder = from_rpc_host_decoder(max_frame_bytes=MAX_HELLO_BYTES)
        super().__init__(self._decoder, lost_after_s=HELLO_TIMEOUT_S)
        self._admit = admit
        self._accepted_lost_after_s = lost_after_s
        self._opened = 0
        self.hello: TunnelHello | None = None
        self.ended: RpcServerEnded | None = None

    def beat(self) -> None:
        if self.hello is not None:
            super().beat()

    def receive(self, message: FromRpcHost) -> None:
        if self.hello is None and not isinstance(message, TunnelHello):
            self.channel.give_up("the first message is no hello")
        else:
            super().receive(message)

    def on_message(self, message: FromRpcHost) -> None:
        match message:
            case TunnelHello() if self.hello is None:
                answer = self._admit(self, message)
                self.channel.send(answer)
                if isinstance(answer, TunnelRefused):
                    _log.warning("rpc_host_refused", name=message.name, node=message.node, reason=answer.reason)
                    self.channel.close()
                    return
                self.hello = message
                self.lost_after_s = self._accepted_lost_after_s
                self._decoder.max_frame_bytes = MAX_TUNNEL_FRAME_BYTES
                if message.ended is not None:
                    self._server_ended(message.ended)
            case RpcServerEnded():
                self._server_ended(message)
            case _:
                self.channel.give_up("an unexpected message")

    def _server_ended(self, ended: RpcServerEnded) -> None:
        self.ended = ended
        self.channel.close()

    def open_stream(self) -> asyncio.Protocol:
        """Return the protocol of an engine's connection."""
        self._opened += 1
        return _EngineSocket(self, self._opened)


class _EngineSocket(TunnelStream):
    """An engine's connection. One of another user of this machine is closed: the key of the host is not theirs."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if (owner := _owner(transport.get_extra_info("peername"))) != os.getuid():
            _log.warning("rpc_client_refused", uid=owner)
            cast("asyncio.Transport", transport).abort()
            return
        self._tunnel.channel.send(StreamOpened(self.number))
        self._tunnel.add(self)
        super().connection_made(transport)


def _owner(address: tuple[str, int]) -> int | None:
    """Return the user of the process of this machine that has this end of a connection."""
    host, port = address
    wanted = f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}:{port:04X}"
    with Path("/proc/net/tcp").open(encoding="ascii") as table:
        return next((int(fields[7]) for fields in map(str.split, table) if fields[1] == wanted), None)


class RpcTunnelProcess:
    """Accepts hosts of RPC servers, and engines that use them.

    Args:
        settings: From the daemon.
        tell: Writes an event.
    """

    def __init__(self, settings: TunnelSettings, *, tell: Callable[[TunnelEvent], None]) -> None:
        self._settings = settings
        self._tell = tell
        self._expected: dict[str, str] = {}
        self._connections: set[_HostTunnel] = set()
        self._accepted: dict[str, _HostTunnel] = {}
        self._tasks = TaskGroup("rpc-tunnel")

    async def run(self, commands: asyncio.StreamReader) -> None:
        """Serve until there are no more commands."""
        settings = self._settings
        context = server_context(settings.authority, settings.certificate, settings.certificate_key)
        try:
            server = await asyncio.get_running_loop().create_server(
                self._accept, settings.host, settings.port, ssl=context, ssl_handshake_timeout=HELLO_TIMEOUT_S
            )
        except OSError as error:
            self._tell(TunnelListening(error=reason_of(error)))
            return
        self._tell(TunnelListening(port=server.sockets[0].getsockname()[1]))
        try:
            while line := await commands.readline():
                match msgspec.json.decode(line, type=TunnelCommand):
                    case ExpectHost(name=name, key_digest=digest):
                        self._expected[name] = digest
                        self._drop(name, "another host takes its place")
                    case ForgetHost(name=name):
                        self._expected.pop(name, None)
                        self._drop(name, "it is not needed any more")
        finally:
            server.close()
            for tunnel in self._connections:
                tunnel.channel.abort()
            await self._tasks.cancel()

    def _drop(self, name: str, reason: str) -> None:
        if (tunnel := self._accepted.pop(name, None)) is not None:
            tunnel.channel.give_up(reason)

    def _accept(self) -> asyncio.Protocol:
        tunnel = _HostTunnel(admit=self._admit, lost_after_s=self._settings.lost_after_s)
        self._connections.add(tunnel)
        if sum(each.hello is None for each in self._connections) > MAX_STRANGERS:
            tunnel.channel.give_up("too many connections")
        self._tasks.spawn(self._serve(tunnel), name="host")
        return tunnel.channel

    def _admit(self, tunnel: _HostTunnel, hello: TunnelHello) -> TunnelWelcome | TunnelRefused:
        if hello.version != __version__:
            return TunnelRefused(f"the daemon has version {__version__}, the host {hello.version}")
        digest = hashlib.sha256(hello.key.encode()).hexdigest()
        if not hmac.compare_digest(digest, self._expected.get(hello.name, "")):
            return TunnelRefused("another host has taken its place, or its ticket was used")
        del self._expected[hello.name]
        self._accepted[hello.name] = tunnel
        if hello.ended is None:
            self._tasks.spawn(self._listen(tunnel, hello.name), name="listen")
        return TunnelWelcome()

    async def _listen(self, tunnel: _HostTunnel, name: str) -> None:
        """Accept engines until the tunnel is lost."""
        server = await asyncio.get_running_loop().create_server(tunnel.open_stream, _LOOPBACK, 0)
        self._tell(HostConnected(name, server.sockets[0].getsockname()[1]))
        try:
            await tunnel.channel.lost()
        finally:
            server.close()

    async def _serve(self, tunnel: _HostTunnel) -> None:
        try:
            reason = await tunnel.run()
        finally:
            self._connections.discard(tunnel)
        if (hello := tunnel.hello) is not None and self._accepted.get(hello.name) is tunnel:
            del self._accepted[hello.name]
            self._tell(HostLost(hello.name, reason or "its connection was closed", tunnel.ended))


async def _run() -> None:
    commands = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    settings = msgspec.json.decode(await commands.readline(), type=TunnelSettings)

    def tell(event: TunnelEvent) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(event) + b"\n")
        sys.stdout.buffer.flush()

    await RpcTunnelProcess(settings, tell=tell).run(commands)


def main() -> int:
    """Run the process until its standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    uvloop.run(_run())
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The host of an RPC server of llama.cpp: the process beside it that connects it to a daemon on another machine.

``python -m inferencecenter.cluster.rpc_host`` reads a ``LinkTicket`` as a line of JSON from standard input. It starts
the server, connects to the daemon's tunnel (``ipc/rpc_tunnel.py``), and carries the bytes of engines to the server. It
ends with its parent, with the server, and with its connection: the engine is lost then, and the next one has a new
server. So no server outlives the engine that it is for.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import Final

import structlog

from inferencecenter import __version__
from inferencecenter.cluster.host_process import connect, run_host
from inferencecenter.cluster.rpc_streams import TunnelEnd, TunnelStream
from inferencecenter.core.errors import reason_of
from inferencecenter.core.tasks import TaskGroup
from inferencecenter.ipc.engine_child import engine_environment
from inferencecenter.ipc.link import LinkTicket
from inferencecenter.ipc.rpc_tunnel import (
    FromRpcHost,
    RpcServerEnded,
    StreamOpened,
    ToRpcHost,
    TunnelHello,
    TunnelRefused,
    TunnelWelcome,
    to_rpc_host_decoder,
)

SERVER: Final = "inferencecenter.engine.llama.rpc_server"
_DEATH_S: Final = 1.0
"""How long a server that dies takes to be reaped after its connections are closed."""
_MAX_LINE_BYTES: Final = 64 * 1024
_MAX_SHOWN_CHARS: Final = 400
_LOOPBACK: Final = "127.0.0.1"
_log = structlog.get_logger(__name__)


class RpcServer:
    """A running RPC server; ``port`` is 0 if it has ended before it listened."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._last_line = ""
        self._tasks = TaskGroup("rpc-server")
        self._output = self._tasks.spawn(self._log_output(), name="output")
        self.port = 0

    @classmethod
    async def start(cls) -> RpcServer:
        """Start a server, and wait until it listens or has ended."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            SERVER,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=engine_environment(os.environ),
            limit=_MAX_LINE_BYTES,
        )
        assert process.stdout is not None, "it was started with pipes"
        server = cls(process)
        line = await process.stdout.readline()
        server.port = int(line or 0)
        return server

    async def ended(self) -> RpcServerEnded:
        """Wait until it has ended, and return how."""
        status = await self._process.wait()
        await asyncio.wait([self._output])
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        from_outside = status == -signal.SIGKILL
        reason = f": {self._last_line}" if self._last_line and not from_outside else ""
        return RpcServerEnded(detail=f"the RPC server {how}{reason}", from_outside=from_outside)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()

    async def _log_output(self) -> None:
        assert self._process.stderr is not None, "it was started with pipes"
        while chunk := await self._process.stderr.read(_MAX_LINE_BYTES):
            for line in chunk.decode(errors="replace").splitlines():
                if text := line.strip():
                    self._last_line = text[:_MAX_SHOWN_CHARS]
                    _log.info("rpc_server_output", line=text)


class RpcHost(TunnelEnd[FromRpcHost, ToRpcHost]):
    """The tunnel's end beside a server.

    Args:
        ticket: From the daemon.
        server: Its server.
    """

    def __init__(self, ticket: LinkTicket, server: RpcServer) -> None:
        super().__init__(to_rpc_host_decoder(), lost_after_s=ticket.lost_after_s)
        self._ticket = ticket
        self._server = server
        self._is_welcome = False
        self._tasks = TaskGroup("rpc-host")

    async def serve(self) -> None:
        """Connect, and carry bytes until the connection is lost or the server has ended.

        Raises:
            OSError: The daemon cannot be reached, or is not the one that issued the ticket.
        """
        ticket = self._ticket
        ended = None if self._server.port else await self._server.ended()
        await connect(ticket, self.channel)
        self.channel.send(
            TunnelHello(version=__version__, name=ticket.engine, key=ticket.key, node=socket.gethostname(), ended=ended)
        )
        try:
            _log.info("rpc_tunnel_lost", name=ticket.engine, reason=await self.run())
        finally:
            self.channel.abort()
            await self._tasks.cancel()

    def beat(self) -> None:
        if self._is_welcome:
            super().beat()

    def on_message(self, message: ToRpcHost) -> None:
        match message:
            case TunnelWelcome():
                self._is_welcome = True
                if self._server.port:
                    self._tasks.spawn(self._report_end(), name="report-end")
            case TunnelRefused(reason=reason):
                self.channel.give_up(reason)
            case StreamOpened(stream=number):
                stream = TunnelStream(self, number)
                self.add(stream)
                self.channel.pause_reading()
                self._tasks.spawn(self._connect(stream), name="connect")
            case _:
                self.channel.give_up("an unexpected message")

    def lose(self, number: int) -> None:
        """Tell the daemon that the server has closed a connection, but first how it has ended if that is the cause."""
        self._tasks.spawn(self._lose(number), name="lose")

    async def _lose(self, number: int) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_DEATH_S):
                await self._server.ended()
        super().lose(number)

    async def _connect(self, stream: TunnelStream) -> None:
        """Connect to the server; what the engine has sent meanwhile is kept."""
        try:
            await asyncio.get_running_loop().create_connection(lambda: stream, _LOOPBACK, self._server.port)
        except OSError:
            self.lose(stream.number)
        finally:
            self.channel.resume_reading()

    async def _report_end(self) -> None:
        ended = await self._server.ended()
        self.channel.send(ended)
        self.channel.close()


async def _run(ticket: LinkTicket) -> None:
    server = await RpcServer.start()
    try:
        await RpcHost(ticket, server).serve()
    except (OSError, ValueError) as error:
        _log.warning("rpc_tunnel_not_reached", name=ticket.engine, reason=reason_of(error))
    finally:
        server.kill()


def main() -> int:
    return run_host(_run)


if __name__ == "__main__":
    sys.exit(main())

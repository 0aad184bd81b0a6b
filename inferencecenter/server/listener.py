"""uvicorn's server with our own end: no signal handlers, no tick, and a shutdown that lets turns finish first.

uvicorn's own signal handler closes sockets within 30 ms of a signal, and its main loop wakes ten times a second to
look at a flag and the clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import socket
import sys
from email.utils import formatdate
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import uvicorn
from uvicorn.server import ServerState

from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.server.acceptor import Acceptor
from inferencecenter.server.crowd import Crowd
from inferencecenter.server.http import Http
from inferencecenter.server.websocket import WebSocket
from inferencecenter.telemetry.log_limit import LogLimit

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from starlette.datastructures import Headers
    from starlette.types import ASGIApp

    from inferencecenter.settings import ServerSettings

CLOSING_S: Final = 2.0
"""How long connections get to close when the daemon stops, before they are aborted."""
_BACKLOG: Final = 2048
_ROOM: Final = 64
"""Connections that wait for a request and are closed when there are no descriptors left."""
_OTHER_DESCRIPTORS: Final = 128
"""Descriptors that the rest of the front may need."""
_BIND_HINTS: Final = {
    errno.EADDRINUSE: "Another program listens there; stop it or choose another server.port.",
    errno.EACCES: "Ports below 1024 need CAP_NET_BIND_SERVICE; choose another server.port.",
    errno.EADDRNOTAVAIL: "server.host is no address of this machine; use 127.0.0.1, 0.0.0.0 or one of its own.",
}


def bind(host: str, port: int) -> list[socket.socket]:
    """Return listening sockets on every address that ``host`` names.

    Raises:
        InferenceCenterError: ``address_in_use`` when one cannot be had.
    """
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(found):
            # With port 0 the first address chooses and the others follow.
            chosen = sockets[0].getsockname()[1] if sockets else port
            listening = socket.socket(family, kind, protocol)
            sockets.append(listening)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listening.bind((address[0], chosen, *address[2:]))
            listening.listen(_BACKLOG)
            listening.setblocking(False)
    except OSError as error:
        for listening in sockets:
            listening.close()
        raise InferenceCenterError(
            ErrorCode.ADDRESS_IN_USE,
            f"cannot listen on {host}:{port}: {error.strerror}",
            field="server.port" if error.errno == errno.EADDRINUSE else "server.host",
            hint=_BIND_HINTS.get(error.errno or 0),
        ) from error
    return sockets


def address(sockets: Sequence[socket.socket], settings: ServerSettings) -> str:
    """Return where clients find the daemon that listens on these sockets, as a URL.

    A name that was asked for is kept; sockets that were inherited tell their own address.
    """
    found, port = sockets[0].getsockname()[:2]
    host = settings.host if any(found == each[4][0] for each in _addresses(settings.host)) else found
    shown = f"[{host}]" if ":" in host else host
    scheme = "http" if settings.certfile is None else "https"
    return f"{scheme}://{shown}:{port}{settings.base_path}/"


def _addresses(host: str) -> list[tuple[Any, ...]]:
    try:
        return [*socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)]
    except OSError:
        return []


class _State(ServerState):
    """What uvicorn's protocols share, with a Date header made when an answer needs one."""

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        return [(b"date", formatdate(usegmt=True).encode())]

    @default_headers.setter
    def default_headers(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Take uvicorn's initial list, which is empty: there are no other headers."""


def _descriptors_for_http() -> int:
    """Return how many descriptors may be taken before a request has come: half, and the others are for sockets."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, (soft - _OTHER_DESCRIPTORS) // 2) if soft != resource.RLIM_INFINITY else sys.maxsize


def _nobody(_status: int) -> None:
    """Hear of no refusal."""


def _nothing_against(_peer: str, _headers: Headers) -> None:
    """Refuse no upgrade."""


class Listener(uvicorn.Server):
    """The one port.

    Args:
        app: The ASGI application.
        settings: Limits and keepalive.
        drain: Awaited when ``stop`` was called and nobody new is accepted: tells clients, and lets turns finish.
        tls: The side of TLS that listens; without it the port speaks plainly.
        refused: Called with the HTTP status when a connection is turned away unheard.
        connected: Called when a connection was made.
        refusal: Given the peer and the headers of an upgrade, returns the answer to one that is refused.
    """

    def __init__(  # noqa: PLR0913 - keyword-only
        self,
        app: ASGIApp,
        settings: ServerSettings,
        *,
        drain: Callable[[], Awaitable[None]],
        tls: ssl.SSLContext | None = None,
        refused: Callable[[int], object] = _nobody,
        connected: Callable[[], object] = lambda: None,
        refusal: Callable[[str, Headers], bytes | None] = _nothing_against,
    ) -> None:
        self._settings = settings
        self._tls = tls
        self.crowd: Crowd[Http] = Crowd(min(settings.max_connections, _descriptors_for_http()))
        http = partial(
            Http,
            crowd=self.crowd,
            head_timeout_s=settings.head_timeout_s,
            refused=refused,
            connected=connected,
            refusal=refusal,
        )
        super().__init__(
            uvicorn.Config(
                app,
                ws=cast("type[asyncio.Protocol]", partial(WebSocket, bad_frames=LogLimit())),
                ws_max_size=settings.max_frame_bytes,
                ws_ping_interval=settings.ping_interval_s,
                ws_ping_timeout=settings.ping_timeout_s,
                ws_per_message_deflate=False,
                http=cast("type[asyncio.Protocol]", http),  # called as the class would be
                timeout_keep_alive=cast("int", settings.keep_alive_s),  # handed to `call_later`
                lifespan="off",
                interface="asgi3",
                proxy_headers=False,
                server_header=False,
                log_config=None,
                # uvicorn logs whole request targets at info, and a query may hold what should not be logged.
                log_level=logging.WARNING,
                access_log=False,
            )
        )
        self.server_state = _State()
        self._drain = drain
        self._stopping = asyncio.Event()
        self._acceptors: list[Acceptor] = []

    @property
    def n_connections(self) -> int:
        """How many connections are open, of every kind."""
        return len(self.server_state.connections)

    def stop(self) -> None:
        """Begin the end: ``serve`` returns when clients have been told and have gone, or their time is up."""
        self.should_exit = True
        self._stopping.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone; the daemon has its own handlers."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections on these sockets."""
        config = self.config
        protocol = partial(
            cast("Callable[..., asyncio.Protocol]", config.http_protocol_class),
            config=config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        for listening in sockets or ():
            listening.setblocking(False)
            acceptor = Acceptor(
                listening,
                protocol,
                tls=self._tls,
                handshake_timeout_s=self._settings.head_timeout_s,
                max_handshakes=self._settings.max_connections,
                make_room=partial(self.crowd.make_room, _ROOM),
            )
            acceptor.open()
            self._acceptors.append(acceptor)
        self.started = True

    async def main_loop(self) -> None:
        """Wait until ``stop``."""
        await self._stopping.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept nobody new, drain, close what is left, and abort what does not close."""
        for acceptor in self._acceptors:
            acceptor.close()
        for listening in sockets or ():
            listening.close()
        await self._drain()
        remaining = list(self.server_state.connections)
        for connection in remaining:
            connection.shutdown()
        ends = [connection.lost for connection in remaining if isinstance(connection, WebSocket)]
        if waiting := [*ends, *self.server_state.tasks]:
            await asyncio.wait(waiting, timeout=CLOSING_S)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        for task in self.server_state.tasks:
            task.cancel()
        for acceptor in self._acceptors:
            await acceptor.wait_closed()

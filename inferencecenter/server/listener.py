"""uvicorn's server with a different life cycle: no signal handlers, no tick, and a shutdown that lets turns finish.

uvicorn's own signal handler closes sockets within 30 ms of a signal, and its main loop wakes ten times a second to
check a flag and the clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import socket
import ssl
import stat
import sys
from email.utils import formatdate
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import structlog
import uvicorn
from uvicorn.server import ServerState

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.core.tasks import TaskGroup
from inferencecenter.server.connection_limits import ConnectionLimiter
from inferencecenter.server.http import HttpConnection
from inferencecenter.server.unix_socket import peer_text
from inferencecenter.server.websocket import PEER_KEY, WebSocket
from inferencecenter.telemetry.logs import LogLimit

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

    from starlette.datastructures import Headers
    from starlette.types import ASGIApp, Receive, Scope, Send

    from inferencecenter.config.settings import ServerSettings


# Acceptor: accepts connections, and survives the exhaustion of file descriptors.
#
# On exhaustion libuv, on which uvloop is built, silently accepts and closes pending connections, and where it cannot
# even do that, uvloop closes the listening socket for good. Here the reason is logged, idle connections are closed to
# make room, and the backlog is accepted once descriptors are free.

RETRY_S: Final = 0.5
"""Pause in accepting after an error that does not concern a single connection."""

_log = structlog.get_logger(__name__)


class Acceptor:
    """Accepts the connections of one listening socket.

    Args:
        listening: The bound and listening socket; the caller closes it.
        protocol: Creates the protocol of a connection from an address.
        tls: Server-side TLS context; without it connections are in plain text.
        handshake_timeout_s: Timeout of a TLS handshake.
        max_handshakes: Maximum number of concurrent handshakes; one more aborts the oldest.
        make_room: Called when no more connections can be accepted; closes idle ones.
        delay_s: Returns how long a connection from an address waits before it is read.
    """

    def __init__(  # noqa: PLR0913 - keyword-only
        self,
        listening: socket.socket,
        protocol: Callable[[str], asyncio.Protocol],
        *,
        tls: ssl.SSLContext | None,
        handshake_timeout_s: float,
        max_handshakes: int,
        make_room: Callable[[], object],
        delay_s: Callable[[str], float],
    ) -> None:
        self._listening = listening
        self._protocol = protocol
        self._options: dict[str, Any] = {"ssl": tls, "ssl_handshake_timeout": handshake_timeout_s} if tls else {}
        self._max_handshakes = max_handshakes
        self._make_room = make_room
        self._delay_s = delay_s
        self._loop = asyncio.get_running_loop()
        self._tasks = TaskGroup("acceptor")
        self._handshakes: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._failures = LogLimit()
        self._retry: asyncio.TimerHandle | None = None

    def open(self) -> None:
        """Start accepting."""
        self._retry = None
        self._loop.add_reader(self._listening.fileno(), self._accept)

    def close(self) -> None:
        """Stop accepting; to be called before the socket is closed."""
        if self._retry is not None:
            self._retry.cancel()
        else:
            self._loop.remove_reader(self._listening.fileno())

    async def wait_closed(self) -> None:
        """Abort the handshakes in progress."""
        await self._tasks.cancel()

    def _accept(self) -> None:
        """Accept one connection; for the backlog the event loop calls again, between its other sources."""
        try:
            connection, address = self._listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):  # the pending connection was aborted
            return
        except OSError as error:
            self._pause(error)
            return
        connection.setblocking(False)
        self._take(connection, peer_text(connection) if connection.family == socket.AF_UNIX else address[0])

    def _pause(self, error: OSError) -> None:
        """Make room and pause, as the listening socket stays readable; then accept again."""
        n_more = self._failures.admit()
        if n_more is not None:
            _log.error(
                "accept_failed",
                error=error.strerror or str(error),
                more=n_more,
                hint="Too many open files: raise LimitNOFILE= or ulimit -n, or lower server.max_connections.",
            )
        self._make_room()
        self._loop.remove_reader(self._listening.fileno())
        self._retry = self._loop.call_later(RETRY_S, self.open)

    def _take(self, connection: socket.socket, address: str) -> None:
        if len(self._handshakes) >= self._max_handshakes:
            oldest = next(iter(self._handshakes))
            del self._handshakes[oldest]
            oldest.cancel()
        task = self._tasks.spawn(self._connect(connection, address, self._delay_s(address)), name="connect")
        self._handshakes[task] = None
        task.add_done_callback(lambda done: self._handshakes.pop(done, None))

    async def _connect(self, connection: socket.socket, address: str, delay_s: float) -> None:
        try:
            if delay_s:
                await asyncio.sleep(delay_s)
            protocol = partial(self._protocol, address)
            await self._loop.connect_accepted_socket(protocol, connection, **self._options)
        except (OSError, ssl.SSLError):  # the peer has gone, does not speak TLS or took too long
            connection.close()


CLOSING_S: Final = 2.0
"""Time for connections to close at shutdown, before they are aborted."""
BACKLOG: Final = 2048
_ROOM: Final = 64
"""Idle connections closed when file descriptors are exhausted."""
_OTHER_DESCRIPTORS: Final = 128
"""File descriptors reserved for the rest of the process."""
_BIND_HINTS: Final = {
    errno.EADDRINUSE: "Another program listens there; stop it or choose another server.port.",
    errno.EACCES: "Ports below 1024 need CAP_NET_BIND_SERVICE; choose another server.port.",
    errno.EADDRNOTAVAIL: "server.host is no address of this machine; use 127.0.0.1, 0.0.0.0 or another local one.",
}


def bind(host: str, port: int) -> list[socket.socket]:
    """Return listening sockets on every address that ``host`` resolves to.

    Raises:
        InferenceCenterError: ``address_in_use`` if one cannot be bound.
    """
    sockets: list[socket.socket] = []
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(addresses):
            # With port 0 the first address picks the port of the others.
            chosen = sockets[0].getsockname()[1] if sockets else port
            listening = socket.socket(family, kind, protocol)
            sockets.append(listening)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listening.bind((address[0], chosen, *address[2:]))
            listening.listen(BACKLOG)
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


OLLAMA_ADDRESS: Final = ("127.0.0.1", 11434)
"""Where Ollama listens."""
OLLAMA_KEY: Final = "ollama"
"""Whether a request came there, in ``state`` of its scope."""


def bind_ollama(host: str = OLLAMA_ADDRESS[0], port: int = OLLAMA_ADDRESS[1]) -> list[socket.socket]:
    """Return a socket that listens where clients of Ollama look for it.

    Raises:
        InferenceCenterError: ``address_in_use``.
    """
    try:
        return bind(host, port)
    except InferenceCenterError as error:
        raise InferenceCenterError(
            error.code,
            error.message,
            field="server.ollama",
            hint="Stop Ollama, or set server.ollama to false.",
        ) from error


def address(sockets: Sequence[socket.socket], settings: ServerSettings) -> str:
    """Return the URL of the daemon that listens on these sockets.

    A configured host name is kept; inherited sockets report their own address.
    """
    addresses, port = sockets[0].getsockname()[:2]
    host = settings.host if any(addresses == each[4][0] for each in _addresses(settings.host)) else addresses
    shown = f"[{host}]" if ":" in host else host
    scheme = "http" if settings.certfile is None else "https"
    return f"{scheme}://{shown}:{port}{settings.base_path}/"


def _addresses(host: str) -> list[tuple[Any, ...]]:
    try:
        return [*socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)]
    except OSError:
        return []


class _State(ServerState):
    """State shared by uvicorn's protocols; the Date header is created on demand."""

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        return [(b"date", formatdate(usegmt=True).encode())]

    @default_headers.setter
    def default_headers(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Accept uvicorn's initial list, which is empty: there are no other headers."""


def _descriptors_for_http() -> int:
    """Return the limit of file descriptors for HTTP connections: half; the others are for sockets."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, (soft - _OTHER_DESCRIPTORS) // 2) if soft != resource.RLIM_INFINITY else sys.maxsize


def _ignore_refusal(_status: int) -> None:
    pass


def _accept_upgrade(_peer: str, _headers: Headers) -> None:
    pass


def _connect_at_once(_address: str) -> float:
    return 0.0


def _protocol_of(
    protocol: Callable[..., asyncio.Protocol], state: Mapping[str, object], is_unix: bool, address: str
) -> asyncio.Protocol:
    """Return the protocol of a connection; uvicorn finds the address of any but a peer on a Unix socket."""
    return protocol(app_state={**state, PEER_KEY: address} if is_unix else dict(state))


class _BelowBasePath:
    """Prefixes the paths of requests on the Unix socket: their clients need not know of a reverse proxy's prefix."""

    def __init__(self, app: ASGIApp, base_path: str) -> None:
        self._app = app
        self._base_path = base_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        base = self._base_path
        if PEER_KEY in scope.get("state", ()) and not (scope["path"] + "/").startswith(base + "/"):
            raw_path = base.encode() + scope["raw_path"]
            scope = {**scope, "path": base + scope["path"], "raw_path": raw_path}
        await self._app(scope, receive, send)


class Listener(uvicorn.Server):
    """The server's port, and its Unix socket.

    Args:
        app: The ASGI application.
        settings: Limits and keepalive.
        drain: Awaited after ``stop``, when no new connection is accepted: announces the shutdown and lets turns finish.
        tls: Server-side TLS context of the port; without it the port is in plain text, as Unix sockets always are.
        ollama: Sockets for clients of Ollama: in plain text all the same; requests have ``OLLAMA_KEY`` in their state.
        refused: Called with the HTTP status when a connection is refused before a request is read.
        connected: Called when a connection was made.
        refusal: Returns the response to a refused upgrade, given the peer and the headers.
        delay_s: Returns how long a new connection from an address waits before it is read.
    """

    def __init__(  # noqa: PLR0913 - keyword-only
        self,
        app: ASGIApp,
        settings: ServerSettings,
        *,
        drain: Callable[[], Awaitable[None]],
        tls: ssl.SSLContext | None = None,
        ollama: Sequence[socket.socket] = (),
        refused: Callable[[int], object] = _ignore_refusal,
        connected: Callable[[], object] = lambda: None,
        refusal: Callable[[str, Headers], bytes | None] = _accept_upgrade,
        delay_s: Callable[[str], float] = _connect_at_once,
    ) -> None:
        self._settings = settings
        self._tls = tls
        self._ollama = ollama
        self._delay_s = delay_s
        self.limiter: ConnectionLimiter[HttpConnection] = ConnectionLimiter(
            min(settings.max_connections, _descriptors_for_http())
        )
        http = partial(
            HttpConnection,
            limiter=self.limiter,
            head_timeout_s=settings.head_timeout_s,
            refused=refused,
            connected=connected,
            refusal=refusal,
        )
        super().__init__(
            uvicorn.Config(
                _BelowBasePath(app, settings.base_path) if settings.base_path else app,
                ws=cast("type[asyncio.Protocol]", partial(WebSocket, bad_frames=LogLimit())),
                ws_max_size=settings.max_frame_bytes,
                ws_ping_interval=settings.ping_interval_s,
                ws_ping_timeout=settings.ping_timeout_s,
                ws_per_message_deflate=False,
                http=cast("type[asyncio.Protocol]", http),  # called like a class
                timeout_keep_alive=cast("int", settings.keep_alive_s),  # passed to `call_later`
                lifespan="off",
                interface="asgi3",
                proxy_headers=False,
                server_header=False,
                log_config=None,
                # uvicorn logs whole request targets at info level, and a query may hold secrets.
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
        """Number of open connections of every kind."""
        return len(self.server_state.connections)

    def stop(self) -> None:
        """Begin the shutdown: ``serve`` returns when clients have left, or at the deadline."""
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
        )
        for listening in sockets or ():
            listening.setblocking(False)
            is_ollama, is_unix = listening in self._ollama, listening.family == socket.AF_UNIX
            state = {**self.lifespan.state, OLLAMA_KEY: is_ollama}
            acceptor = Acceptor(
                listening,
                partial(_protocol_of, protocol, state, is_unix),
                tls=None if is_ollama or is_unix else self._tls,
                handshake_timeout_s=self._settings.head_timeout_s,
                max_handshakes=self._settings.max_connections,
                make_room=partial(self.limiter.evict_idle, _ROOM),
                delay_s=self._delay_s,
            )
            acceptor.open()
            self._acceptors.append(acceptor)
        self.started = True

    async def main_loop(self) -> None:
        """Wait until ``stop``."""
        await self._stopping.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, drain, close the remaining connections, and abort those that do not close."""
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


FIRST_FD: Final = 3
_FAMILIES: Final = (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX)


def inherited_sockets(environment: Mapping[str, str], *, pid: int) -> list[socket.socket]:
    """Return the listening sockets inherited by the process ``pid`` (systemd socket activation); empty without any.

    Reads ``LISTEN_FDS``, ``LISTEN_PID`` and, for messages, ``LISTEN_FDNAMES``. Descriptors passed to another process,
    such as those of a shell that was itself socket-activated, are ignored.

    Raises:
        InferenceCenterError: ``invalid_config`` if one of them is not a listening TCP or Unix socket.
    """
    if environment.get("LISTEN_PID") != str(pid):
        return []
    count = environment.get("LISTEN_FDS", "")
    if not count.isascii() or not count.isdecimal():
        raise _unusable(f"LISTEN_FDS is {count!r}, which is no number")
    names = environment.get("LISTEN_FDNAMES", "").split(":")
    sockets: list[socket.socket] = []
    try:
        for index in range(int(count)):
            name = names[index] if index < len(names) else ""
            sockets.append(_listening(FIRST_FD + index, name))
    except InferenceCenterError:
        for listening in sockets:
            listening.detach()
        raise
    return sockets


def _listening(fd: int, name: str) -> socket.socket:
    what = f"inherited descriptor {fd}{f' ({name})' if name else ''}"
    try:
        mode = os.fstat(fd).st_mode
    except OSError:
        raise _unusable(f"{what} is not open") from None
    if not stat.S_ISSOCK(mode):
        raise _unusable(f"{what} is no socket")
    taken = socket.socket(fileno=fd)
    if taken.family not in _FAMILIES or taken.type != socket.SOCK_STREAM:
        taken.detach()
        raise _unusable(f"{what} is no stream socket of TCP or Unix")
    if not taken.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        taken.detach()
        raise _unusable(f"{what} does not listen", hint="The socket unit must have Accept=no.")
    taken.set_inheritable(False)
    taken.setblocking(False)
    return taken


def _unusable(message: str, *, hint: str | None = None) -> InferenceCenterError:
    return InferenceCenterError(
        ErrorCode.INVALID_CONFIG,
        message,
        hint=hint or "The socket unit needs ListenStream= with a port, an address and a port, or a path.",
    )

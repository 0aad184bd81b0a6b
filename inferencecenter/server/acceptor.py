"""Accepts connections, and survives running out of descriptors.

libuv, on which uvloop stands, answers that by accepting and closing whatever waits, without a word, and where it cannot
even do that uvloop closes the listening socket for good. Here the reason is logged, idle connections make room, and
what waits in the backlog is accepted as soon as there are descriptors.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING, Any, Final

import structlog

from inferencecenter.tasks import TaskGroup
from inferencecenter.telemetry.log_limit import LogLimit

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

RETRY_S: Final = 0.5
"""Wait before connections are accepted again, after an error that is not one connection's own."""

_log = structlog.get_logger(__name__)


class Acceptor:
    """The listening side of one socket.

    Args:
        listening: The socket, bound and listening; the caller closes it.
        protocol: Makes the protocol of a connection.
        tls: The side of TLS that listens; without it connections speak plainly.
        handshake_timeout_s: How long a TLS handshake may take.
        max_handshakes: How many may be under way; one more ends the oldest.
        make_room: Called when no more can be accepted; closes connections that nothing is lost with.
    """

    def __init__(  # noqa: PLR0913 - keyword-only
        self,
        listening: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        *,
        tls: ssl.SSLContext | None,
        handshake_timeout_s: float,
        max_handshakes: int,
        make_room: Callable[[], object],
    ) -> None:
        self._listening = listening
        self._protocol = protocol
        self._options: dict[str, Any] = {"ssl": tls, "ssl_handshake_timeout": handshake_timeout_s} if tls else {}
        self._max_handshakes = max_handshakes
        self._make_room = make_room
        self._loop = asyncio.get_running_loop()
        self._tasks = TaskGroup("acceptor")
        self._handshakes: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._failures = LogLimit()
        self._retry: asyncio.TimerHandle | None = None

    def open(self) -> None:
        """Accept from now on."""
        self._retry = None
        self._loop.add_reader(self._listening.fileno(), self._accept)

    def close(self) -> None:
        """Accept nothing more; call it before the socket is closed."""
        if self._retry is not None:
            self._retry.cancel()
        else:
            self._loop.remove_reader(self._listening.fileno())

    async def wait_closed(self) -> None:
        """End the handshakes that are under way."""
        await self._tasks.cancel()

    def _accept(self) -> None:
        """Accept one; the event loop calls again while others wait, and serves those who stream in between."""
        try:
            connection, _ = self._listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):  # the one that waited has gone
            return
        except OSError as error:
            self._pause(error)
            return
        connection.setblocking(False)
        self._take(connection)

    def _pause(self, error: OSError) -> None:
        """Make room, and accept again after a while; the socket is readable all the time."""
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

    def _take(self, connection: socket.socket) -> None:
        if len(self._handshakes) >= self._max_handshakes:
            oldest = next(iter(self._handshakes))
            del self._handshakes[oldest]
            oldest.cancel()
        task = self._tasks.spawn(self._connect(connection), name="connect")
        self._handshakes[task] = None
        task.add_done_callback(lambda done: self._handshakes.pop(done, None))

    async def _connect(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol, connection, **self._options)
        except (OSError, ssl.SSLError):  # the peer's, which has gone or speaks no TLS, or took too long
            connection.close()

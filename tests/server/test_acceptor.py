"""Accepting connections, and errors of ``accept``."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from inferencecenter.server import listener
from inferencecenter.server.listener import Acceptor, bind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    from tests.loop_clock import LoopClock
    from tests.server.harness import Running

    Serve = Callable[..., AbstractAsyncContextManager[Running]]

TIMEOUT_S = 60


async def tick() -> None:
    """Run one iteration of the event loop."""
    await asyncio.sleep(0)


class FailingSocket:
    """A listening socket whose next calls of ``accept`` fail."""

    def __init__(self, listening: socket.socket, *errors: OSError) -> None:
        self.listening = listening
        self.errors = list(errors)
        self.n_accepted = 0

    def fileno(self) -> int:
        """Return the real descriptor."""
        return self.listening.fileno()

    def accept(self) -> tuple[socket.socket, object]:
        """Fail, or accept."""
        if self.errors:
            raise self.errors.pop(0)
        accepted = self.listening.accept()
        self.n_accepted += 1
        return accepted


class AcceptorHarness:
    """An acceptor, with counts of accepted connections and of requests for room."""

    def __init__(self) -> None:
        (self.listening,) = bind("127.0.0.1", 0)
        self.failing = FailingSocket(self.listening)
        self.came = asyncio.Semaphore(0)
        self.wanted_room = 0
        self.delay_s = 0.0
        self.acceptor = Acceptor(
            self.failing,  # type: ignore[arg-type]  # as far as it is used
            self._protocol,
            tls=None,
            handshake_timeout_s=1,
            max_handshakes=8,
            make_room=self._make_room,
            delay_s=lambda _address: self.delay_s,
        )
        self.acceptor.open()

    def _protocol(self, _address: str) -> asyncio.Protocol:
        self.came.release()
        return asyncio.Protocol()

    def _make_room(self) -> None:
        self.wanted_room += 1

    async def connect_and_close(self) -> None:
        """Open a connection and close it."""
        _, writer = await asyncio.open_connection(*self.listening.getsockname())
        writer.close()

    async def admitted(self) -> None:
        """Wait until one more is accepted."""
        async with asyncio.timeout(TIMEOUT_S):
            await self.came.acquire()


@pytest.fixture
async def harness() -> AsyncIterator[AcceptorHarness]:
    """An acceptor."""
    harness = AcceptorHarness()
    yield harness
    harness.acceptor.close()
    await harness.acceptor.wait_closed()
    harness.listening.close()


async def test_descriptor_exhaustion_evicts_idle_connections(harness: AcceptorHarness, clock: LoopClock) -> None:
    """It is logged once, and waiting connections are accepted a moment later."""
    with capture_logs() as logs:
        for _ in range(3):
            harness.failing.errors = [OSError(errno.EMFILE, os.strerror(errno.EMFILE))]
            await harness.connect_and_close()
            async with asyncio.timeout(TIMEOUT_S):
                while harness.failing.errors:
                    await tick()
            assert harness.came.locked()
            await clock.go_on(listener.RETRY_S)
            await harness.admitted()
    assert harness.wanted_room == 3
    assert [(line["event"], line["error"], line["more"]) for line in logs] == [
        ("accept_failed", "Too many open files", 0)
    ]


async def test_connection_waits_for_its_delay(harness: AcceptorHarness, clock: LoopClock) -> None:
    """It is accepted, and not read before it is due."""
    harness.delay_s = 3.0
    _, writer = await asyncio.open_connection(*harness.listening.getsockname())
    async with asyncio.timeout(TIMEOUT_S):
        while not harness.failing.n_accepted:
            await tick()
    await clock.go_on(2.0)
    assert harness.came.locked()
    await clock.go_on(2.0)
    await harness.admitted()
    writer.close()


async def test_aborted_connection_is_skipped(harness: AcceptorHarness) -> None:
    """The next one is accepted at once."""
    harness.failing.errors = [ConnectionAbortedError(errno.ECONNABORTED, "gone"), ConnectionAbortedError()]
    with capture_logs() as logs:
        await harness.connect_and_close()
        await harness.admitted()
    assert (harness.wanted_room, logs) == (0, [])


async def test_one_connection_is_accepted_per_iteration(harness: AcceptorHarness) -> None:
    """Streams are served between ten waiting connections."""
    waiting = [socket.create_connection(harness.listening.getsockname()) for _ in range(10)]
    most_at_once = 0
    while harness.failing.n_accepted < len(waiting):
        before = harness.failing.n_accepted
        await tick()
        most_at_once = max(most_at_once, harness.failing.n_accepted - before)
    assert most_at_once == 1
    for connection in waiting:
        connection.close()


async def test_waiting_acceptor_can_be_closed(harness: AcceptorHarness, clock: LoopClock) -> None:
    """It does not resume."""
    harness.failing.errors = [OSError(errno.ENOMEM, "no memory")]
    await harness.connect_and_close()
    async with asyncio.timeout(TIMEOUT_S):
        while not harness.wanted_room:
            await tick()
    harness.acceptor.close()
    await clock.go_on(10 * listener.RETRY_S)
    assert harness.came.locked()
    harness.acceptor.open()  # the fixture closes it


async def test_server_recovers_from_descriptor_exhaustion(serve: Serve, clock: LoopClock) -> None:
    """The test reaches the kernel's real limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with serve() as server:
        assert (await server.http("/healthz"))[0] == 200  # all modules are loaded
        await tick()  # both of its ends are closed
        while server.listener.n_connections:
            await tick()
        waiting = socket.socket()
        waiting.setblocking(False)
        highest = os.dup(waiting.fileno())
        os.close(highest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))
        with capture_logs() as logs:
            try:
                loop = asyncio.get_running_loop()
                await loop.sock_connect(waiting, ("127.0.0.1", server.port))
                await loop.sock_sendall(waiting, b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
                async with asyncio.timeout(TIMEOUT_S):
                    while not logs:
                        await tick()
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert [line["event"] for line in logs] == ["accept_failed"]
        await clock.go_on(listener.RETRY_S)
        async with asyncio.timeout(TIMEOUT_S):
            assert (await loop.sock_recv(waiting, 100)).startswith(b"HTTP/1.1 200 ")
        waiting.close()

"""Tests of accepting connections, and of what keeps it from being done."""

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

PATIENCE_S = 60


async def tick() -> None:
    """Let the server go on."""
    await asyncio.sleep(0)


class Failing:
    """A listening socket whose next calls of ``accept`` fail."""

    def __init__(self, listening: socket.socket, *errors: OSError) -> None:
        self.listening = listening
        self.errors = list(errors)
        self.n_accepted = 0

    def fileno(self) -> int:
        """Return the real one."""
        return self.listening.fileno()

    def accept(self) -> tuple[socket.socket, object]:
        """Fail, or accept."""
        if self.errors:
            raise self.errors.pop(0)
        accepted = self.listening.accept()
        self.n_accepted += 1
        return accepted


class UpgradeLimiter:
    """An acceptor, and how many came in and how often room was wanted."""

    def __init__(self) -> None:
        (self.listening,) = bind("127.0.0.1", 0)
        self.failing = Failing(self.listening)
        self.came = asyncio.Semaphore(0)
        self.wanted_room = 0
        self.acceptor = Acceptor(
            self.failing,  # type: ignore[arg-type]  # as far as it is used
            self._protocol,
            tls=None,
            handshake_timeout_s=1,
            max_handshakes=8,
            make_room=self._make_room,
        )
        self.acceptor.open()

    def _protocol(self) -> asyncio.Protocol:
        self.came.release()
        return asyncio.Protocol()

    def _make_room(self) -> None:
        self.wanted_room += 1

    async def knock(self) -> None:
        """Open a connection and close it."""
        _, writer = await asyncio.open_connection(*self.listening.getsockname())
        writer.close()

    async def admitted(self) -> None:
        """Wait until one more has come in."""
        async with asyncio.timeout(PATIENCE_S):
            await self.came.acquire()


@pytest.fixture
async def door() -> AsyncIterator[UpgradeLimiter]:
    """Return what accepts."""
    door = UpgradeLimiter()
    yield door
    door.acceptor.close()
    await door.acceptor.wait_closed()
    door.listening.close()


async def test_running_out_of_descriptors_is_logged_once_and_passes(door: UpgradeLimiter, clock: LoopClock) -> None:
    """Idle connections make room, and what waits is accepted a moment later."""
    with capture_logs() as logs:
        for _ in range(3):
            door.failing.errors = [OSError(errno.EMFILE, os.strerror(errno.EMFILE))]
            await door.knock()
            async with asyncio.timeout(PATIENCE_S):
                while door.failing.errors:
                    await tick()
            assert door.came.locked()
            await clock.go_on(listener.RETRY_S)
            await door.admitted()
    assert door.wanted_room == 3
    assert [(line["event"], line["error"], line["more"]) for line in logs] == [
        ("accept_failed", "Too many open files", 0)
    ]


async def test_a_connection_that_has_gone_is_passed_over(door: UpgradeLimiter) -> None:
    """Its error is its own: the next one is accepted at once."""
    door.failing.errors = [ConnectionAbortedError(errno.ECONNABORTED, "gone"), ConnectionAbortedError()]
    with capture_logs() as logs:
        await door.knock()
        await door.admitted()
    assert (door.wanted_room, logs) == (0, [])


async def test_the_event_loop_goes_on_after_each_connection(door: UpgradeLimiter) -> None:
    """Of ten that wait, one is accepted in each turn of the loop, so that streams are served in between."""
    waiting = [socket.create_connection(door.listening.getsockname()) for _ in range(10)]
    most_at_once = 0
    while door.failing.n_accepted < len(waiting):
        before = door.failing.n_accepted
        await tick()
        most_at_once = max(most_at_once, door.failing.n_accepted - before)
    assert most_at_once == 1
    for connection in waiting:
        connection.close()


async def test_an_acceptor_that_waits_can_be_closed(door: UpgradeLimiter, clock: LoopClock) -> None:
    """It does not begin again."""
    door.failing.errors = [OSError(errno.ENOMEM, "no memory")]
    await door.knock()
    async with asyncio.timeout(PATIENCE_S):
        while not door.wanted_room:
            await tick()
    door.acceptor.close()
    await clock.go_on(10 * listener.RETRY_S)
    assert door.came.locked()
    door.acceptor.open()  # for the fixture to close


async def test_a_server_without_descriptors_answers_again_when_there_are(serve: Serve, clock: LoopClock) -> None:
    """With the limit of the kernel reached in earnest."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with serve() as server:
        assert (await server.http("/healthz"))[0] == 200  # it has loaded all that it needs
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
                async with asyncio.timeout(PATIENCE_S):
                    while not logs:
                        await tick()
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert [line["event"] for line in logs] == ["accept_failed"]
        await clock.go_on(listener.RETRY_S)
        async with asyncio.timeout(PATIENCE_S):
            assert (await loop.sock_recv(waiting, 100)).startswith(b"HTTP/1.1 200 ")
        waiting.close()

"""The client and ``chat`` across kills of a daemon in its own process, with the echo backend."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from inferencecenter.client import Client
from inferencecenter.protocol.events import End, Token
from tests.e2e.harness import START_TIMEOUT_S, start_daemon

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator

    from tests.e2e.harness import Daemon

_ECHO = {"INFERENCECENTER_ENGINE__BACKEND": "echo", "INFERENCECENTER_ENGINE__ECHO_DELAY_MS": "4"}
PROMPT = "".join(f"{n} bottles, " for n in range(40))
INTERRUPTED_AFTER_CHARS = 100


@dataclass
class DaemonHost:
    """A host whose daemon can be killed and restarted."""

    state_dir: Path
    daemon: Daemon

    async def kill_and_start(self) -> None:
        """Kill and restart the daemon, as after a crash."""
        self.daemon.process.kill()
        await asyncio.to_thread(self.daemon.process.wait)
        port = self.daemon.port
        settings = {**_ECHO, "INFERENCECENTER_SERVER__PORT": str(port)}
        self.daemon = replace(start_daemon(self.state_dir, Path("/dev/null"), **settings), port=port)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[DaemonHost]:
    """A host with a ready daemon."""
    state_dir = tmp_path / "state"
    host = DaemonHost(state_dir, start_daemon(state_dir, Path("/dev/null"), **_ECHO))
    try:
        host.daemon.wait_ready()
        yield host
    finally:
        host.daemon.process.kill()
        host.daemon.process.wait()


class TcpProxy:
    """A TCP proxy between clients and a daemon that can be disconnected."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._ends: set[asyncio.StreamWriter] = set()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Relay one connection until either end closes."""
        with contextlib.suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
            ends = {writer, far_writer}
            self._ends |= ends
            await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
            self._ends -= ends

    def disconnect(self) -> None:
        """Drop all current connections."""
        for end in self._ends:
            end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                writer.write(data)
        writer.close()


@contextlib.asynccontextmanager
async def proxy_to(port: int) -> AsyncIterator[tuple[TcpProxy, str]]:
    """A proxy and its address."""
    proxy = TcpProxy(port)
    server = await asyncio.start_server(proxy.carry, "127.0.0.1", 0)
    async with server:
        yield proxy, f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}/"


async def _answer(
    url: str, token: str, interrupt: Callable[[], Coroutine[None, None, None]], *, every_chars: int
) -> tuple[str, list[End], str]:
    """Return the text of an answer that is interrupted repeatedly, its ends, and the next answer."""
    text, ends = "", []
    due = INTERRUPTED_AFTER_CHARS
    async with asyncio.timeout(START_TIMEOUT_S), Client(url, token=token) as client:
        session = await client.create_session()
        async for event in session.infer(PROMPT, params={"max_tokens": 1000}).events():
            if isinstance(event, Token):
                text += event.content
                assert PROMPT.startswith(text)
                if len(text) >= due:
                    due = len(text) + every_chars
                    await interrupt()
            elif isinstance(event, End):
                ends.append(event)
        following = [event.content async for event in session.infer("next").events() if isinstance(event, Token)]
    return text, ends, "".join(following)


@pytest.mark.slow
async def test_killed_daemon_gives_one_unbroken_answer(host: DaemonHost) -> None:
    """After the restart no character is missing or repeated, and the turn ends once."""
    text, ends, following = await _answer(
        host.daemon.url, host.daemon.admin_token, host.kill_and_start, every_chars=len(PROMPT)
    )
    assert text == PROMPT
    assert [end.finish_reason for end in ends] == ["stop"]
    assert following == "next"


@pytest.mark.slow
async def test_repeated_disconnects_give_one_unbroken_answer(host: DaemonHost) -> None:
    """The client resumes each time."""
    cuts = 0
    async with proxy_to(host.daemon.port) as (proxy, url):

        async def disconnect() -> None:
            nonlocal cuts
            cuts += 1
            proxy.disconnect()

        text, ends, following = await _answer(url, host.daemon.admin_token, disconnect, every_chars=60)
    assert cuts >= 3
    assert (text, len(ends), following) == (PROMPT, 1, "next")


@pytest.mark.slow
async def test_chat_continues_after_the_daemon_was_killed(host: DaemonHost) -> None:
    """In a pipe the answer is whole on standard output, and only standard error reports the loss."""
    command = [sys.executable, "-m", "inferencecenter", "chat", "--url", host.daemon.url, "-p", "max_tokens=1000"]
    chat = await asyncio.create_subprocess_exec(
        *command,
        *("--token", host.daemon.admin_token),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert chat.stdin is not None
    assert chat.stdout is not None
    assert chat.stderr is not None
    chat.stdin.write(f"{PROMPT}\nnext\n".encode())
    chat.stdin.close()
    async with asyncio.timeout(START_TIMEOUT_S):
        written = await chat.stdout.readexactly(INTERRUPTED_AFTER_CHARS)
        await host.kill_and_start()
        written += await chat.stdout.read()
        errors = await chat.stderr.read()
        assert await chat.wait() == 0, errors
    assert written.decode() == f"{PROMPT.strip()}\nnext\n"
    assert errors.decode() == "connection lost, reconnecting…\n"

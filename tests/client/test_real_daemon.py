"""Tests of the client and of ``chat`` on a daemon in its own process that is killed under them; the engine echoes."""

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
HARMED_AFTER_CHARS = 100


@dataclass
class Box:
    """A machine with a daemon that may be gone for a while."""

    state_dir: Path
    daemon: Daemon

    async def kill_and_start(self) -> None:
        """What a crash and a service manager do."""
        self.daemon.process.kill()
        await asyncio.to_thread(self.daemon.process.wait)
        port = self.daemon.port
        settings = {**_ECHO, "INFERENCECENTER_SERVER__PORT": str(port)}
        self.daemon = replace(start_daemon(self.state_dir, Path("/dev/null"), **settings), port=port)


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    """A machine with a daemon that is ready."""
    state_dir = tmp_path / "state"
    box = Box(state_dir, start_daemon(state_dir, Path("/dev/null"), **_ECHO))
    try:
        box.daemon.wait_ready()
        yield box
    finally:
        box.daemon.process.kill()
        box.daemon.process.wait()


class Wire:
    """A TCP connection between clients and a daemon that can be cut."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._ends: set[asyncio.StreamWriter] = set()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection until one of its ends is gone."""
        with contextlib.suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
            ends = {writer, far_writer}
            self._ends |= ends
            await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
            self._ends -= ends

    def cut(self) -> None:
        """Cut what is connected now."""
        for end in self._ends:
            end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                writer.write(data)
        writer.close()


@contextlib.asynccontextmanager
async def wire_to(port: int) -> AsyncIterator[tuple[Wire, str]]:
    """A wire, and the address at its near end."""
    wire = Wire(port)
    server = await asyncio.start_server(wire.carry, "127.0.0.1", 0)
    async with server:
        yield wire, f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}/"


async def _answer(
    url: str, token: str, harm: Callable[[], Coroutine[None, None, None]], *, every_chars: int
) -> tuple[str, list[End], str]:
    """The text of an answer that is harmed again and again, its ends, and the answer after it."""
    text, ends = "", []
    due = HARMED_AFTER_CHARS
    async with asyncio.timeout(START_TIMEOUT_S), Client(url, token=token) as client:
        session = await client.create_session()
        async for event in session.infer(PROMPT, params={"max_tokens": 1000}).events():
            if isinstance(event, Token):
                text += event.content
                assert PROMPT.startswith(text)
                if len(text) >= due:
                    due = len(text) + every_chars
                    await harm()
            elif isinstance(event, End):
                ends.append(event)
        following = [event.content async for event in session.infer("next").events() if isinstance(event, Token)]
    return text, ends, "".join(following)


async def test_a_killed_daemon_and_one_unbroken_answer(box: Box) -> None:
    """The daemon is killed in the middle and started again: no character is missing, none comes twice, one end."""
    text, ends, following = await _answer(
        box.daemon.url, box.daemon.admin_token, box.kill_and_start, every_chars=len(PROMPT)
    )
    assert text == PROMPT
    assert [end.finish_reason for end in ends] == ["stop"]
    assert following == "next"


@pytest.mark.slow
async def test_a_wire_that_is_cut_again_and_again(box: Box) -> None:
    """Each time the client comes back for the rest."""
    cuts = 0
    async with wire_to(box.daemon.port) as (wire, url):

        async def cut() -> None:
            nonlocal cuts
            cuts += 1
            wire.cut()

        text, ends, following = await _answer(url, box.daemon.admin_token, cut, every_chars=60)
    assert cuts >= 3
    assert (text, len(ends), following) == (PROMPT, 1, "next")


@pytest.mark.slow
async def test_a_chat_does_not_notice_that_its_daemon_was_killed(box: Box) -> None:
    """In a pipe: the answer is whole on standard output, and only standard error tells of the loss."""
    command = [sys.executable, "-m", "inferencecenter", "chat", "--url", box.daemon.url, "-p", "max_tokens=1000"]
    chat = await asyncio.create_subprocess_exec(
        *command,
        *("--token", box.daemon.admin_token),
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
        written = await chat.stdout.readexactly(HARMED_AFTER_CHARS)
        await box.kill_and_start()
        written += await chat.stdout.read()
        told = await chat.stderr.read()
        assert await chat.wait() == 0, told
    assert written.decode() == f"{PROMPT.strip()}\nnext\n"
    assert told.decode() == "connection lost, reconnecting…\n"

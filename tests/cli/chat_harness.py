"""Chats in a pipe and on a terminal, with a scripted daemon's answer."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import io
import os
import pty
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

    from tests.cli.conftest import Cli, Result
    from tests.client.peer import Peer

TIMEOUT_S = 60
ON_TERMINAL = (sys.executable, "-m", "tests.cli.terminal")


async def run_chat(cli: Cli, monkeypatch: pytest.MonkeyPatch, url: str, lines: str, *options: str) -> Result:
    """Run a chat in a pipe."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    return await asyncio.to_thread(cli.run, "chat", "--url", url, "--token", "ic_a_b", *options)


async def answer(peer: Peer, *pieces: str, session_id: str = "s1") -> dict[str, object]:
    """Answer a prompt as the daemon, and return the ``infer`` request."""
    infer = await peer.begin("t")
    for piece in pieces:
        await peer.token("t", piece, session_id)
    await peer.end("t", session_id)
    return infer


@contextlib.contextmanager
def chat_on_terminal(url: str, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run a chat on its own terminal; yields the process and the terminal's other end."""
    ours, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("INFERENCECENTER_")}
    command = [*ON_TERMINAL, "chat", "--url", url, "--token", "ic_a_b", *options]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait()
        os.close(ours)


class Screen:
    """The output of the terminal so far."""

    def __init__(self, terminal: int) -> None:
        self._terminal = terminal
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self._seen = 0
        self.text = ""

    async def until(self, wanted: str) -> None:
        """Read until ``wanted`` appears after the previously awaited text."""
        async with asyncio.timeout(TIMEOUT_S):
            while (at := self.text.find(wanted, self._seen)) < 0:
                self.text += self._decode(await self._read())
        self._seen = at + len(wanted)

    async def _read(self) -> bytes:
        """Return the terminal's next output; cancellable."""
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(self._terminal, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self._terminal)
        return os.read(self._terminal, 4096)

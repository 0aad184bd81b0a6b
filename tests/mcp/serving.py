"""Runs the MCP server of the tests, without an import of the server's package."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

from tests.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

FILE = "TEST_MCP_CALLS"
"""Environment variable of the server: a file that gets a line for each call."""
HOSTILE = '<img src=x onerror="window.hacked = 1"><script>window.hacked = 1</script>[x](javascript:alert(1))'
CONNECT_TIMEOUT_S = 60.0
"""The server imports for seconds of CPU time before it answers, on a busy machine for longer than the default."""
STDIO = {"command": sys.executable, "args": ("-m", "tests.mcp.server"), "directory": Path(__file__).parents[2]}
"""Settings of the server over standard input and output."""


class CallFile:
    """The file in which the server records calls, read by tests."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def count(self, line: str) -> int:
        """Return the number of lines equal to ``line``."""
        return self.path.read_text().splitlines().count(line)

    async def until(self, line: str, n_times: int = 1) -> None:
        """Wait until this number of lines equals ``line``."""
        await asyncio.to_thread(self._wait, line, n_times)

    def _wait(self, line: str, n_times: int) -> None:
        while self.count(line) < n_times:
            time.sleep(0.02)


@contextlib.contextmanager
def serve(calls: CallFile, *, port: int | None = None) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run the server over HTTP, and kill it at the end."""
    port = free_port() if port is None else port
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.mcp.server", str(port)],
        env=os.environ | {FILE: str(calls.path)},
        cwd=Path(__file__).parents[2],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while not _answers(port):
            assert process.poll() is None, "the MCP server ended"
            time.sleep(0.05)
        yield process, port
    finally:
        process.kill()
        process.wait()


def _answers(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10).close()
    except urllib.error.HTTPError as error:
        error.close()
    except OSError:
        return False
    return True

"""An MCP server for tests: ``python -m tests.mcp.server PORT`` over Streamable HTTP, without a port over stdio.

``FILE`` in the environment gets a line for each call.
"""

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

from mcp.server import MCPServer
from mcp.server.mcpserver import Context

from tests.e2e.harness import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

FILE = "TEST_MCP_CALLS"
STDIO = {"command": sys.executable, "args": ("-m", "tests.mcp.server"), "directory": Path(__file__).parents[2]}
"""Settings of the server over standard input and output."""
HOSTILE = '<img src=x onerror="window.hacked = 1"><script>window.hacked = 1</script>[x](javascript:alert(1))'

server = MCPServer("weather")


def note(line: str) -> None:
    """Append a line to the file of calls."""
    with Path(os.environ[FILE]).open("a") as file:
        file.write(f"{line}\n")


@server.tool()
def get_weather(city: str) -> str:
    """The weather of a city."""
    note(f"get_weather {city}")
    return f"-3 °C in {city}"


@server.tool()
async def slow(seconds: float) -> str:
    """Waits, and records its cancellation."""
    note("slow began")
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        note("slow cancelled")
        raise
    note("slow ended")
    return "waited"


@server.tool()
def fail() -> str:
    """Always fails."""
    raise ValueError("it is broken")


@server.tool()
def hostile() -> str:
    """Returns text that a browser must not interpret as HTML."""
    return HOSTILE


@server.tool()
def long(n_bytes: int) -> str:
    """Returns a long text."""
    return "x" * n_bytes


@server.tool()
def environment() -> str:
    """Returns the names of its environment variables, its open files and its pid."""
    files = sorted(str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if int(fd.name) > 2 and fd.exists())
    return f"{' '.join(sorted(os.environ))}\n{' '.join(files)}\n{os.getpid()}"


@server.tool()
async def grow(name: str, context: Context) -> str:
    """Adds a tool, and announces it."""
    server.add_tool(get_weather, name=name)
    await context.session.send_tool_list_changed()
    return "grown"


@server.tool()
def leave() -> str:
    """Ends the server."""
    os._exit(0)


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


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")

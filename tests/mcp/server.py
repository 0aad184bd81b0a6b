"""An MCP server for tests: ``python -m tests.mcp.server PORT`` over Streamable HTTP, without a port over stdio.

``FILE`` in the environment gets a line for each call.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path

from mcp.server import MCPServer
from mcp.server.mcpserver import Context

from tests.mcp.serving import FILE, HOSTILE

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
    files = []
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed in the meantime
            files.append(str(fd.readlink()))
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


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")

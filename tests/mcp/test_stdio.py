"""Servers over standard input and output: their process group, environment, and end."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from inferencecenter.config.sections import McpServerSettings
from inferencecenter.core.tasks import TaskGroup
from inferencecenter.mcp.connection import McpConnection
from inferencecenter.mcp.gateway import McpLostError, McpUnreachableError
from tests.mcp.serving import CONNECT_TIMEOUT_S, FILE, STDIO, CallFile

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@asynccontextmanager
async def running(**settings: Any) -> AsyncIterator[McpConnection]:
    """A connection to a server that is a process, closed at the end."""
    tasks, server = TaskGroup("test"), McpServerSettings(connect_timeout_s=CONNECT_TIMEOUT_S, **settings)
    connection = McpConnection(server, tasks=tasks, tools_changed=lambda: None)
    try:
        yield connection
    finally:
        await connection.close()
        await tasks.cancel()


@pytest.fixture
def calls(tmp_path: Path) -> CallFile:
    """The calls that the server ran."""
    return CallFile(tmp_path / "calls")


def group_of(pid: int) -> list[int]:
    """The processes of a group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == pid and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def wait_gone(pid: int) -> None:
    """Wait until no process of a group is left."""
    while group_of(pid):
        time.sleep(0.02)


def shell(script: str) -> dict[str, Any]:
    """Settings of a server that is a shell script."""
    return {"command": "sh", "args": ("-c", script)}


async def test_process_serves_and_ends_with_its_connection(
    calls: CallFile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It has the environment of the settings only, no descriptor of the daemon, and is gone after the close."""
    monkeypatch.setenv("TEST_SECRET", "not for it")
    monkeypatch.setenv("TEST_PASSED", "for it")
    with (tmp_path / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        async with running(**STDIO, env={FILE: str(calls.path)}, env_passed=("TEST_PASSED",)) as connection:
            await connection.open()
            assert (await connection.call_tool("get_weather", {"city": "Oslo"})).text == "-3 °C in Oslo"
            names, files, pid = (await connection.call_tool("environment", {})).text.splitlines()
            assert "TEST_SECRET" not in names
            assert {FILE, "TEST_PASSED", "PATH"} <= set(names.split())
            assert str(tmp_path) not in files
            group = os.getpgid(int(pid))
            assert int(pid) in group_of(group)
            assert group != os.getpgid(0)
    await asyncio.to_thread(wait_gone, group)


async def test_server_that_ends_is_noticed(calls: CallFile) -> None:
    """The outcome of a running call is unknown; a later call is not sent."""
    async with running(**STDIO, env={FILE: str(calls.path)}) as connection:
        await connection.open()
        with pytest.raises(McpLostError):
            await connection.call_tool("leave", {})
        with pytest.raises(McpUnreachableError):
            await connection.call_tool("get_weather", {"city": "Oslo"})


@pytest.mark.parametrize("settings", [{"command": "/nowhere/at-all"}, shell("exit 3"), shell("echo nonsense")])
async def test_command_that_does_not_serve_fails_at_once(settings: dict[str, Any]) -> None:
    """The command does not exist, exits, or writes invalid lines."""
    async with running(**settings) as connection:
        with pytest.raises(McpUnreachableError, match="the command ended"):
            await connection.open()
        assert connection.is_lost


async def test_endless_line_is_cut_off() -> None:
    """A line without an end closes the connection."""
    async with running(**shell("while :; do printf %4096d 0; done")) as connection:
        with pytest.raises(McpUnreachableError, match="the command ended"):
            await connection.open()


async def test_grandchildren_end_too(tmp_path: Path) -> None:
    """A server that ignores the end of its input, and what it started, are killed."""
    path = tmp_path / "pids"
    script = f"trap '' TERM HUP; sleep 1000 & echo $! $$ > {path}.new; mv {path}.new {path}; sleep 1000"
    async with running(**shell(script)) as connection:
        opening = asyncio.ensure_future(connection.open())  # noqa: TID251 - it is awaited below
        await asyncio.to_thread(wait_for_file, path)
        pids = [int(pid) for pid in path.read_text().split()]
        await connection.close()
        with pytest.raises(McpUnreachableError):
            await opening
    for pid in pids:
        await asyncio.to_thread(wait_dead, pid)


def wait_for_file(path: Path) -> None:
    """Wait until a file exists."""
    while not path.exists():
        time.sleep(0.02)


def wait_dead(pid: int) -> None:
    """Wait until a process is gone, or only waits for its parent."""
    while (stat := Path(f"/proc/{pid}/stat")).exists() and ") Z" not in stat.read_text():
        time.sleep(0.02)


async def test_memory_of_a_server_can_be_limited() -> None:
    """With less memory than it needs, the server cannot start."""
    async with running(command=sys.executable, args=("-c", "bytearray(2**30)"), memory_mib=64) as connection:
        with pytest.raises(McpUnreachableError, match="the command ended"):
            await connection.open()

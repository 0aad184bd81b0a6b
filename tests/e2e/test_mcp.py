"""Tools of MCP servers on a real daemon: listed, called, aborted, and found again after a kill."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from websockets.asyncio.client import connect

from inferencecenter.client import Client, RequestError
from inferencecenter.client.blocking import BlockingClient
from inferencecenter.protocol.values import Tool
from tests.e2e.harness import Daemon, Message, SocketClient, command_line, connect_client
from tests.mcp.daemon import declared, mcp_daemon
from tests.mcp.serving import CONNECT_TIMEOUT_S, FILE, HOSTILE, STDIO, CallFile, serve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> CallFile:
    """The file of the calls that the server ran."""
    return CallFile(tmp_path_factory.mktemp("mcp") / "calls")


@pytest.fixture(scope="module")
def server(calls: CallFile) -> Iterator[int]:
    """The port of an MCP server."""
    with serve(calls) as (_, port):
        yield port


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, server: int) -> Iterator[Daemon]:
    """A daemon with these servers."""
    with mcp_daemon(tmp_path_factory.mktemp("daemon"), declared(server)) as running:
        yield running


TOOLS = [
    {"name": name, "parameters": {"type": "object", "properties": {}}, "strict": False}
    for name in ("get_weather", "slow", "fail", "long")
]


async def ask_for_call(client: SocketClient, prompt: str) -> tuple[str, str]:
    """Have the model call a tool, and return the session and the call."""
    session_id = await client.create()
    await client.send(op="infer", session_id=session_id, prompt=prompt, tools=TOOLS)
    first = await client.until(lambda message: message["op"] == "tool_call")
    await client.until(lambda message: message["op"] == "end")
    return session_id, first["call_id"]


def ended(message: Message) -> bool:
    """Whether a frame says that a call ended."""
    return bool(message["op"] == "mcp_call" and message["call_state"] != "running")


def audited(daemon: Daemon) -> list[dict[str, Any]]:
    """The lines of the audit log about calls, once there are any: it is written with a delay."""
    while not (lines := command_line(daemon, "audit", "--event", "mcp_tool_called")):
        time.sleep(0.1)
    return list(lines)


async def test_tools_are_listed_with_their_schemas(daemon: Daemon) -> None:
    """A server that cannot be reached is named with the reason, without its address."""
    async with connect_client(daemon) as client:
        answer = await client.ask(op="list_mcp_tools")
        weather, gone, private = answer["mcp_servers"]
        tools = {tool["name"]: tool for tool in weather["mcp_tools"]}
        assert tools["get_weather"]["description"] == "The weather of a city."
        assert tools["get_weather"]["parameters"]["properties"]["city"]["type"] == "string"
        assert (tools["get_weather"]["approval"], tools["slow"]["approval"]) == ("never", "always")
        assert (gone["server"], gone["mcp_tools"]) == ("gone", [])
        assert "no connection" in gone["detail"]
        assert "127.0.0.1" not in gone["detail"]
        assert [tool["name"] for tool in private["mcp_tools"]] == ["get_weather"]
        refused = await client.ask(op="list_mcp_tools", server="nope")
        assert (refused["code"], refused["field"]) == ("invalid_request", "server")


@pytest.mark.slow
async def test_result_becomes_a_message_and_the_turn_continues(daemon: Daemon, calls: CallFile) -> None:
    """The call is run with the model's arguments, its result is part of the history, and ``infer`` answers it."""
    async with connect_client(daemon) as client:
        session_id, call_id = await ask_for_call(client, "weather in Oslo")
        running = await client.ask(op="call_mcp_tool", session_id=session_id, call_id=call_id, server="weather")
        assert (running["op"], running["call_state"], running["tool"]) == ("mcp_call", "running", "get_weather")
        done = await client.until(ended)
        assert (done["call_state"], done["content"], done["is_error"]) == ("done", "-3 °C in Oslo", False)
        assert calls.count("get_weather Oslo") == 1
        await client.send(op="infer", session_id=session_id, tools=TOOLS)
        end = await client.until(lambda message: message["op"] in ("end", "error"))
        assert end["op"] == "end", end
        session = await client.ask(op="get_session", session_id=session_id)
        assert [message["role"] for message in session["transcript"]] == ["user", "assistant", "tool", "assistant"]
        assert session["transcript"][2] == {"role": "tool", "content": "-3 °C in Oslo", "tool_call_id": call_id}
        assert session["transcript"][3]["content"] == "So it is."
        assert "mcp_calls" not in session
    (line,) = await asyncio.to_thread(audited, daemon)
    assert line["detail"] == "weather/get_weather"
    assert "Oslo" not in daemon.log.read_text()


async def test_only_pending_calls_can_be_run(daemon: Daemon) -> None:
    """An id that the model did not give, a call that has its result, and tools that are not allowed are refused."""
    async with connect_client(daemon) as client:
        session_id, call_id = await ask_for_call(client, "weather in Oslo")
        known = {"op": "call_mcp_tool", "session_id": session_id, "call_id": call_id, "server": "weather"}
        assert (await client.ask(**known | {"call_id": "call_x"}))["field"] == "call_id"
        assert (await client.ask(**known | {"server": "nope"}))["field"] == "server"
        assert (await client.ask(**known | {"server": "private", "tool": "slow"}))["code"] == "forbidden"
        assert (await client.ask(**known | {"session_id": "s_other"}))["code"] == "session_not_found"
        await client.ask(**known)
        await client.until(ended)
        assert (await client.ask(**known))["field"] == "call_id"
        refused = await client.ask(op="infer", session_id=await client.create())
        assert (refused["code"], refused["field"]) == ("invalid_request", "prompt")


async def test_errors_of_tools_are_results(daemon: Daemon) -> None:
    """The model sees that its call failed; a server that is not there leaves the call pending."""
    async with connect_client(daemon) as client:
        session_id, call_id = await ask_for_call(client, "fail")
        known = {"op": "call_mcp_tool", "session_id": session_id, "call_id": call_id}
        await client.ask(**known, server="gone")
        failed = await client.until(ended)
        assert (failed["call_state"], failed.get("content")) == ("failed", None)
        assert "gone cannot be reached" in failed["detail"]
        await client.ask(**known, server="weather")
        done = await client.until(ended)
        assert (done["call_state"], done["is_error"]) == ("done", True)
        assert "fail" in done["content"]


async def test_long_result_is_cut(daemon: Daemon) -> None:
    """The model gets as much of a result as the settings allow, and is told."""
    async with connect_client(daemon) as client:
        session_id, call_id = await ask_for_call(client, "long")
        await client.ask(op="call_mcp_tool", session_id=session_id, call_id=call_id, server="weather")
        done = await client.until(ended)
        assert done["content"] == "x" * 1000 + "\n[cut: 1000 of 100000 bytes]"


async def test_abort_stops_the_call_on_the_server(daemon: Daemon, calls: CallFile) -> None:
    """While it runs the session takes no other change; afterwards its outcome is unknown and it can be answered."""
    async with connect_client(daemon) as client:
        session_id, call_id = await ask_for_call(client, "slow")
        await client.ask(op="call_mcp_tool", session_id=session_id, call_id=call_id, server="weather")
        await calls.until("slow began")
        assert (await client.ask(op="infer", session_id=session_id, prompt="Hi"))["code"] == "session_busy"
        assert (await client.ask(op="rewind_session", session_id=session_id, turn="start"))["code"] == "session_busy"
        await client.send(op="abort", session_id=session_id)
        stopped = await client.until(ended)
        assert (stopped["call_state"], stopped["detail"]) == ("unknown", "the call was stopped")
        await calls.until("slow cancelled")
        session = await client.ask(op="get_session", session_id=session_id)
        assert [call["call_state"] for call in session["mcp_calls"]] == ["unknown"]
        result = {"role": "tool", "content": "by hand", "tool_call_id": call_id}
        await client.send(op="infer", session_id=session_id, messages=[result], tools=TOOLS)
        await client.until(lambda message: message["op"] == "end")
        assert "mcp_calls" not in await client.ask(op="get_session", session_id=session_id)


async def test_parallel_calls_are_answered_each(daemon: Daemon) -> None:
    """Two calls of one answer run at once, and both results are messages."""
    async with connect_client(daemon) as client:
        session_id = await client.create()
        await client.send(op="infer", session_id=session_id, prompt="two", tools=TOOLS)
        await client.until(lambda message: message["op"] == "end")
        session = await client.ask(op="get_session", session_id=session_id)
        ids = [call["call_id"] for call in session["transcript"][-1]["tool_calls"]]
        for call_id in ids:
            await client.send(op="call_mcp_tool", session_id=session_id, call_id=call_id, server="weather")
        contents = {(await client.until(ended))["content"] for _ in ids}
        assert contents == {"-3 °C in A", "-3 °C in B"}
        session = await client.ask(op="get_session", session_id=session_id)
        assert [message["role"] for message in session["transcript"]] == ["user", "assistant", "tool", "tool"]


@pytest.mark.slow
async def test_kill_in_mid_call_leaves_an_unknown_outcome(tmp_path: Path, server: int, calls: CallFile) -> None:
    """After kill -9 the call is shown as unknown and not run again, until the client asks for it."""
    servers = declared(server)
    before = calls.count("slow began")
    with mcp_daemon(tmp_path, servers) as daemon:
        async with connect_client(daemon) as client:
            done_session, done_call = await ask_for_call(client, "weather in Oslo")
            await client.ask(op="call_mcp_tool", session_id=done_session, call_id=done_call, server="weather")
            await client.until(ended)
            session_id, call_id = await ask_for_call(client, "slow")
            await client.ask(op="call_mcp_tool", session_id=session_id, call_id=call_id, server="weather")
            await calls.until("slow began", before + 1)
            daemon.process.send_signal(signal.SIGKILL)
            daemon.process.wait()
    with mcp_daemon(tmp_path, servers) as daemon:
        async with connect_client(daemon) as client:
            finished = await client.ask(op="get_session", session_id=done_session)
            assert finished["transcript"][-1]["content"] == "-3 °C in Oslo"
            assert "mcp_calls" not in finished
            resumed = await client.ask(op="resume_session", session_id=session_id)
            (mark,) = resumed["mcp_calls"]
            assert mark == {"call_id": call_id, "server": "weather", "tool": "slow", "call_state": "unknown"}
            assert calls.count("slow began") == before + 1
            known = {"op": "call_mcp_tool", "session_id": session_id, "call_id": call_id}
            await client.ask(**known, server="weather", tool="hostile")
            done = await client.until(ended)
            assert (done["call_state"], done["content"]) == ("done", HOSTILE)


async def test_accounts_see_only_their_servers(daemon: Daemon) -> None:
    """A server of others does not exist for an account without its scope."""
    made = command_line(daemon, "token", "create", "plain")
    async with connect(daemon.url) as websocket:
        client = SocketClient(websocket)
        await client.ask(op="auth", token=made["token"], protocol=1)
        answer = await client.ask(op="list_mcp_tools")
        assert [each["server"] for each in answer["mcp_servers"]] == ["weather", "gone"]
        refused = await client.ask(op="list_mcp_tools", server="private")
        assert refused["hint"] == "One of: weather, gone."


async def test_python_client_lists_and_calls_tools(daemon: Daemon) -> None:
    """The call returns how it ended; ``ask`` without a message continues."""
    async with Client(daemon.url, daemon.admin_token) as client:
        (weather,) = await client.mcp_servers("weather")
        session = await client.create_session()
        tools = [Tool(name=each.name, parameters=each.parameters, strict=False) for each in weather.mcp_tools]
        answer = await session.ask("weather in Oslo", tools=tools)
        (call,) = answer.tool_calls
        done = await session.call_mcp_tool(call.call_id, "weather")
        assert (done.call_state, done.content) == ("done", "-3 °C in Oslo")
        assert (await session.ask(tools=tools)).content == "So it is."
        with pytest.raises(RequestError, match="no tool call of the last answer"):
            await session.call_mcp_tool(call.call_id, "weather")


def test_blocking_client_lists_and_calls_tools(daemon: Daemon) -> None:
    """A call fails or returns the tool's error, as with the asyncio client."""
    with BlockingClient(daemon.url, daemon.admin_token) as client, client.session() as session:
        tools = [Tool(name=each.name, strict=False) for each in client.mcp_servers("weather")[0].mcp_tools]
        (call,) = session.ask("fail", tools=tools).tool_calls
        assert session.call_mcp_tool(call.call_id, "gone").call_state == "failed"
        assert session.call_mcp_tool(call.call_id, "weather").is_error


@pytest.mark.slow
async def test_servers_are_reloaded(tmp_path: Path, server: int, calls: CallFile) -> None:
    """Servers are added, changed and removed; a call that runs on a removed one ends, and the session continues."""
    config = tmp_path / "inferencecenter.toml"
    config.touch()
    table = f'[mcp.weather]\nurl = "http://127.0.0.1:{server}/mcp"\nscope = "user"\n'
    with mcp_daemon(tmp_path, None, INFERENCECENTER_CONFIG=str(config)) as daemon:
        async with connect_client(daemon) as client:

            async def reload(content: str, expected: Callable[[list[str] | None], bool]) -> None:
                """Wait until the tools of the server, ``None`` without one, are as expected."""
                config.write_text(content)
                daemon.process.send_signal(signal.SIGHUP)
                while True:
                    listed = (await client.ask(op="list_mcp_tools"))["mcp_servers"]
                    if expected([tool["name"] for tool in listed[0]["mcp_tools"]] if listed else None):
                        return
                    await asyncio.sleep(0.02)

            await reload(table, lambda tools: tools is not None and "get_weather" in tools)
            session_id, call_id = await ask_for_call(client, "slow")
            n_before = calls.count("slow began")
            known = {"op": "call_mcp_tool", "session_id": session_id, "call_id": call_id, "server": "weather"}
            await client.ask(**known)
            await calls.until("slow began", n_before + 1)
            config.write_text("")
            daemon.process.send_signal(signal.SIGHUP)
            done = await client.until(ended)
            assert (done["call_state"], done["detail"]) == ("unknown", "the operator removed the server")
            assert (await client.ask(op="list_mcp_tools"))["mcp_servers"] == []
            assert daemon.metric("mcp_calls_total", server="weather", outcome="unknown") == 1
            await reload(f'{table}allowed_tools = ["slow"]\n', lambda tools: tools == ["slow"])
            assert (await client.ask(**known, tool="fail"))["code"] == "forbidden"
    assert "settings_need_restart" not in daemon.log.read_text()


@pytest.mark.slow
async def test_process_of_a_server_dies_with_a_killed_daemon(tmp_path: Path, calls: CallFile) -> None:
    """It runs in the daemon's place, without its sockets, and is gone when the daemon was killed."""
    server: dict[str, Any] = {"scope": "user", "env": {FILE: str(calls.path)}}
    server |= {"command": STDIO["command"], "args": STDIO["args"], "directory": str(STDIO["directory"])}
    server["connect_timeout_s"] = CONNECT_TIMEOUT_S
    with mcp_daemon(tmp_path, {"local": server}) as daemon:
        async with connect_client(daemon) as client:
            session_id, call_id = await ask_for_call(client, "weather in Oslo")
            known = {"op": "call_mcp_tool", "session_id": session_id, "call_id": call_id, "server": "local"}
            await client.ask(**known, tool="environment")
            done = await client.until(ended)
            names, files, pid = done["content"].splitlines()
            assert not [name for name in names.split() if name.startswith("INFERENCECENTER")]
            assert str(daemon.state_dir) not in files
            assert not set(files.split()) & sockets_of(daemon.process.pid)
            daemon.process.send_signal(signal.SIGKILL)
            daemon.process.wait()
    await asyncio.to_thread(wait_dead, int(pid))


def sockets_of(pid: int) -> set[str]:
    """The sockets that a process has open."""
    links = (str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.exists() or fd.is_symlink())
    return {link for link in links if link.startswith("socket:")}


def wait_dead(pid: int) -> None:
    """Wait until a process is gone, or only waits for its parent."""
    while (stat := Path(f"/proc/{pid}/stat")).exists() and ") Z" not in stat.read_text():
        time.sleep(0.02)

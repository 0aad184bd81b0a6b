"""Tools of MCP servers in the Responses API: through the openai package, on a real daemon and a real MCP server."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from openai import APIError, AsyncOpenAI, BadRequestError, OpenAI

from tests.mcp.daemon import declared, mcp_daemon
from tests.mcp.serving import CallFile, serve

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from openai.types.responses import Response

    from tests.e2e.harness import Daemon

WEATHER: Any = {"type": "mcp", "server_label": "weather", "allowed_tools": ["get_weather", "slow", "fail"]}


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


def openai_client(daemon: Daemon) -> OpenAI:
    """Return the openai client, without retries."""
    return OpenAI(base_url=f"http://127.0.0.1:{daemon.port}/v1", api_key=daemon.admin_token, max_retries=0)


@pytest.fixture
def client(daemon: Daemon) -> Iterator[OpenAI]:
    """The openai client of the daemon."""
    with openai_client(daemon) as openai:
        yield openai


def kinds(response: Response) -> list[str]:
    """The types of the items of a response."""
    return [item.type for item in response.output]


def decision(asked: Response, *, approve: bool = True, **more: Any) -> dict[str, Any]:
    """The fields of a request that answers the only request for an approval."""
    (request,) = [item for item in asked.output if item.type == "mcp_approval_request"]
    answer = {"type": "mcp_approval_response", "approval_request_id": request.id, "approve": approve, **more}
    return {"input": [answer], "previous_response_id": asked.id, "tools": [WEATHER]}


def warnings(response: Response) -> list[str]:
    """The daemon's warnings."""
    found: list[str] = (response.model_extra or {})["warnings"]
    return found


def test_call_runs_once_when_it_is_approved(client: OpenAI, calls: CallFile) -> None:
    """The request for it ends a response; a request that is sent again finds the result."""
    before = calls.count("get_weather Oslo")
    asked = client.responses.create(input="remote weather", tools=[WEATHER])
    assert (kinds(asked), asked.status) == (["mcp_list_tools", "mcp_approval_request"], "completed")
    listed, request = asked.output
    assert listed.type == "mcp_list_tools"
    assert {tool.name for tool in listed.tools} == {"get_weather", "slow", "fail"}
    assert request.type == "mcp_approval_request"
    assert (request.server_label, request.name) == ("weather", "get_weather")
    assert json.loads(request.arguments) == {"city": "Oslo"}
    assert client.responses.retrieve(asked.id).output == asked.output
    assert calls.count("get_weather Oslo") == before
    for _ in range(2):
        answered = client.responses.create(**decision(asked))
        assert (kinds(answered), answered.output_text) == (["mcp_call", "message"], "So it is.")
        (call, _) = answered.output
        assert call.type == "mcp_call"
        assert (call.output, call.error, call.status) == ("-3 °C in Oslo", None, "completed")
        assert (call.name, call.arguments, call.approval_request_id) == (request.name, request.arguments, request.id)
        assert client.responses.retrieve(answered.id).output == answered.output
        items = client.responses.input_items.list(answered.id, order="asc").data
        assert [item.type for item in items] == ["message", "mcp_approval_request", "mcp_call"]
    assert calls.count("get_weather Oslo") == before + 1
    resent: Any = [{"role": "user", "content": "remote weather"}, *asked.output, *answered.output]
    again = client.responses.create(input=[*resent, {"role": "user", "content": "Thanks"}], tools=[WEATHER])
    assert kinds(again) == ["message"]
    assert calls.count("get_weather Oslo") == before + 1


def test_result_reaches_another_session(client: OpenAI, calls: CallFile) -> None:
    """With other instructions the conversation moves to a new session, and the call still runs once."""
    before = calls.count("get_weather Oslo")
    asked = client.responses.create(input="remote weather", tools=[WEATHER])
    answered = client.responses.create(**decision(asked), instructions="Be brief.")
    assert (kinds(answered), answered.output_text) == (["mcp_call", "message"], "So it is.")
    assert calls.count("get_weather Oslo") == before + 1


def test_denied_call_does_not_run(client: OpenAI, calls: CallFile) -> None:
    """The model is told, with the reason."""
    before = calls.count("get_weather Oslo")
    asked = client.responses.create(input="remote weather", tools=[WEATHER])
    answered = client.responses.create(**decision(asked, approve=False, reason="Too cold."))
    assert (kinds(answered), answered.output_text) == (["message"], "Then not: Too cold.")
    assert calls.count("get_weather Oslo") == before


def test_error_of_the_tool_is_an_error_of_the_call(client: OpenAI) -> None:
    """The model goes on with its text."""
    asked = client.responses.create(input="remote fail", tools=[WEATHER])
    answered = client.responses.create(**decision(asked))
    call = answered.output[0]
    assert call.type == "mcp_call"
    assert (call.status, call.output) == ("failed", None)
    assert "Error executing tool fail" in str(call.error)
    assert answered.output_text == "So it is."


def test_stream_has_the_events_of_the_items(client: OpenAI) -> None:
    """The package assembles the same response from them."""
    heard = list(client.responses.create(input="remote weather", tools=[WEATHER], stream=True))
    assert [event.type for event in heard if "delta" not in event.type] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.mcp_list_tools.in_progress",
        "response.mcp_list_tools.completed",
        "response.output_item.done",
        "response.output_item.added",
        "response.output_item.done",
        "response.completed",
    ]
    last = heard[-1]
    assert last.type == "response.completed"
    done = [event.item for event in heard if event.type == "response.output_item.done"]
    assert done == last.response.output
    events = list(client.responses.create(**decision(last.response), stream=True))
    assert [event.type for event in events][2:7] == [
        "response.output_item.added",
        "response.mcp_call.in_progress",
        "response.mcp_call_arguments.done",
        "response.mcp_call.completed",
        "response.output_item.done",
    ]
    final = events[-1]
    assert final.type == "response.completed"
    assert kinds(final.response) == ["mcp_call", "message"]


async def test_call_runs_over_a_websocket(daemon: Daemon, calls: CallFile) -> None:
    """The result is the same as over HTTP."""
    before = calls.count("get_weather Oslo")
    address = f"http://127.0.0.1:{daemon.port}/v1"
    async with (
        AsyncOpenAI(base_url=address, api_key=daemon.admin_token, max_retries=0) as openai,
        openai.responses.connect() as connection,
    ):
        await connection.response.create(input="remote weather", tools=[WEATHER])
        asked = await until_completed(connection)
        await connection.response.create(**decision(asked))
        answered = await until_completed(connection)
    assert kinds(answered) == ["mcp_call", "message"]
    assert calls.count("get_weather Oslo") == before + 1


async def until_completed(connection: Any) -> Response:
    """Return the next complete response of a socket."""
    async with asyncio.timeout(60):
        while (event := await connection.recv()).type != "response.completed":
            assert event.type not in ("error", "response.failed"), event
    response: Response = event.response
    return response


def test_address_of_a_client_is_never_contacted(client: OpenAI, server: int) -> None:
    """A server that is not declared is not offered; the address of a declared one has no effect."""
    foreign: Any = {"type": "mcp", "server_label": "mine", "server_url": f"http://127.0.0.1:{server}/mcp"}
    answered = client.responses.create(input="hello", tools=[foreign])
    assert kinds(answered) == ["message"]
    assert any("mine) has no effect" in warning for warning in warnings(answered))
    declared_too: Any = WEATHER | {"server_url": "http://127.0.0.1:1/mcp", "authorization": "secret-of-the-client"}
    asked = client.responses.create(input="remote weather", tools=[declared_too | {"require_approval": "never"}])
    assert kinds(asked) == ["mcp_list_tools", "mcp_approval_request"]
    shown = " ".join(warnings(asked))
    assert all(f"tools[].{name} has no effect" in shown for name in ("server_url", "authorization", "require_approval"))
    assert "secret-of-the-client" not in client.responses.retrieve(asked.id).model_dump_json()


def test_server_that_cannot_be_reached_has_no_tools(client: OpenAI) -> None:
    """Its list says why; the response goes on without it."""
    gone: Any = {"type": "mcp", "server_label": "gone"}
    answered = client.responses.create(input="hello", tools=[gone])
    assert kinds(answered) == ["mcp_list_tools", "message"]
    listed = answered.output[0]
    assert listed.type == "mcp_list_tools"
    assert (listed.tools, bool(listed.error)) == ([], True)


def test_approval_needs_the_response_with_the_call(client: OpenAI, calls: CallFile) -> None:
    """An invented id and a copy of the call run no tool."""
    before = calls.count("get_weather Oslo")
    asked = client.responses.create(input="remote weather", tools=[WEATHER])
    fields = decision(asked)
    copied: Any = [*asked.output, *fields["input"]]
    with pytest.raises(BadRequestError, match="previous_response_id"):
        client.responses.create(input=copied, tools=[WEATHER])
    made_up = fields["input"][0] | {"approval_request_id": "mcpr_made_up"}
    with pytest.raises(BadRequestError, match="mcp_approval_request of the previous response"):
        client.responses.create(**fields | {"input": [made_up]})
    assert calls.count("get_weather Oslo") == before


@pytest.mark.slow
def test_killed_call_is_not_repeated(tmp_path: Path, server: int, calls: CallFile) -> None:
    """After kill -9 the same request tells the model that the result is unknown."""
    before = calls.count("slow began")
    with mcp_daemon(tmp_path, declared(server)) as daemon, openai_client(daemon) as client:
        asked = client.responses.create(input="remote slow", tools=[WEATHER])

        def approve() -> None:
            with pytest.raises(APIError):
                client.responses.create(**decision(asked))

        request = threading.Thread(target=approve)
        request.start()
        asyncio.run(calls.until("slow began", before + 1))
        daemon.process.send_signal(signal.SIGKILL)
        daemon.process.wait()
        request.join()
    with mcp_daemon(tmp_path, declared(server)) as daemon, openai_client(daemon) as client:
        answered = client.responses.create(**decision(asked))
        call = answered.output[0]
        assert call.type == "mcp_call"
        assert (call.status, call.output) == ("failed", None)
        assert "its result is unknown" in str(call.error)
        assert answered.output_text == "It is not known."
    assert calls.count("slow began") == before + 1


_LATE = """
import json, os, sys, time
info = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "x", "version": "1"}}
for line in sys.stdin:
    message = json.loads(line)
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    if "id" in message:
        result = info if message["method"] == "initialize" else {"tools": []}
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
"""


@pytest.mark.slow
def test_session_may_be_archived_while_tools_are_listed(tmp_path: Path) -> None:
    """The response continues it anyway."""
    go = tmp_path / "go"
    late = {"command": sys.executable, "args": ["-c", _LATE, str(go)], "scope": "user", "connect_timeout_s": 60}
    with mcp_daemon(tmp_path, {"late": late}) as daemon, openai_client(daemon) as openai:
        first = openai.responses.create(input="Hi")
        tool: Any = {"type": "mcp", "server_label": "late"}
        with ThreadPoolExecutor(1) as pool:
            second = pool.submit(openai.responses.create, input="Again", previous_response_id=first.id, tools=[tool])
            while not daemon.metric("archived_sessions"):
                openai.responses.create(input="Hi")
            go.touch()
            assert second.result().output_text == "Hello."

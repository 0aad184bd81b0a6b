"""The listening port: binding, stopping, idling."""

from __future__ import annotations

import asyncio
import json
import signal
from typing import TYPE_CHECKING

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.server.listener import bind
from tests.server.harness import Running, ask, receive

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from websockets.asyncio.client import ClientConnection

    Serve = Callable[..., AbstractAsyncContextManager[Running]]


async def receive_all(client: ClientConnection) -> tuple[list[str], int | None]:
    """Receive until the socket closes; return the ops and the close code."""
    ops: list[str] = []
    try:
        while True:
            ops.append((await receive(client))["op"])
    except ConnectionClosed as closed:
        return ops, closed.rcvd.code if closed.rcvd else None


def test_port_in_use_is_an_error() -> None:
    """It names the address and the setting."""
    (taken,) = bind("127.0.0.1", 0)
    port = taken.getsockname()[1]
    with pytest.raises(InferenceCenterError, match=f"127.0.0.1:{port}") as caught:
        bind("127.0.0.1", port)
    taken.close()
    assert (caught.value.code, caught.value.field) == (ErrorCode.ADDRESS_IN_USE, "server.port")
    assert caught.value.hint


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host"])
def test_foreign_address_is_an_error(host: str) -> None:
    """It names the setting."""
    with pytest.raises(InferenceCenterError) as caught:
        bind(host, 0)
    assert (caught.value.code, caught.value.field) == (ErrorCode.ADDRESS_IN_USE, "server.host")


def test_every_address_of_a_name_has_the_same_port() -> None:
    """A name with several addresses listens on one port, chosen once."""
    found = bind("localhost", 0)
    assert len({listening.getsockname()[1] for listening in found}) == 1
    for listening in found:
        listening.close()


async def test_signal_handlers_are_unchanged(serve: Serve) -> None:
    """They are those from before the server ran."""
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(each) for each in signals]
    async with serve() as server:
        assert (await server.http("/healthz"))[0] == 200
        assert [signal.getsignal(each) for each in signals] == before


async def test_headers_have_date_but_no_server(server: Running) -> None:
    """The server software is not disclosed."""
    _, head, _ = await server.http("/healthz")
    assert "\r\ndate: " in head
    assert "\r\nserver:" not in head.lower()


async def test_stop_notifies_clients(serve: Serve) -> None:
    """An idle client gets going_away and 1012; an unauthenticated one is closed."""
    async with serve(shutdown_timeout_s=60) as server, server.v1() as client, server.connect() as guest:
        await receive(client)
        await receive(guest)
        server.listener.stop()
        going = await receive(client)
        assert going == {"op": "going_away", "deadline_ms": 60_000, "resume": False}
        assert await receive_all(client) == ([], 1012)
        assert await receive_all(guest) == ([], 1012)
        await server.serving


async def test_stop_waits_for_running_turns(serve: Serve) -> None:
    """A draining socket refuses new turns, and closes after the running one."""
    async with serve(shutdown_timeout_s=60) as server, server.v1() as client:
        await receive(client)
        sid = (await ask(client, op="create_session"))["session_id"]
        turn = (await ask(client, op="infer", session_id=sid, prompt="hi"))["turn_id"]
        server.engine.begin(turn)
        server.listener.stop()
        assert (await receive(client))["op"] == "going_away"
        refused = await ask(client, op="create_session")
        assert (refused["code"], refused["retryable"]) == ("engine_unavailable", True)
        assert (await ask(client, op="ping"))["op"] == "pong"
        server.engine.say(turn, "still here")
        assert (await receive(client))["content"] == "still here"
        server.engine.finish(turn)
        assert await receive_all(client) == (["end"], 1012)
        await server.serving


async def test_stop_deadline_suspends_running_turns(serve: Serve) -> None:
    """The daemon stops in time, and these turns stay unfinished."""
    async with serve(shutdown_timeout_s=0.05) as server, server.v1() as client:
        await receive(client)
        sid = (await ask(client, op="create_session"))["session_id"]
        await ask(client, op="infer", session_id=sid, prompt="hi")
        server.listener.stop()
        assert await receive_all(client) == (["going_away"], 1012)
        await server.serving
        assert len(server.engine.turns) == 1


async def test_draining_refuses_new_connections(serve: Serve) -> None:
    """The status is 503, and readiness is false."""
    async with serve(shutdown_timeout_s=60) as server, server.v1() as client:
        await receive(client)
        sid = (await ask(client, op="create_session"))["session_id"]
        turn = (await ask(client, op="infer", session_id=sid, prompt="hi"))["turn_id"]
        draining = asyncio.get_running_loop().create_task(server.context.drain())
        await receive(client)
        with pytest.raises(InvalidStatus) as caught:
            await server.connect()
        assert caught.value.response.status_code == 503
        status, _, body = await server.http("/readyz")
        assert (status, json.loads(body)["state"]) == (503, "draining")
        server.engine.finish(turn)
        await draining


async def test_unresponsive_socket_is_aborted_at_the_stop(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that does not answer the close frame does not delay the stop."""
    monkeypatch.setattr("inferencecenter.server.listener.CLOSING_S", 0.1)
    async with serve() as server, server.v1() as client:
        await receive(client)
        client.transport.pause_reading()
        server.listener.stop()
        async with asyncio.timeout(60):
            await server.serving
        assert server.listener.server_state.connections == set()


async def test_idle_server_does_not_tick(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uvicorn's periodic check never runs."""

    async def on_tick(_server: object, _counter: int) -> bool:
        raise AssertionError("ticked")

    monkeypatch.setattr("uvicorn.Server.on_tick", on_tick)
    async with serve() as server:
        assert (await server.http("/healthz"))[0] == 200
    assert server.serving.exception() is None

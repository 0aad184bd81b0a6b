"""Tests of the port itself: binding, stopping, idling."""

from __future__ import annotations

import asyncio
import json
import signal
from typing import TYPE_CHECKING

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.server.listener import bind
from tests.server.harness import Running, ask, hear

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from websockets.asyncio.client import ClientConnection

    Serve = Callable[..., AbstractAsyncContextManager[Running]]


async def to_the_end(client: ClientConnection) -> tuple[list[str], int | None]:
    """Read until the socket closes; return the ops and the close code."""
    ops: list[str] = []
    try:
        while True:
            ops.append((await hear(client))["op"])
    except ConnectionClosed as closed:
        return ops, closed.rcvd.code if closed.rcvd else None


def test_a_port_in_use_is_said_to_be() -> None:
    """The error names the address and the setting."""
    (taken,) = bind("127.0.0.1", 0)
    port = taken.getsockname()[1]
    with pytest.raises(InferenceCenterError, match=f"127.0.0.1:{port}") as caught:
        bind("127.0.0.1", port)
    taken.close()
    assert (caught.value.code, caught.value.field) == (ErrorCode.ADDRESS_IN_USE, "server.port")
    assert caught.value.hint


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host"])
def test_an_address_of_another_machine_is_said_to_be(host: str) -> None:
    """The error names the setting."""
    with pytest.raises(InferenceCenterError) as caught:
        bind(host, 0)
    assert (caught.value.code, caught.value.field) == (ErrorCode.ADDRESS_IN_USE, "server.host")


def test_every_address_of_a_name_has_the_same_port() -> None:
    """A name with several addresses listens on one port, chosen once."""
    found = bind("localhost", 0)
    assert len({listening.getsockname()[1] for listening in found}) == 1
    for listening in found:
        listening.close()


async def test_signals_are_left_alone(serve: Serve) -> None:
    """The handlers are those from before the server ran."""
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(each) for each in signals]
    async with serve() as server:
        assert (await server.http("/healthz"))[0] == 200
        assert [signal.getsignal(each) for each in signals] == before


async def test_headers_tell_the_date_and_not_the_server(server: Running) -> None:
    """Date is made when it is needed; who serves is nobody's business."""
    _, head, _ = await server.http("/healthz")
    assert "\r\ndate: " in head
    assert "\r\nserver:" not in head.lower()


async def test_stopping_tells_clients_first(serve: Serve) -> None:
    """A client with nothing running is told to go, and is closed with 1012 at once; a guest is just closed."""
    async with serve(shutdown_timeout_s=60) as server, server.v1() as client, server.connect() as guest:
        await hear(client)
        await hear(guest)
        server.listener.stop()
        going = await hear(client)
        assert going == {"op": "going_away", "deadline_ms": 60_000, "resume": False}
        assert await to_the_end(client) == ([], 1012)
        assert await to_the_end(guest) == ([], 1012)
        await server.serving


async def test_running_turns_may_finish(serve: Serve) -> None:
    """A draining socket takes no new turn, streams the running one to its end, and closes then."""
    async with serve(shutdown_timeout_s=60) as server, server.v1() as client:
        await hear(client)
        sid = (await ask(client, op="create_session"))["session_id"]
        turn = (await ask(client, op="infer", session_id=sid, prompt="hi"))["turn_id"]
        server.engine.begin(turn)
        server.listener.stop()
        assert (await hear(client))["op"] == "going_away"
        refused = await ask(client, op="create_session")
        assert (refused["code"], refused["retryable"]) == ("engine_unavailable", True)
        assert (await ask(client, op="ping"))["op"] == "pong"
        server.engine.say(turn, "still here")
        assert (await hear(client))["content"] == "still here"
        server.engine.finish(turn)
        assert await to_the_end(client) == (["end"], 1012)
        await server.serving


async def test_at_the_deadline_running_turns_are_cut(serve: Serve) -> None:
    """The daemon does not wait longer than it was told to, and what nobody waits for any more stays unfinished."""
    async with serve(shutdown_timeout_s=0.05) as server, server.v1() as client:
        await hear(client)
        sid = (await ask(client, op="create_session"))["session_id"]
        await ask(client, op="infer", session_id=sid, prompt="hi")
        server.listener.stop()
        assert await to_the_end(client) == (["going_away"], 1012)
        await server.serving
        assert len(server.engine.turns) == 1


async def test_nobody_new_is_let_in_while_draining(serve: Serve) -> None:
    """A connection that was accepted just before is refused with 503, and readiness is over."""
    async with serve(shutdown_timeout_s=60) as server, server.v1() as client:
        await hear(client)
        sid = (await ask(client, op="create_session"))["session_id"]
        turn = (await ask(client, op="infer", session_id=sid, prompt="hi"))["turn_id"]
        draining = asyncio.get_running_loop().create_task(server.context.drain())
        await hear(client)
        with pytest.raises(InvalidStatus) as caught:
            await server.connect()
        assert caught.value.response.status_code == 503
        status, _, body = await server.http("/readyz")
        assert (status, json.loads(body)["state"]) == (503, "draining")
        server.engine.finish(turn)
        await draining


async def test_a_socket_that_does_not_read_does_not_hold_up_the_end(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever does not answer the close is aborted."""
    monkeypatch.setattr("inferencecenter.server.listener.CLOSING_S", 0.1)
    async with serve() as server, server.v1() as client:
        await hear(client)
        client.transport.pause_reading()
        server.listener.stop()
        async with asyncio.timeout(60):
            await server.serving
        assert server.listener.server_state.connections == set()


async def test_an_idle_server_does_not_tick(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uvicorn's periodic look at flag and clock never happens, from start to stop."""

    async def on_tick(_server: object, _counter: int) -> bool:
        raise AssertionError("ticked")

    monkeypatch.setattr("uvicorn.Server.on_tick", on_tick)
    async with serve() as server:
        assert (await server.http("/healthz"))[0] == 200
    assert server.serving.exception() is None

"""Tests of the HTTP pages."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from inferencecenter.ipc.port import EngineState
from tests.server.harness import Running, ready

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    Serve = Callable[..., AbstractAsyncContextManager[Running]]

PROXIED = "X-Forwarded-For: 192.0.2.1\r\n"


@pytest.mark.parametrize("path", ["/", "/ws", "/api/inference"])
async def test_a_visitor_without_a_websocket_learns_what_this_is(server: Running, path: str) -> None:
    """A plain GET is answered."""
    status, _, body = await server.http(path)
    assert (status, json.loads(body)["server"]) == (200, "inferencecenter")


async def test_health_does_not_depend_on_the_engine(server: Running) -> None:
    """The process lives while the engine is dead."""
    server.engine.status = ready(state=EngineState.FAILED)
    assert (await server.http("/healthz"))[0] == 200


@pytest.mark.parametrize("state", EngineState)
async def test_readiness_is_the_engines(server: Running, state: EngineState) -> None:
    """200 only when a turn could run, also if it wakes the engine; the body says why not, and how far loading is."""
    server.engine.status = ready(state=state, load_fraction=0.25, detail="because")
    status, _, body = await server.http("/readyz")
    serves = state in (EngineState.READY, EngineState.SUSPENDING, EngineState.ASLEEP)
    assert status == (200 if serves else 503)
    answer = json.loads(body)
    assert (answer["state"], answer["load_fraction"]) == (state.value, 0.25)
    assert answer["detail"] == {
        EngineState.READY: "stub is ready",
        EngineState.STARTING: "loading the model: 25%",
        EngineState.SUSPENDING: "stub is asleep, and wakes for the next turn",
        EngineState.ASLEEP: "stub is asleep, and wakes for the next turn",
    }.get(state, f"the engine is {state}: because")


async def test_metrics_are_in_prometheus_format(server: Running) -> None:
    """Gauges are up to date; readings of a GPU that is not there are NaN."""
    server.engine.status = ready(restarts=3, rss_bytes=1000, waiting=2)
    status, head, body = await server.http("/metrics")
    text = body.decode()
    assert status == 200
    assert "text/plain; version=" in head
    assert "inferencecenter_engine_restarts 3.0" in text
    assert 'inferencecenter_engine_state{state="ready"} 1.0' in text
    assert 'inferencecenter_engine_state{state="failed"} 0.0' in text
    assert "inferencecenter_waiting_turns 2.0" in text
    assert "inferencecenter_gpu_temperature_celsius NaN" in text


@pytest.mark.parametrize(
    ("access", "headers", "status"),
    [
        ("loopback", "", 200),
        ("loopback", PROXIED, 403),
        ("loopback", PROXIED + "Authorization: Bearer {operator}\r\n", 403),
        ("either", "", 200),
        ("either", PROXIED, 401),
        ("either", PROXIED + "Authorization: Bearer {operator}\r\n", 200),
        ("either", PROXIED + "Authorization: Bearer {user}\r\n", 403),
        ("either", PROXIED + "Authorization: Bearer wrong\r\n", 401),
        ("token", "", 401),
        ("token", "Authorization: Bearer {operator}\r\n", 200),
        ("token", "X-Client-ID: desk\r\nX-API-Key: desk-key\r\n", 200),
    ],
)
async def test_who_may_read_the_metrics(serve: Serve, access: str, headers: str, status: int) -> None:
    """The setting decides; a proxy on this machine does not make its visitors local."""
    async with serve(metrics_access=access) as server:
        server.accounts.ensure_client("op", max_sessions=1, priority="normal", scopes=["operator"])
        operator = server.accounts.create_token("op").token
        answer = await server.http("/metrics", headers.format(operator=operator, user=server.token))
        assert answer[0] == status
        assert (status == 200) == (b"inferencecenter_connections" in answer[2])


async def test_a_token_in_the_address_of_the_metrics_is_refused(serve: Serve) -> None:
    """As for sockets."""
    async with serve(metrics_access="token") as server:
        assert (await server.http(f"/metrics?token={server.token}"))[0] == 400

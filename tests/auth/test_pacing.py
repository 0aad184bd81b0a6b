"""Operations and connections are spread evenly while turns of others run."""

from __future__ import annotations

import json
from asyncio import TaskGroup
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import pytest

from inferencecenter.api.websocket.connection import Connection
from inferencecenter.auth.rate_limits import MAX_PACE_DELAY_S, Pacer
from inferencecenter.server.handshake import TrustedProxies
from tests.server.harness import StubWire, stub_context

if TYPE_CHECKING:
    from inferencecenter.server.context import ServerContext
    from tests.loop_clock import LoopClock

PING: Final = json.dumps({"op": "ping"})


class Clock:
    """Seconds that a test advances."""

    now = 5.0

    def __call__(self) -> float:
        """Return them."""
        return self.now


def test_work_beyond_the_burst_is_spread_evenly() -> None:
    """Each piece is due one interval after the previous one, and a pause restores the burst."""
    clock = Clock()
    pacer = Pacer(interval_s=0.5, burst=4, monotonic=clock)
    assert [pacer.delay_s("eve") for _ in range(7)] == [0, 0, 0, 0, 0.5, 1, 1.5]
    assert pacer.delay_s("ada") == 0
    clock.now += 2.5
    assert pacer.delay_s("eve") == 0
    assert pacer.delay_s("eve") == 0
    assert pacer.delay_s("eve") == 0.5
    clock.now += 1000
    assert [pacer.delay_s("eve") for _ in range(5)] == [0, 0, 0, 0, 0.5]


def test_delays_and_keys_are_bounded() -> None:
    """A flood delays its key for seconds at most, and the number of keys has a limit."""
    clock = Clock()
    pacer = Pacer(interval_s=0.5, burst=4, monotonic=clock)
    assert max(pacer.delay_s("eve") for _ in range(1000)) == MAX_PACE_DELAY_S
    clock.now += MAX_PACE_DELAY_S
    assert pacer.delay_s("eve") == 0.5
    for n in range(20_000):
        pacer.delay_s(f"client-{n}")
    assert len(pacer) == 10_000


def run_turn_of(context: ServerContext, client_id: str) -> None:
    """Count a turn of a client as running."""
    context.sessions._active_turns.add(1, client_id=client_id, stateless=False)


async def client_socket() -> Connection:
    """Return an authenticated socket without a network."""
    connection = Connection(stub_context(), StubWire(), address="192.0.2.1", v1=True)
    await connection.receive(json.dumps({"op": "auth", "client_id": "kitchen", "api_key": "key"}))
    assert connection.authenticated
    return connection


async def test_operations_are_paced_while_turns_of_others_run(clock: LoopClock) -> None:
    """After a burst the socket is read again when the next operation is due; the reply has been sent before."""
    connection = await client_socket()
    run_turn_of(connection.context, "other")
    delayed = 0
    for _ in range(50):
        async with TaskGroup() as tasks:
            reading = tasks.create_task(connection.receive(PING))
            await clock.go_on(0)
            delayed += not reading.done()
            await clock.go_on(MAX_PACE_DELAY_S)
    assert delayed > 25


@pytest.mark.parametrize("runs", ["", "kitchen"])
async def test_operations_are_not_delayed_while_no_other_turns_run(runs: str) -> None:
    """They are handled without an iteration of the event loop between."""
    connection = await client_socket()
    if runs:
        run_turn_of(connection.context, runs)
    for _ in range(200):
        with pytest.raises(StopIteration):
            connection.receive(PING).send(None)


async def test_turns_and_aborts_are_not_paced() -> None:
    """They have limits of their own, and an abort must not wait."""
    connection = await client_socket()
    run_turn_of(connection.context, "other")
    for op in ("infer", "abort"):
        await connection.receive(json.dumps({"op": op, "session_id": "gone", "prompt": "hi"}))
    assert len(connection.context.operation_pacer) == 0
    await connection.receive(PING)
    assert len(connection.context.operation_pacer) == 1


async def test_connections_are_paced_by_address_while_turns_run() -> None:
    """An IPv6 subscriber counts as one address; proxies bring many clients and are not delayed."""
    context = stub_context()
    assert not any(context.connection_delay_s("192.0.2.1") for _ in range(100))
    run_turn_of(context, "other")
    assert sum(context.connection_delay_s(f"2001:db8::{n:x}") > 0 for n in range(100)) > 50
    assert context.connection_delay_s("192.0.2.1") == 0
    behind_proxy = replace(context, proxies=TrustedProxies(("192.0.2.7",)))
    assert not any(behind_proxy.connection_delay_s("192.0.2.7") for _ in range(100))

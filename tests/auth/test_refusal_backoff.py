"""The delay of a client that continues after refusals."""

from __future__ import annotations

import asyncio
import json
from asyncio import TaskGroup
from typing import TYPE_CHECKING

import pytest

from inferencecenter.api.websocket.connection import Connection
from inferencecenter.auth.rate_limits import FREE_REFUSALS, MAX_DELAY_S, RefusalBackoff, RefusalBackoffs
from inferencecenter.protocol.close import CloseCode
from tests.server.harness import StubWire, stub_context

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.loop_clock import LoopClock


def test_delay_grows_up_to_a_bound() -> None:
    """The first refusals cost no time, each later one more than the previous, up to the bound."""
    backoff = RefusalBackoff()
    delays = [backoff.refused() for _ in range(1000)]
    assert delays[:FREE_REFUSALS] == [0] * FREE_REFUSALS
    growing = delays[FREE_REFUSALS : delays.index(MAX_DELAY_S) + 1]
    assert growing == sorted(set(growing))
    assert growing[0] > 0
    assert set(delays[delays.index(MAX_DELAY_S) :]) == {MAX_DELAY_S}


def test_accepted_frame_halves_the_count() -> None:
    """A client that fails every second time never waits; after many refusals several successes are needed."""
    backoff = RefusalBackoff()
    for _ in range(1000):
        assert backoff.refused() == 0
        backoff.accepted()
    for _ in range(1000):
        backoff.refused()
    for _ in range(3):
        backoff.accepted()
    assert backoff.refused() == 0


def test_few_accepted_frames_do_not_reset_the_delay() -> None:
    """Sixteen refusals for each accepted frame are still delayed."""
    backoff = RefusalBackoff()
    for _ in range(100):
        waited = sum(backoff.refused() for _ in range(FREE_REFUSALS))
        backoff.accepted()
    assert waited >= MAX_DELAY_S


def test_clients_have_separate_delays() -> None:
    """With very many clients the one refused longest ago is evicted."""
    refusal_backoffs = RefusalBackoffs()
    delays = [refusal_backoffs.refused("eve") for _ in range(2 * FREE_REFUSALS)]
    assert delays[-1] > 0
    assert refusal_backoffs.refused("ada") == 0
    for _ in range(8):
        refusal_backoffs.accepted("eve")
    assert refusal_backoffs.refused("eve") == 0
    for n in range(2000):
        refusal_backoffs.refused(f"client-{n}")
    assert len(refusal_backoffs) == 1000


async def client_socket() -> Connection:
    """Return an authenticated socket without a network."""
    connection = Connection(stub_context(), StubWire(), address="192.0.2.1", v1=True)
    await connection.receive(json.dumps({"op": "auth", "client_id": "kitchen", "api_key": "key"}))
    assert connection.authenticated
    return connection


async def test_reading_is_delayed_after_many_refusals(clock: LoopClock) -> None:
    """The refusals are sent at once; the reading task continues after the delay."""
    connection = await client_socket()
    for _ in range(FREE_REFUSALS):
        await connection.receive("{")
    async with TaskGroup() as tasks:
        reading = tasks.create_task(connection.receive("{"))
        await clock.go_on(0)
        assert not reading.done()
        await clock.go_on(MAX_DELAY_S)
        assert reading.done()
    await connection.receive('{"op": "ping"}')


@pytest.mark.parametrize("frame", ['{"op": "nonsense"}', '{"op": "append"}', "{", '{"op": "load_model", "name": "m"}'])
async def test_every_kind_of_refusal_counts(clock: LoopClock, frame: str) -> None:
    """A frame that is malformed, invalid, unknown or forbidden delays the next one."""
    connection = await client_socket()
    for _ in range(FREE_REFUSALS):
        await connection.receive(frame)
    async with TaskGroup() as tasks:
        reading = tasks.create_task(connection.receive(frame))
        await clock.go_on(0)
        assert not reading.done()
        await clock.go_on(MAX_DELAY_S)


@pytest.mark.parametrize("end", [Connection.lost, lambda connection: connection.close(CloseCode.RESTART, "")])
async def test_delayed_socket_closes_at_once(end: Callable[[Connection], None]) -> None:
    """Shutdown and disconnect do not wait for the delay."""
    connection = await client_socket()
    for _ in range(FREE_REFUSALS):
        await connection.receive("{")
    async with TaskGroup() as tasks:
        reading = tasks.create_task(connection.receive("{"))
        await asyncio.sleep(0)
        end(connection)
        await reading


async def test_occasional_errors_are_not_delayed() -> None:
    """Requests are handled without an iteration of the event loop between."""
    connection = await client_socket()
    for _ in range(4 * FREE_REFUSALS):
        for frame in ('{"op": "abort", "session_id": "gone"}', '{"op": "ping"}'):
            with pytest.raises(StopIteration):
                connection.receive(frame).send(None)

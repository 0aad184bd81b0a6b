"""How long a client waits that goes on asking after refusals."""

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


def test_delays_grow_up_to_a_bound() -> None:
    """The first refusals cost no time, each one after them more than the one before, up to the bound."""
    pace = RefusalBackoff()
    delays = [pace.refused() for _ in range(1000)]
    assert delays[:FREE_REFUSALS] == [0] * FREE_REFUSALS
    growing = delays[FREE_REFUSALS : delays.index(MAX_DELAY_S) + 1]
    assert growing == sorted(set(growing))
    assert growing[0] > 0
    assert set(delays[delays.index(MAX_DELAY_S) :]) == {MAX_DELAY_S}


def test_what_is_accepted_halves_what_was_counted() -> None:
    """A client that errs as often as it succeeds never waits; one that was refused for long needs a few successes."""
    pace = RefusalBackoff()
    for _ in range(1000):
        assert pace.refused() == 0
        pace.accepted()
    for _ in range(1000):
        pace.refused()
    for _ in range(3):
        pace.accepted()
    assert pace.refused() == 0


def test_a_few_accepted_frames_do_not_buy_many_refusals() -> None:
    """Sixteen refusals for each accepted frame wait, however long that goes on."""
    pace = RefusalBackoff()
    for _ in range(100):
        waited = sum(pace.refused() for _ in range(FREE_REFUSALS))
        pace.accepted()
    assert waited >= MAX_DELAY_S


def test_clients_have_paces_of_their_own() -> None:
    """One's refusals delay no other, and of very many clients those are forgotten that were refused longest ago."""
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


async def authenticated() -> Connection:
    """Return a socket of a client, without a network."""
    connection = Connection(stub_context(), StubWire(), address="192.0.2.1", v1=True)
    await connection.receive(json.dumps({"op": "auth", "client_id": "kitchen", "api_key": "key"}))
    assert connection.authenticated
    return connection


async def test_the_next_frame_is_read_later_after_many_refusals(clock: LoopClock) -> None:
    """The refusals are told at once; the task that reads the socket goes on when the time has passed."""
    connection = await authenticated()
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
async def test_every_refusal_counts(clock: LoopClock, frame: str) -> None:
    """Whether a frame cannot be read, is not valid or is not allowed."""
    connection = await authenticated()
    for _ in range(FREE_REFUSALS):
        await connection.receive(frame)
    async with TaskGroup() as tasks:
        reading = tasks.create_task(connection.receive(frame))
        await clock.go_on(0)
        assert not reading.done()
        await clock.go_on(MAX_DELAY_S)


@pytest.mark.parametrize("end", [Connection.lost, lambda connection: connection.close(CloseCode.RESTART, "")])
async def test_a_socket_that_waits_ends_at_once(end: Callable[[Connection], None]) -> None:
    """Neither the end of the daemon nor that of the client waits for the time to pass."""
    connection = await authenticated()
    for _ in range(FREE_REFUSALS):
        await connection.receive("{")
    async with TaskGroup() as tasks:
        reading = tasks.create_task(connection.receive("{"))
        await asyncio.sleep(0)
        end(connection)
        await reading


async def test_a_client_that_errs_now_and_then_never_waits() -> None:
    """What it asks for is done without a turn of the event loop between."""
    connection = await authenticated()
    for _ in range(4 * FREE_REFUSALS):
        for frame in ('{"op": "abort", "session_id": "gone"}', '{"op": "ping"}'):
            with pytest.raises(StopIteration):
                connection.receive(frame).send(None)

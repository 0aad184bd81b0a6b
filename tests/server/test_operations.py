"""How often a client may ask for anything but turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.server.operations import UNIT_CHARS, OperationRates
from tests.server.harness import ask, hear

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from tests.server.harness import Running

    Serve = Callable[..., AbstractAsyncContextManager[Running]]


class Clock:
    """Seconds that a test lets pass."""

    now = 5.0

    def __call__(self) -> float:
        """Return them."""
        return self.now


def test_operations_are_regained_evenly() -> None:
    """What a minute allows may be used at once; then each is there again after its share of the minute."""
    clock = Clock()
    rates = OperationRates(60, monotonic=clock)
    for _ in range(60):
        rates.charge("ada")
    for client in ("eve", "bob"):
        rates.charge(client)
    with pytest.raises(InferenceCenterError) as caught:
        rates.charge("ada")
    assert (caught.value.code, caught.value.retry_after_ms) == (ErrorCode.RATE_LIMITED, 1000)
    clock.now += 1
    rates.charge("ada")
    with pytest.raises(InferenceCenterError):
        rates.charge("ada")


def test_long_sessions_count_for_more() -> None:
    """A session of 16 MiB counts as 257 operations, which are owed where they are not there."""
    clock = Clock()
    rates = OperationRates(60, monotonic=clock)
    rates.charge("ada", n_chars=256 * UNIT_CHARS)
    with pytest.raises(InferenceCenterError) as caught:
        rates.charge("ada")
    assert caught.value.retry_after_ms == (257 - 60 + 1) * 1000


def test_clients_that_ask_no_more_are_forgotten() -> None:
    """Any number may come; those stay that still owe something."""
    clock = Clock()
    rates = OperationRates(60, monotonic=clock)
    for n in range(20_000):
        clock.now += 0.1
        rates.charge(f"client-{n}")
        assert len(rates) <= 2000


async def test_what_is_no_turn_is_refused_beyond_its_rate(serve: Serve) -> None:
    """On all sockets of the client together; turns and their end go on, and no other client is touched."""
    async with serve(operations_per_minute=5) as server, server.v1() as one, server.v1() as other:
        for socket in (one, other):
            await hear(socket)
        session_id = (await ask(one, op="create_session"))["session_id"]
        for n in range(4):
            await ask((one, other)[n % 2], op="ping")
        for op in ("ping", "get_session", "fork_session", "resume_session", "set_metadata"):
            fields = {"session_id": session_id} if op != "ping" else {}
            refused = await ask(other, op=op, **fields, **({"metadata": {}} if op == "set_metadata" else {}))
            assert (refused["op"], refused["code"]) == ("error", "rate_limited"), op
            assert refused["retry_after_ms"] > 0
        queued = await ask(one, op="infer", session_id=session_id, prompt="hi")
        assert queued["op"] == "queued"
        assert (await ask(one, op="abort", session_id=session_id))["op"] == "end"

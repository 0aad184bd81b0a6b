"""Waiting for a model that is not loaded, and events that concern every session."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from inferencecenter.client import Client, Timing
from inferencecenter.client.retry import RetryPolicy
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.events import ModelChanged, Thermal
from inferencecenter.protocol.requests import Ping

if TYPE_CHECKING:
    from inferencecenter.client import Notice
    from tests.client.peer import Peer, Start


@dataclass
class Clock:
    """A clock that advances only during sleeps."""

    now: float = 100.0
    slept: list[float] = field(default_factory=list)

    async def sleep(self, delay_s: float) -> None:
        """Advance the time and let other tasks run."""
        self.slept.append(delay_s)
        self.now += delay_s
        await asyncio.sleep(0)

    @property
    def timing(self) -> Timing:
        """Return the clock as a client takes it."""
        return Timing(monotonic=lambda: self.now, sleep=self.sleep)


@pytest.fixture
def clock() -> Clock:
    """A clock at 0."""
    return Clock()


async def _refuse_loading(peer: Peer, op: str, **fields: Any) -> dict[str, Any]:
    request = await peer.receive()
    assert request["op"] == op
    await peer.refuse(request, "model_loading", message="phi is loading: 10%", retryable=True, **fields)
    return request


async def test_session_creation_waits_for_the_model(scripted: Start, clock: Clock) -> None:
    """It retries at the daemon's interval, or every second, and calls the callback."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        first = await _refuse_loading(peer, "create_session", retry_after_ms=250)
        second = await _refuse_loading(peer, "create_session")
        assert (first["model"], second["model"]) == ("phi", "phi")
        await peer.open_session()

    received: list[str] = []
    async with Client(await scripted(daemon), token="ic_a_b", timing=clock.timing) as client:
        session = await client.create_session(model="phi", on_loading=received.append)
        assert session.session_id == "s1"
    assert clock.slept == [0.25, 1.0]
    assert received == ["phi is loading: 10%"] * 2


async def test_fork_waits_for_the_model(scripted: Start, clock: Clock) -> None:
    """A fork waits for its model like a new session."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        await _refuse_loading(peer, "fork_session")
        await peer.open_session("s2")

    async with Client(await scripted(daemon), token="ic_a_b", timing=clock.timing) as client:
        fork = await (await client.create_session()).fork()
        assert fork.session_id == "s2"
    assert clock.slept == [1.0]


async def test_wait_for_the_model_is_limited(scripted: Start, clock: Clock) -> None:
    """After the caller's limit the daemon's error is raised."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        while True:
            await _refuse_loading(peer, "create_session", retry_after_ms=1000)

    async with Client(await scripted(daemon), token="ic_a_b", timing=clock.timing) as client:
        with pytest.raises(InferenceCenterError) as caught:
            await client.create_session(load_timeout_s=2.5)
    assert caught.value.code is ErrorCode.MODEL_LOADING
    assert clock.slept == [1.0, 1.0]


async def test_only_loading_is_awaited(clock: Clock) -> None:
    """Other errors are raised at once, retryable ones too."""
    attempts: list[int] = []

    async def attempt() -> None:
        attempts.append(1)
        raise InferenceCenterError(ErrorCode.ENGINE_UNAVAILABLE, retry_after_ms=1)

    with pytest.raises(InferenceCenterError):
        await RetryPolicy(timing=clock.timing).run(attempt)
    assert (len(attempts), clock.slept) == (1, [])


async def test_default_model_and_throttling_events(scripted: Start) -> None:
    """They reach the callback, and the client knows the current model afterwards."""
    broadcasts = [
        ModelChanged(model="phi", n_ctx=2048),
        Thermal(state="warm", temp=81.0, action="half of the slots"),
    ]

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        for event in broadcasts:
            await peer.send(**event.model_dump(exclude_none=True))
        ping = await peer.receive()
        await peer.send(op="pong", id=ping["id"])

    notices: list[Notice] = []
    async with Client(await scripted(daemon), token="ic_a_b", on_notice=notices.append) as client:
        await client.request(Ping(op="ping"))
        assert client.hello.model == "phi"
    assert notices[:2] == broadcasts

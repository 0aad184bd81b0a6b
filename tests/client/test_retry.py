"""A client whose model is not loaded yet waits for it, and hears of what concerns every session."""

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
        """Let the time pass, and the others have their turn."""
        self.slept.append(delay_s)
        self.now += delay_s
        await asyncio.sleep(0)

    @property
    def timing(self) -> Timing:
        """The clock as a client takes it."""
        return Timing(monotonic=lambda: self.now, sleep=self.sleep)


@pytest.fixture
def clock() -> Clock:
    """A clock that stands."""
    return Clock()


async def _refuse_loading(peer: Peer, op: str, **fields: Any) -> dict[str, Any]:
    request = await peer.hear()
    assert request["op"] == op
    await peer.refuse(request, "model_loading", message="phi is loading: 10%", retryable=True, **fields)
    return request


async def test_a_session_is_asked_for_until_its_model_is_loaded(scripted: Start, clock: Clock) -> None:
    """At the interval given by the daemon, or every second; the callback is called."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        first = await _refuse_loading(peer, "create_session", retry_after_ms=250)
        second = await _refuse_loading(peer, "create_session")
        assert (first["model"], second["model"]) == ("phi", "phi")
        await peer.open_session()

    heard: list[str] = []
    async with Client(await scripted(daemon), token="ic_a_b", timing=clock.timing) as client:
        session = await client.create_session(model="phi", on_loading=heard.append)
        assert session.session_id == "s1"
    assert clock.slept == [0.25, 1.0]
    assert heard == ["phi is loading: 10%"] * 2


async def test_a_fork_waits_likewise(scripted: Start, clock: Clock) -> None:
    """It needs the model as a new session does."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        await _refuse_loading(peer, "fork_session")
        await peer.open_session("s2")

    async with Client(await scripted(daemon), token="ic_a_b", timing=clock.timing) as client:
        fork = await (await client.create_session()).fork()
        assert fork.session_id == "s2"
    assert clock.slept == [1.0]


async def test_no_model_is_waited_for_for_ever(scripted: Start, clock: Clock) -> None:
    """After the time that the caller gives, what the daemon says is raised."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        while True:
            await _refuse_loading(peer, "create_session", retry_after_ms=1000)

    async with Client(await scripted(daemon), token="ic_a_b", timing=clock.timing) as client:
        with pytest.raises(InferenceCenterError) as caught:
            await client.create_session(load_timeout_s=2.5)
    assert caught.value.code is ErrorCode.MODEL_LOADING
    assert clock.slept == [1.0, 1.0]


async def test_only_loading_is_waited_for(clock: Clock) -> None:
    """Whatever else is wrong is raised at once, also what could be tried again."""
    asked: list[int] = []

    async def attempt() -> None:
        asked.append(1)
        raise InferenceCenterError(ErrorCode.ENGINE_UNAVAILABLE, retry_after_ms=1)

    with pytest.raises(InferenceCenterError):
        await RetryPolicy(timing=clock.timing).run(attempt)
    assert (len(asked), clock.slept) == (1, [])


async def test_another_default_and_heat_are_news(scripted: Start) -> None:
    """They reach the callback, and the current model is known from then on."""
    news = [
        ModelChanged(model="phi", n_ctx=2048),
        Thermal(state="warm", temp=81.0, action="half of the slots"),
    ]

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        for event in news:
            await peer.say(**event.model_dump(exclude_none=True))
        ping = await peer.hear()
        await peer.say(op="pong", id=ping["id"])

    notices: list[Notice] = []
    async with Client(await scripted(daemon), token="ic_a_b", on_notice=notices.append) as client:
        await client.request(Ping(op="ping"))
        assert client.hello.model == "phi"
    assert notices[:2] == news

"""When a silent connection is dropped: after a number of checks, whatever time they take."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

import pytest

from inferencecenter.ipc import keepalive
from inferencecenter.ipc.keepalive import Keepalive

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferencecenter.ipc.channel import Channel

BEAT_S = 1 / 256


class FakeChannel:
    """A channel that is lost when a test says so."""

    def __init__(self) -> None:
        self.is_paused = False
        self.faults: list[str] = []
        self.end: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def lost(self) -> str:
        """Wait for the end."""
        return await asyncio.shield(self.end)

    def give_up(self, fault: str) -> None:
        """Record the fault."""
        self.faults.append(fault)


class Link:
    """A connection that counts as lost after three heartbeats; ``on_beat`` is called with their number."""

    def __init__(self, on_beat: Callable[[int], object] = lambda _: None, *, checks_per_beat: int = 1) -> None:
        self.channel = FakeChannel()
        self.beats = 0
        self._on_beat = on_beat
        self.keepalive = Keepalive(
            cast("Channel[Any, Any]", self.channel),
            beat=self._beat,
            lost_after_s=lambda: 3 * BEAT_S,
            checks_per_beat=checks_per_beat,
        )

    def _beat(self) -> None:
        self.beats += 1
        self._on_beat(self.beats)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keepalive, "BEAT_S", BEAT_S)


@pytest.mark.parametrize("checks_per_beat", [1, 2])
async def test_silent_connection_is_dropped(checks_per_beat: int) -> None:
    """This end has sent its heartbeats until then."""
    link = Link(checks_per_beat=checks_per_beat)
    fault = await link.keepalive.run()
    assert fault == f"no heartbeat for {3 * BEAT_S:g} s"
    assert link.channel.faults == [fault]
    assert link.beats == 2


async def test_each_message_begins_the_count_again() -> None:
    """The last one came with the tenth heartbeat."""
    link = Link(lambda beats: link.keepalive.received() if beats <= 10 else None)
    await link.keepalive.run()
    assert link.beats == 12


async def test_connection_that_is_not_read_is_not_silent() -> None:
    """What is not read may be heartbeats."""

    def read_again(beats: int) -> None:
        link.channel.is_paused = beats < 10

    link = Link(read_again)
    link.channel.is_paused = True
    await link.keepalive.run()
    assert link.beats == 12


async def test_lost_connection_has_its_own_cause() -> None:
    """It is not dropped once more."""
    link = Link(lambda _: link.channel.end.set_result("reset"))
    assert await link.keepalive.run() == "reset"
    assert (link.beats, link.channel.faults) == (1, [])

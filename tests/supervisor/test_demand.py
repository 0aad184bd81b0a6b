"""When an engine is requested, and when it is admitted."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from inferencecenter.core.tasks import TaskGroup
from inferencecenter.supervisor.lifecycle import EngineDemand


@dataclass
class DemandHarness:
    """A demand, its queued turns, and the answer to its request for admission."""

    has_turns: bool = False
    answers: list[bool] = field(default_factory=list)
    n_requests: int = 0

    def __post_init__(self) -> None:
        self.demand = EngineDemand(has_turns=lambda: self.has_turns, admit=self._admit)
        self.waiting = TaskGroup("test").spawn(self.demand.wait_admitted(), name="granted")

    async def _admit(self) -> bool:
        self.n_requests += 1
        return self.answers.pop(0) if self.answers else True

    async def is_granted(self) -> bool:
        """Run the event loop, and return whether admission was granted."""
        for _ in range(3):
            await asyncio.sleep(0)
        return self.waiting.done()

    def turn(self) -> None:
        """Queue a turn."""
        self.has_turns = True
        self.demand.notify()


async def test_no_admission_without_demand() -> None:
    """A notification alone is no demand: the turn may have ended."""
    harness = DemandHarness()
    harness.demand.notify()
    assert not await harness.is_granted()
    assert (harness.n_requests, bool(harness.demand)) == (0, False)
    harness.demand.end()
    await harness.waiting


async def test_turns_and_calls_are_demand() -> None:
    """A call lasts until the engine is ready."""
    by_turn, by_call = DemandHarness(), DemandHarness()
    by_turn.turn()
    by_call.demand.request()
    assert await by_turn.is_granted()
    assert await by_call.is_granted()
    by_call.demand.fulfill()
    assert not by_call.demand
    assert by_turn.demand


async def test_paused_demand_waits() -> None:
    """It is admitted after the pause."""
    harness = DemandHarness()
    harness.demand.pause(paused=True)
    harness.turn()
    harness.demand.request()
    assert not await harness.is_granted()
    harness.demand.pause(paused=False)
    assert await harness.is_granted()
    assert harness.n_requests == 1


async def test_refused_demand_is_retried() -> None:
    """It is retried as long as it lasts."""
    harness = DemandHarness(answers=[False, False, True])
    harness.turn()
    assert await harness.is_granted()
    assert harness.n_requests == 3


async def test_close_releases_waiters() -> None:
    """They are released at once, and no demand is left."""
    harness = DemandHarness()
    harness.demand.end()
    harness.turn()
    assert await harness.is_granted()
    assert not harness.demand
    assert harness.n_requests == 0

"""Whether an engine is to be started, and when it may be."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from inferencecenter.core.tasks import TaskGroup
from inferencecenter.supervisor.demand import EngineDemand


@dataclass
class Bed:
    """A wish, the turns that it looks at, and what it is answered when it asks to be let in."""

    has_turns: bool = False
    answers: list[bool] = field(default_factory=list)
    asked: int = 0

    def __post_init__(self) -> None:
        self.wish = EngineDemand(has_turns=lambda: self.has_turns, admit=self._admit)
        self.waiting = TaskGroup("test").spawn(self.wish.wait_admitted(), name="granted")

    async def _admit(self) -> bool:
        self.asked += 1
        return self.answers.pop(0) if self.answers else True

    async def is_granted(self) -> bool:
        """Let it think, and tell whether it has come to an end."""
        for _ in range(3):
            await asyncio.sleep(0)
        return self.waiting.done()

    def turn(self) -> None:
        """Let a turn wait."""
        self.has_turns = True
        self.wish.notify()


async def test_no_admission_without_demand() -> None:
    """A look alone is no wish: the turn may be gone already."""
    bed = Bed()
    bed.wish.notify()
    assert not await bed.is_granted()
    assert (bed.asked, bool(bed.wish)) == (0, False)
    bed.wish.end()
    await bed.waiting


async def test_turns_and_calls_are_demand() -> None:
    """A call holds until the engine is there."""
    by_turn, by_call = Bed(), Bed()
    by_turn.turn()
    by_call.wish.request()
    assert await by_turn.is_granted()
    assert await by_call.is_granted()
    by_call.wish.fulfil()
    assert not by_call.wish
    assert by_turn.wish


async def test_paused_demand_waits() -> None:
    """Whatever comes meanwhile; it is granted afterwards."""
    bed = Bed()
    bed.wish.pause(paused=True)
    bed.turn()
    bed.wish.request()
    assert not await bed.is_granted()
    bed.wish.pause(paused=False)
    assert await bed.is_granted()
    assert bed.asked == 1


async def test_refused_demand_is_retried() -> None:
    """As long as it is wanted."""
    bed = Bed(answers=[False, False, True])
    bed.turn()
    assert await bed.is_granted()
    assert bed.asked == 3


async def test_close_releases_waiters() -> None:
    """Waiters are released at once, and find that nothing is wanted."""
    bed = Bed()
    bed.wish.end()
    bed.turn()
    assert await bed.is_granted()
    assert not bed.wish
    assert bed.asked == 0

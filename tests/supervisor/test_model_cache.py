"""Which models are resident: admission and eviction."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.core.tasks import TaskGroup
from inferencecenter.supervisor.model_cache import ModelCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.loop_clock import LoopClock


@dataclass(eq=False)
class FakeResident:
    """A model without an engine; it is evicted when the test says so, or at once."""

    name: str
    last_used_s: float = 0.0
    busy: bool = False
    wanted: bool = True
    holds_memory: bool = False
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    at_once: bool = True
    clients: frozenset[str] = frozenset()
    users: frozenset[str] = frozenset()
    loaded_at_s: float | None = None
    is_urgent: bool = False
    delays_s: list[float] = field(default_factory=list)
    asked: int = 0
    was_asked: asyncio.Event = field(default_factory=asyncio.Event)

    def delay(self, seconds: float) -> None:
        """Record the delay."""
        self.delays_s.append(seconds)

    async def evict(self) -> None:
        """Free the memory."""
        self.asked += 1
        self.was_asked.set()
        if not self.at_once:
            await self.gone.wait()
        self.holds_memory = False


@dataclass
class CacheHarness:
    """A cache for so many models; an admitted model counts as loaded."""

    room: int = 1
    max_resident: int = 0
    min_residency_s: float = 0.0
    now_s: float = 0.0
    changes: int = 0
    refusal: InferenceCenterError | None = None

    def __post_init__(self) -> None:
        self.residency: ModelCache[FakeResident] = ModelCache(
            max_resident=self.max_resident,
            min_residency_s=self.min_residency_s,
            fits=self.fits,
            changed=self.changed,
            monotonic=lambda: self.now_s,
        )

    def engine(self, name: str, *, loaded: bool = False, **fields: object) -> FakeResident:
        """Return an engine that the cache knows."""
        engine = FakeResident(name, holds_memory=loaded, **fields)  # type: ignore[arg-type]
        self.residency.add(engine)
        return engine

    async def fits(self, _engine: FakeResident, others: Sequence[FakeResident]) -> bool:
        """Whether there is room beside others."""
        if self.refusal is not None:
            raise self.refusal
        return len(others) < self.room

    def changed(self) -> None:
        """Count the change."""
        self.changes += 1

    async def enter(self, engine: FakeResident) -> bool:
        """Admit an engine, and load it."""
        admitted = await self.residency.admit(engine)
        if admitted:
            engine.holds_memory, engine.loaded_at_s, engine.users = True, self.now_s, engine.clients
        return admitted


async def test_model_that_fits_is_admitted() -> None:
    """No model is evicted."""
    harness = CacheHarness(room=2)
    first, second = harness.engine("first", loaded=True), harness.engine("second")
    assert await harness.enter(second)
    assert (first.asked, first.holds_memory) == (0, True)


async def test_least_recently_used_model_is_evicted() -> None:
    """It is the least recently used model that is loaded and idle."""
    harness = CacheHarness(room=2)
    old = harness.engine("old", loaded=True, last_used_s=1.0)
    harness.engine("busy", loaded=True, last_used_s=0.5, busy=True)
    unloaded = harness.engine("unloaded", last_used_s=0.0)
    assert await harness.enter(harness.engine("new"))
    assert not old.holds_memory
    assert (old.asked, unloaded.asked) == (1, 0)


async def test_busy_model_is_evicted_if_all_are_busy() -> None:
    """Where there is room for one model, both busy ones are evicted."""
    harness = CacheHarness()
    busy = [harness.engine(str(number), loaded=True, last_used_s=float(number), busy=True) for number in (2, 1)]
    assert await harness.enter(harness.engine("new"))
    assert [engine.asked for engine in busy] == [1, 1]


async def test_number_of_resident_models_is_limited() -> None:
    """Free memory does not raise the limit."""
    harness = CacheHarness(room=100, max_resident=2)
    first, second = (harness.engine(str(number), loaded=True, last_used_s=float(number)) for number in range(2))
    assert await harness.enter(harness.engine("third"))
    assert (first.holds_memory, second.holds_memory) == (False, True)


@pytest.mark.parametrize("max_resident", [0, 1])
async def test_model_that_fits_nowhere_evicts_none(max_resident: int) -> None:
    """The caller gets the reason, with others loaded and alone; the next model is admitted as usual."""
    harness = CacheHarness(
        max_resident=max_resident, refusal=InferenceCenterError(ErrorCode.INVALID_CONFIG, "too large")
    )
    other = harness.engine("other", loaded=True)
    for is_loaded in (False, True):
        other.holds_memory = is_loaded
        with pytest.raises(InferenceCenterError, match="too large"):
            await harness.enter(harness.engine("huge"))
    assert (other.asked, other.holds_memory) == (0, True)
    harness.refusal = None
    assert await harness.enter(harness.engine("new"))
    assert other.asked == 1


async def test_oversized_model_is_admitted_alone() -> None:
    """Its plan uses what there is."""
    harness = CacheHarness(room=0)
    other = harness.engine("other", loaded=True)
    assert await harness.enter(harness.engine("huge"))
    assert not other.holds_memory


async def test_withdrawn_demand_is_not_admitted() -> None:
    """No model is evicted for it, nor is it loaded if another was evicted meanwhile."""
    harness = CacheHarness()
    other = harness.engine("other", loaded=True, at_once=False)
    assert not await harness.enter(harness.engine("idle", wanted=False))
    assert other.asked == 0
    new, tasks, answers = harness.engine("new"), TaskGroup("test"), []

    async def ask() -> None:
        answers.append(await harness.enter(new))

    asking = tasks.spawn(ask(), name="ask")
    await other.was_asked.wait()
    assert harness.residency.waits(new)
    new.wanted = False
    other.gone.set()
    await asking
    assert answers == [False]
    assert not harness.residency.waits(new)
    assert harness.changes == 2


async def test_admission_is_first_in_first_out() -> None:
    """A later request does not overtake a waiting one."""
    harness = CacheHarness()
    other = harness.engine("other", loaded=True, at_once=False)
    admitted: list[str] = []

    async def enter(engine: FakeResident) -> None:
        if await harness.enter(engine):
            admitted.append(engine.name)

    tasks = TaskGroup("test")
    asking = [tasks.spawn(enter(harness.engine(name)), name=name) for name in ("first", "second")]
    await other.was_asked.wait()
    assert admitted == []
    other.gone.set()
    await asyncio.gather(*asking)
    assert admitted == ["first", "second"]


async def test_removed_model_is_not_evicted() -> None:
    """A model whose entry was removed no longer counts."""
    harness = CacheHarness()
    gone = harness.engine("gone", loaded=True)
    harness.residency.remove(gone)
    assert await harness.enter(harness.engine("new"))
    assert gone.asked == 0


async def run_loop() -> None:
    """Run the event loop until nothing is pending."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_model_of_another_client_has_a_minimum_residency(clock_with_timeouts: LoopClock) -> None:
    """A model that needs its place waits until then, and gets the remaining time."""
    harness, tasks = CacheHarness(min_residency_s=30.0), TaskGroup("test")
    loaded = harness.engine("loaded", loaded=True, loaded_at_s=0.0, users=frozenset({"ada", "eve"}))
    new = harness.engine("new", clients=frozenset({"eve"}))
    harness.now_s = 10.0
    entering = tasks.spawn(admitted(harness, new), name="enter")
    await run_loop()
    assert (loaded.asked, new.delays_s) == (0, [20.0])
    harness.now_s = 30.0
    await clock_with_timeouts.go_on(20.0)
    await asyncio.wait_for(entering, 60)
    assert (loaded.asked, new.holds_memory) == (1, True)


async def admitted(harness: CacheHarness, engine: FakeResident) -> None:
    """Admit an engine."""
    await harness.enter(engine)


@pytest.mark.parametrize(
    ("users", "clients", "urgent"),
    [({"ada"}, {"ada", "bob"}, False), (set(), {"eve"}, False), ({"ada"}, {"eve"}, True), ({"ada"}, set(), True)],
)
async def test_model_of_the_same_client_is_evicted_at_once(users: set[str], clients: set[str], *, urgent: bool) -> None:
    """So is every model if an operator loads another."""
    harness = CacheHarness(min_residency_s=30.0)
    loaded = harness.engine("loaded", loaded=True, loaded_at_s=0.0, users=frozenset(users))
    assert await harness.enter(harness.engine("new", clients=frozenset(clients), is_urgent=urgent))
    assert not loaded.holds_memory


async def test_model_past_its_minimum_residency_is_evicted_first() -> None:
    """It is evicted even if it is busy and was used more recently."""
    harness = CacheHarness(room=2, min_residency_s=30.0, now_s=40.0)
    ada = frozenset({"ada"})
    old = harness.engine("old", loaded=True, loaded_at_s=0.0, users=ada, busy=True, last_used_s=39.0)
    new = harness.engine("new", loaded=True, loaded_at_s=39.0, users=ada)
    assert await harness.enter(harness.engine("wanted", clients=frozenset({"eve"})))
    assert (old.holds_memory, new.holds_memory) == (False, True)


async def test_admission_is_fair_between_clients() -> None:
    """The client served longest ago is next, however many earlier requests another has."""
    harness, tasks, order = CacheHarness(), TaskGroup("test"), []
    gate = harness.engine("gate", loaded=True, at_once=False)

    async def enter(engine: FakeResident) -> None:
        await harness.enter(engine)
        order.append(engine.name)

    asking = [
        tasks.spawn(enter(harness.engine(name, clients=frozenset({client}))), name=name)
        for name, client in (("e1", "eve"), ("e2", "eve"), ("e3", "eve"), ("a1", "ada"), ("b1", "bob"))
    ]
    await gate.was_asked.wait()
    await run_loop()
    gate.gone.set()
    await asyncio.wait_for(asyncio.gather(*asking), 60)
    assert order == ["e1", "a1", "b1", "e2", "e3"]


async def test_withdrawn_demand_unblocks_the_next() -> None:
    """It waited for a minimum residency, which the request behind it does not need."""
    harness, tasks = CacheHarness(min_residency_s=30.0), TaskGroup("test")
    ada = frozenset({"ada"})
    harness.engine("loaded", loaded=True, loaded_at_s=0.0, users=ada)
    first, second = harness.engine("first", clients=frozenset({"eve"})), harness.engine("second", clients=ada)
    tasks.spawn(admitted(harness, first), name="first")
    await run_loop()
    entering = tasks.spawn(admitted(harness, second), name="second")
    await run_loop()
    assert not second.holds_memory
    first.wanted = False
    harness.residency.reevaluate()
    await asyncio.wait_for(entering, 60)
    assert (first.holds_memory, second.holds_memory) == (False, True)
    await tasks.cancel()

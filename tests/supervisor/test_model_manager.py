"""Several models: which are loaded, which is the default, and how turns follow changes."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from inferencecenter.config.sections import EngineSettings
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc import engine_child
from inferencecenter.ipc.engine_options import EngineOptions
from inferencecenter.ipc.messages import EngineLimits, Failed, pack_tokens
from inferencecenter.ipc.port import EngineState, EngineStatus
from inferencecenter.models.registry import ModelSpec, Registry
from inferencecenter.supervisor.model_manager import ManagedModel, ModelManager
from inferencecenter.supervisor.supervisor import Supervisor
from tests.supervisor import stub_engine
from tests.supervisor.harness import TIMEOUT_S, RecordingTurn, order
from tests.supervisor.stub_engine import answer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from inferencecenter.ipc.messages import ModelInfo
    from inferencecenter.protocol.events import Swap
    from inferencecenter.supervisor.planning import Planner


class FakePlanner:
    """A planner with room for a number of models; a huge one never fits."""

    def __init__(self, limit: int, fault: Callable[[], Exception | None]) -> None:
        self._limit = limit
        self._fault = fault

    def fits_beside(self, others: Sequence[Planner], options: EngineOptions) -> bool:
        """Whether there is room beside others."""
        if (fault := self._fault()) is not None:
            raise fault
        if options.model_name == "huge":
            raise InferenceCenterError(ErrorCode.INVALID_CONFIG, "Does not fit in memory.")
        if options.model_name == "odd":
            raise ValueError("cannot convert float NaN to integer")
        return len(others) < self._limit


@dataclass(eq=False)
class RecallableTurn(RecordingTurn):
    """A turn that is resubmitted to the default model when it is recalled."""

    models: ModelManager | None = None

    def resubmit(self) -> None:
        """Submit it to the current default."""
        super().resubmit()
        assert self.models is not None
        self.models.engine(self.models.default).submit(self)


@dataclass
class ManagerHarness:
    """Models whose engines answer with letters; two fit together unless the test says otherwise."""

    folder: Path
    room: int = 2
    patience_s: float = 30.0
    fault: Exception | None = None
    min_residency_s: float = 0.0
    names: tuple[str, ...] = ("first", "second")
    swaps: list[Swap] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    seen: list[tuple[str, EngineState]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.news = asyncio.Event()
        self.models = ModelManager(
            self.registry(), make=self.make, max_resident=0, min_residency_s=self.min_residency_s
        )
        self.models.subscribe_models(self._see)
        self.models.subscribe_swaps(self._swapped)

    def spec(self, name: str, **engine: object) -> ModelSpec:
        """Return an entry; its name says how loading ends."""
        settings = EngineSettings.model_validate({"swap_patience_s": self.patience_s} | engine)
        return ModelSpec(name=name, path=Path(name), engine=settings, params={"temp": len(name)}, lora=())

    def registry(self, default: str = "first", **changed: ModelSpec) -> Registry:
        """Return the entries."""
        specs = {name: self.spec(name) for name in self.names} | {spec.name: spec for spec in changed.values()}
        return Registry(default, specs)

    def make(self, spec: ModelSpec, admit: Callable[[Supervisor], Awaitable[bool]]) -> ManagedModel:
        """Build a model with the stub engine."""

        async def may_load() -> bool:
            return await admit(supervisor)

        supervisor = Supervisor(
            EngineOptions(
                backend="echo",
                model_name=spec.name,
                slots=2,
                max_queue=10,
                max_restarts=1,
                swap_patience_s=spec.engine.swap_patience_s,
                restart_backoff_min_s=0.01,
                restart_backoff_max_s=0.02,
            ),
            admit=may_load,
        )
        return ManagedModel(spec, cast("Planner", FakePlanner(self.room, lambda: self.fault)), supervisor)

    def _see(self, name: str, status: EngineStatus) -> None:
        self.seen.append((name, status.state))
        self.news.set()

    def _swapped(self, model: ModelInfo) -> None:
        self.changed.append(model.name)
        self.news.set()

    def tell(self, swap: Swap) -> None:
        """Record the progress of a swap."""
        self.swaps.append(swap)
        self.news.set()

    def watch(self, supervisor: Supervisor) -> Supervisor:
        """Observe an engine whose entry has changed."""
        supervisor.subscribe(lambda _: self.news.set())
        return supervisor

    def state(self, name: str) -> EngineState | None:
        """Return the state of a model's engine; ``None`` for a model that was never requested."""
        status = self.models.statuses.get(name)
        return status.state if status else None

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for a condition."""
        async with asyncio.timeout(TIMEOUT_S):
            while not holds():
                self.news.clear()
                await self.news.wait()

    async def ready(self, name: str) -> None:
        """Wait until a model is loaded."""
        await self.until(lambda: self.state(name) is EngineState.READY)

    async def swap(self, name: str) -> Swap:
        """Swap, and return the result."""
        self.models.swap(name, self.tell)
        await self.until(lambda: bool(self.swaps) and self.swaps[-1].phase in ("done", "failed"))
        return self.swaps[-1]

    def submit(
        self, turn_id: str, n: int, *, model: str | None = None, how: str = "count", client_id: str = "ada"
    ) -> RecallableTurn:
        """Submit a turn of ``n`` letters."""
        turn = RecallableTurn(order(turn_id, f"{how} {n}", client_id=client_id), models=self.models)
        self.models.engine(model or self.models.default).submit(turn)
        return turn


@pytest.fixture
async def make_manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., ManagerHarness]]:
    """Make managers whose default model is loading."""
    monkeypatch.setattr(engine_child, "MODULE", stub_engine.MODULE)
    made: list[ManagerHarness] = []

    def make(**fields: object) -> ManagerHarness:
        found = ManagerHarness(tmp_path, **fields)  # type: ignore[arg-type]
        found.models.start()
        made.append(found)
        return found

    yield make
    for each in made:
        await each.models.stop()


async def ended(turn: RecallableTurn) -> str:
    """Wait for a turn's end, and return its text."""
    await asyncio.wait_for(turn.ended.wait(), TIMEOUT_S)
    assert len(turn.terminal) == 1
    return turn.text


async def test_model_is_loaded_on_demand(make_manager: Callable[..., ManagerHarness]) -> None:
    """The default is loaded at the start; another one only when it is used, beside the first."""
    house = make_manager()
    await house.ready("first")
    assert [(each.name, each.default, each.state) for each in house.models.describe()] == [
        ("first", True, "loaded"),
        ("second", False, "unloaded"),
    ]
    assert house.models.params_of("second") == {"temp": 6}
    assert await ended(house.submit("t1", 3, model="second")) == answer(3)
    assert (house.state("first"), house.state("second")) == (EngineState.READY, EngineState.READY)
    assert [each.state for each in house.models.describe()] == ["loaded", "loaded"]
    assert house.models.default == "first"


async def test_unknown_model_is_not_found(make_manager: Callable[..., ManagerHarness]) -> None:
    """Every request gets the error, which lists the available ones."""
    house = make_manager()
    asked: list[Callable[[], object]] = [
        lambda: house.models.engine("third"),
        lambda: house.models.ensure_loaded("third"),
        lambda: house.models.unload("third"),
        lambda: house.models.swap("third", house.tell),
    ]
    for ask in asked:
        with pytest.raises(InferenceCenterError, match="third") as refusal:
            ask()
        assert refusal.value.code is ErrorCode.MODEL_NOT_FOUND
        assert refusal.value.hint == "There are first, second."


async def test_swap_does_not_interrupt_turns(make_manager: Callable[..., ManagerHarness]) -> None:
    """Running turns end on their model, later ones go to the new default."""
    house = make_manager()
    await house.ready("first")
    running = house.submit("t1", 5, how="hold")
    await asyncio.wait_for(running.spoke.wait(), TIMEOUT_S)
    assert (await house.swap("second")).phase == "done"
    assert {swap.phase for swap in house.swaps} == {"loading", "done"}
    assert house.changed == ["second"] == [house.models.default]
    assert house.models.status.model is not None
    house.submit("t2", 5)
    assert house.models.engine("first").busy
    house.models.engine("first").release("t1")
    assert await ended(running) == answer(5)
    assert (running.interruptions, running.recalls) == (0, 0)


async def test_swap_without_room_waits_for_running_turns(make_manager: Callable[..., ManagerHarness]) -> None:
    """New turns wait meanwhile, and are answered by the new model."""
    house = make_manager(room=1)
    await house.ready("first")
    running = house.submit("t1", 5, how="hold")
    await asyncio.wait_for(running.spoke.wait(), TIMEOUT_S)
    house.models.swap("second", house.tell)
    await house.until(lambda: any(swap.phase == "draining" for swap in house.swaps))
    waiting = house.submit("t2", 4)
    assert waiting.submissions == 0
    house.models.engine("first").release("t1")
    await house.until(lambda: house.swaps[-1].phase == "done")
    assert (await ended(running), running.interruptions) == (answer(5), 0)
    assert (await ended(waiting), waiting.recalls) == (answer(4), 1)
    assert house.state("first") is EngineState.ASLEEP


async def test_swap_patience_interrupts_a_long_turn(make_manager: Callable[..., ManagerHarness]) -> None:
    """A turn that takes too long is interrupted, and resumes on its model, for which the new one is evicted."""
    house = make_manager(room=1, patience_s=0.05)
    await house.ready("first")
    running = house.submit("t1", 5, how="hold")
    await asyncio.wait_for(running.spoke.wait(), TIMEOUT_S)
    assert (await house.swap("second")).phase == "done"
    await house.until(lambda: ("first", EngineState.ASLEEP) in house.seen)
    assert running.interruptions == 1
    assert running.recalls == 0
    await house.ready("first")
    assert house.models.default == "second"
    house.models.engine("first").abort("t1")
    await asyncio.wait_for(running.ended.wait(), TIMEOUT_S)
    assert answer(5).startswith(running.text)


@pytest.mark.slow
@pytest.mark.parametrize("room", [1, 2])
async def test_failed_swap_keeps_the_old_model(make_manager: Callable[..., ManagerHarness], room: int) -> None:
    """The caller gets the reason, the old model is loaded again if it was evicted, and the next attempt starts over."""
    house = make_manager(room=room, names=("first", "refuse -1", "second"))
    await house.ready("first")
    failed = await house.swap("refuse -1")
    assert (failed.phase, failed.model) == ("failed", "refuse -1")
    assert "allocate" in failed.detail
    assert (house.models.default, house.changed) == ("first", [])
    await house.ready("first")
    assert await ended(house.submit("t1", 3)) == answer(3)
    house.swaps.clear()
    assert (await house.swap("refuse -1")).phase == "failed"
    house.swaps.clear()
    assert (await house.swap("second")).phase == "done"


@pytest.mark.parametrize("room", [1, 2])
async def test_oversized_model_evicts_none(make_manager: Callable[..., ManagerHarness], room: int) -> None:
    """No model is evicted and none started for it; callers get the reason, and may retry."""
    house = make_manager(room=room, names=("first", "huge", "second"))
    await house.ready("first")
    running = house.submit("t1", 5, how="hold")
    await asyncio.wait_for(running.spoke.wait(), TIMEOUT_S)
    for _ in range(2):
        house.swaps.clear()
        failed = await house.swap("huge")
        assert (failed.phase, failed.detail) == ("failed", "Does not fit in memory.")
        assert {swap.phase for swap in house.swaps} <= {"loading", "failed"}
    house.models.ensure_loaded("huge")
    await house.until(lambda: house.state("huge") is EngineState.FAILED)
    with pytest.raises(InferenceCenterError, match="Does not fit"):
        house.models.ensure_loaded("huge")
    assert (house.models.default, house.state("first")) == ("first", EngineState.READY)
    house.models.engine("first").release("t1")
    assert await ended(running) == answer(5)
    assert running.interruptions == 0
    house.swaps.clear()
    assert (await house.swap("second")).phase == "done"


async def test_swap_ends_after_a_planning_error(make_manager: Callable[..., ManagerHarness]) -> None:
    """The caller gets the reason, the next swap can run, and the old default answers, also after sleeping."""
    house = make_manager(names=("first", "odd", "second"))
    await house.ready("first")
    failed = await house.swap("odd")
    assert (failed.phase, failed.model) == ("failed", "odd")
    assert "ValueError: cannot convert float NaN to integer" in failed.detail
    assert (house.models.default, house.changed) == ("first", [])
    house.models.unload("first")
    await house.until(lambda: house.state("first") is EngineState.ASLEEP)
    assert await ended(house.submit("t1", 3)) == answer(3)
    house.swaps.clear()
    assert (await house.swap("second")).phase == "done"


async def test_swap_ends_if_its_model_cannot_be_created(
    make_manager: Callable[..., ManagerHarness], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller gets the reason, such as a missing GPU in its first plan, and the old default continues."""
    house = make_manager()
    await house.ready("first")

    def fail(*_: object) -> ManagedModel:
        raise InferenceCenterError(ErrorCode.INVALID_CONFIG, "There is no GPU 1.")

    monkeypatch.setattr(house.models, "_make", fail)
    assert (await house.swap("second")).detail == "There is no GPU 1."
    assert await ended(house.submit("t1", 3)) == answer(3)


@pytest.mark.slow
async def test_request_for_an_unloadable_model_gets_the_reason(make_manager: Callable[..., ManagerHarness]) -> None:
    """The next request tries again."""
    house = make_manager(names=("first", "refuse -1"))
    await house.ready("first")
    house.models.ensure_loaded("refuse -1")
    await house.until(lambda: house.state("refuse -1") is EngineState.FAILED)
    with pytest.raises(InferenceCenterError, match="allocate"):
        house.models.ensure_loaded("refuse -1")
    assert house.state("refuse -1") is None
    house.models.ensure_loaded("refuse -1")
    await house.until(lambda: house.state("refuse -1") is EngineState.FAILED)


async def give_up(house: ManagerHarness, name: str) -> None:
    """Kill a model's engines until it is given up."""
    for _ in range(2):
        await house.ready(name)
        pid = house.models.engine(name).status.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await house.until(lambda: house.state(name) is not EngineState.READY)
    await house.until(lambda: house.state(name) is EngineState.FAILED)


@pytest.mark.parametrize("how", ["reload", "reload of another entry", "swap"])
async def test_given_up_engine_is_revived(make_manager: Callable[..., ManagerHarness], how: str) -> None:
    """A reload or a load request revives it: it loads at once, and turns run again."""
    house = make_manager()
    await give_up(house, "first")
    with pytest.raises(InferenceCenterError) as refusal:
        house.submit("t1", 3)
    assert (refusal.value.code, refusal.value.retry_after_ms) == (ErrorCode.ENGINE_UNAVAILABLE, None)
    with pytest.raises(InferenceCenterError, match="failed"):
        house.models.ensure_loaded("first")
    if how == "swap":
        assert (await house.swap("first")).phase == "done"
    elif how == "reload":
        house.models.apply(house.registry())
    else:
        house.models.apply(house.registry(first=house.spec("first", kv_type_k="q8_0")))
    await house.ready("first")
    assert await ended(house.submit("t2", 3)) == answer(3)
    assert not house.models.engine("first").given_up


async def test_started_turns_wait_for_their_model(make_manager: Callable[..., ManagerHarness]) -> None:
    """A model that could not be loaded keeps them until it is requested again; turns without output fail."""
    house = make_manager(names=("first", "huge"), room=2)
    await house.ready("first")
    begun = RecallableTurn(order("t1", "count 3", answer=pack_tokens([0])), models=house.models)
    silent = RecallableTurn(order("t2", "count 3"), models=house.models)
    for turn in (begun, silent):
        house.models.engine("huge").submit(turn)
    await house.until(lambda: house.state("huge") is EngineState.FAILED)
    await asyncio.wait_for(silent.ended.wait(), TIMEOUT_S)
    assert ([type(end) for end in silent.terminal], begun.terminal) == ([Failed], [])
    with pytest.raises(InferenceCenterError, match="Does not fit"):
        house.models.ensure_loaded("huge")
    await asyncio.wait_for(begun.ended.wait(), TIMEOUT_S)
    assert begun.recalls == 1


async def test_model_recovers_when_its_device_returns(make_manager: Callable[..., ManagerHarness]) -> None:
    """The waking turn gets the reason, loading fails with it, and the model is ready again when the device is."""
    house = make_manager(names=("first", "second"))
    await house.ready("first")
    await ended(house.submit("t1", 1, model="second"))
    house.models.unload("second")
    await house.until(lambda: house.state("second") is EngineState.ASLEEP)
    house.fault = InferenceCenterError(ErrorCode.INVALID_CONFIG, "There is no GPU 7.")
    turn = house.submit("t2", 1, model="second")
    await house.until(lambda: house.state("second") is EngineState.FAILED)
    await asyncio.wait_for(turn.ended.wait(), TIMEOUT_S)
    (end,) = turn.terminal
    assert isinstance(end, Failed)
    assert "There is no GPU 7." in end.message
    assert house.models.describe()[1].state == "failed"
    house.fault = None
    await house.ready("second")
    assert await ended(house.submit("t3", 1, model="second")) == answer(1)


async def test_swap_ends_after_an_internal_error(
    make_manager: Callable[..., ManagerHarness], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its caller gets the error, the lock on changes is released, and the next swap succeeds."""
    house = make_manager()
    await house.ready("first")

    async def fail(*_: object) -> str | None:
        raise ValueError("a defect")

    with monkeypatch.context() as patched:
        patched.setattr(house.models, "_load", fail)
        failed = await house.swap("second")
    assert (failed.phase, "a defect" in failed.detail) == ("failed", True)
    house.swaps.clear()
    assert (await house.swap("second")).phase == "done"


async def test_concurrent_swap_is_refused(make_manager: Callable[..., ManagerHarness]) -> None:
    """A swap to the default itself succeeds at once."""
    house = make_manager()
    await house.ready("first")
    house.models.swap("second", house.tell)
    await asyncio.sleep(0)
    with pytest.raises(InferenceCenterError) as refusal:
        house.models.swap("first", house.tell)
    assert (refusal.value.code, refusal.value.retry_after_ms) == (ErrorCode.MODEL_LOADING, 1000)
    await house.until(lambda: house.swaps[-1].phase == "done")
    house.swaps.clear()
    assert (await house.swap("second")).phase == "done"
    assert house.changed == ["second", "second"]


async def test_least_recently_used_model_is_evicted(make_manager: Callable[..., ManagerHarness]) -> None:
    """A third model replaces it; it is loaded again on demand."""
    house = make_manager(names=("first", "second", "third"))
    await house.ready("first")
    await ended(house.submit("t1", 1, model="second"))
    await ended(house.submit("t2", 1, model="first"))
    await ended(house.submit("t3", 1, model="third"))
    assert [house.state(name) for name in house.names] == [
        EngineState.READY,
        EngineState.ASLEEP,
        EngineState.READY,
    ]
    assert await ended(house.submit("t4", 2, model="second")) == answer(2)
    assert house.state("first") is EngineState.ASLEEP


async def test_one_client_does_not_evict_the_model_of_another(make_manager: Callable[..., ManagerHarness]) -> None:
    """Its turn waits while the other client's model is new; an operator's load does not wait, and stays too."""
    house = make_manager(room=1, min_residency_s=3600.0, names=("first", "second", "third"))
    await house.ready("first")
    await ended(house.submit("t1", 1, client_id="ada"))
    waiting = house.submit("t2", 2, model="second", client_id="eve")
    await asyncio.wait_for(waiting.was_delayed.wait(), TIMEOUT_S)
    assert 0 < waiting.delays_s[0] <= 3600
    assert await ended(house.submit("t3", 1, client_id="ada")) == answer(1)
    assert (house.state("first"), waiting.events) == (EngineState.READY, [])
    assert (await house.swap("third")).phase == "done"
    assert (house.state("third"), waiting.events) == (EngineState.READY, [])
    house.models.unload("third")
    assert await ended(waiting) == answer(2)


async def test_swap_ends_if_its_model_is_evicted_at_once(make_manager: Callable[..., ManagerHarness]) -> None:
    """It was ready for a moment: the turn of another model that waited for its place runs."""
    house = make_manager(room=1, names=("first", "second", "third"))
    await house.ready("first")
    for number in range(3):
        waiting = house.submit(f"t{number}", 2, model="second", client_id="eve")
        house.swaps.clear()
        assert (await house.swap("third")).phase == "done"
        assert await ended(waiting) == answer(2)
        house.swaps.clear()
        assert (await house.swap("first")).phase == "done"


async def test_only_user_of_a_model_can_evict_it_at_once(make_manager: Callable[..., ManagerHarness]) -> None:
    """Alternating between models then costs other clients nothing."""
    house = make_manager(room=1, min_residency_s=3600.0)
    await house.ready("first")
    for number, name in enumerate(("first", "second", "first")):
        assert await ended(house.submit(f"t{number}", 2, model=name, client_id="eve")) == answer(2)
    house.models.ensure_loaded("second", "eve")
    await house.ready("second")


async def test_unloaded_model_is_loaded_on_demand(make_manager: Callable[..., ManagerHarness]) -> None:
    """Unloading waits for its running turn; a model that was never requested has nothing to unload."""
    house = make_manager()
    await house.ready("first")
    running = house.submit("t1", 5, how="hold")
    await asyncio.wait_for(running.spoke.wait(), TIMEOUT_S)
    house.models.unload("first")
    house.models.unload("second")
    house.models.engine("first").release("t1")
    await house.until(lambda: house.state("first") is EngineState.ASLEEP)
    assert (running.text, running.interruptions) == (answer(5), 0)
    assert await ended(house.submit("t2", 2)) == answer(2)


async def test_limits_reach_every_ready_engine(make_manager: Callable[..., ManagerHarness]) -> None:
    """They depend on its number of slots."""
    house = make_manager()
    await house.ready("first")
    asked: list[int] = []

    def limit(slots: int) -> EngineLimits:
        asked.append(slots)
        return EngineLimits(active_slots=slots, prefill_share=1.0, lowest_class=2, pause_ms=0)

    house.models.engine("second")
    house.models.limit(limit)
    assert asked == [stub_engine.MODEL.slots]


# Other entries.


async def test_changed_entry_is_reloaded(make_manager: Callable[..., ManagerHarness]) -> None:
    """Running turns end with the old engine; if both would use the same KV directory, it ends first."""
    house = make_manager()
    await house.ready("first")
    old = house.watch(house.models.engine("first"))
    running = house.submit("t1", 5, how="hold")
    await asyncio.wait_for(running.spoke.wait(), TIMEOUT_S)
    house.models.apply(house.registry(first=house.spec("first", kv_type_k="q8_0")))
    await house.until(lambda: house.models.engine("first") is not old and house.state("first") is EngineState.READY)
    assert not running.ended.is_set()
    old.release("t1")
    assert await ended(running) == answer(5)
    assert (running.interruptions, running.recalls) == (0, 0)
    await house.until(lambda: old.status.state is EngineState.STOPPED)


async def test_changed_parameters_keep_the_engine(make_manager: Callable[..., ManagerHarness]) -> None:
    """They apply from the next turn on."""
    house = make_manager()
    await house.ready("first")
    old = house.models.engine("first")
    house.models.apply(house.registry(first=replace(house.spec("first"), params={"temp": 0.5})))
    await asyncio.sleep(0)
    async with house.models._changing:
        assert house.models.params_of("first") == {"temp": 0.5}
    assert house.models.engine("first") is old
    assert old.status.state is EngineState.READY


async def test_queued_turns_move_to_the_changed_entry(make_manager: Callable[..., ManagerHarness]) -> None:
    """If the KV directory is the same, started and waiting turns go to the new engine."""
    house = make_manager(patience_s=0.05)
    await house.ready("first")
    old = house.watch(house.models.engine("first"))
    running = house.submit("t1", 5, how="hold")
    await asyncio.wait_for(running.spoke.wait(), TIMEOUT_S)
    house.models.apply(house.registry(first=house.spec("first", max_queue=5)))
    await house.until(lambda: house.models.engine("first") is not old)
    assert (running.interruptions, running.recalls) == (1, 1)
    house.models.engine("first").abort("t1")
    await asyncio.wait_for(running.ended.wait(), TIMEOUT_S)
    assert answer(5).startswith(running.text)


async def test_changed_entry_that_cannot_be_loaded_keeps_the_old_model(
    make_manager: Callable[..., ManagerHarness],
) -> None:
    """The old engine continues."""
    house = make_manager(names=("first", "second"))
    await house.ready("first")
    old = house.watch(house.models.engine("first"))
    broken = replace(house.spec("first", kv_type_k="q8_0"), path=Path("broken"))
    make = house.make

    def make_broken(spec: ModelSpec, admit: Callable[[Supervisor], Awaitable[bool]]) -> ManagedModel:
        made = make(replace(spec, name="refuse -1"), admit)
        made.supervisor.subscribe(partial(house._see, "refuse -1"))
        return made

    house.models._make = make_broken
    house.models.apply(house.registry(first=broken))
    await house.until(lambda: len(house.models.supervisors) == 2)
    await house.until(lambda: ("refuse -1", EngineState.STOPPED) in house.seen)
    assert house.models.engine("first") is old
    assert await ended(house.submit("t1", 3)) == answer(3)


async def test_entries_can_be_added_and_removed(make_manager: Callable[..., ManagerHarness]) -> None:
    """A new default is loaded before it is used; a removed one ends after its turns, and is not found any more."""
    house = make_manager()
    await house.ready("first")
    old = house.watch(house.models.engine("first"))
    running = house.submit("t1", 5, how="hold")
    await asyncio.wait_for(running.spoke.wait(), TIMEOUT_S)
    house.names = ("third",)
    house.models.apply(house.registry("third"))
    await house.until(lambda: house.changed == ["third"])
    await house.until(lambda: house.models.names == ("third",))
    with pytest.raises(InferenceCenterError):
        house.models.engine("first")
    assert not running.ended.is_set()
    old.release("t1")
    assert await ended(running) == answer(5)
    await house.until(lambda: old.status.state is EngineState.STOPPED)
    assert await ended(house.submit("t2", 2)) == answer(2)


async def test_stop_ends_a_loading_engine(make_manager: Callable[..., ManagerHarness]) -> None:
    """The others end, too."""
    house = make_manager(names=("first", "wait"))
    await house.ready("first")
    house.models.swap("wait", house.tell)
    house.models.apply(house.registry(first=house.spec("first", kv_type_k="q8_0")))
    await house.until(lambda: house.state("wait") is EngineState.STARTING)
    supervisors = house.models.supervisors
    await house.models.stop()
    assert [each.status.state for each in supervisors] == [EngineState.STOPPED, EngineState.STOPPED]


async def test_rescan_finds_new_models(make_manager: Callable[..., ManagerHarness]) -> None:
    """Existing ones are unchanged, also if the directory cannot be read."""
    house = make_manager()
    fresh = house.registry(first=house.spec("first", max_queue=5), third=house.spec("third"))
    house.models.apply(replace(house.registry(), reread=lambda: fresh))
    await house.ready("first")
    await house.until(lambda: not house.models._changing.locked())
    engine = house.models.engine("first")
    with pytest.raises(InferenceCenterError):
        house.models.engine("third")
    house.models.rescan()
    assert house.models.names == ("first", "second", "third")
    assert house.models.engine("first") is engine
    assert await ended(house.submit("t1", 2, model="third")) == answer(2)
    house.models._registry = replace(house.models._registry, reread=unreadable)
    house.models.rescan()
    assert house.models.names == ("first", "second", "third")


async def test_removed_models_are_forgotten(make_manager: Callable[..., ManagerHarness]) -> None:
    """Others are unchanged."""
    house = make_manager()
    await house.ready("first")
    engine = house.models.engine("first")
    left = replace(house.registry(), models={"first": house.spec("first")})
    house.models._registry = replace(house.models._registry, reread=lambda: left)
    house.models.forget_removed()
    await asyncio.sleep(0)
    async with house.models._changing:
        assert house.models.names == ("first",)
    assert house.models.engine("first") is engine


def unreadable() -> Registry:
    """Raise for settings that exclude each other."""
    raise InferenceCenterError(ErrorCode.INVALID_CONFIG, "no")

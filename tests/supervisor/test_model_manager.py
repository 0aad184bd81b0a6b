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
from inferencecenter.models.registry import LOCAL_NODE, ModelSpec, Registry
from inferencecenter.supervisor.model_manager import ManagedModel, ModelManager
from inferencecenter.supervisor.nodes import JoinedNode, NodeTable
from inferencecenter.supervisor.replica_set import Replica, ReplicaSet
from inferencecenter.supervisor.rpc_nodes import RpcNodes, RpcServerStatus
from inferencecenter.supervisor.supervisor import Supervisor
from tests.supervisor import stub_engine
from tests.supervisor.harness import TIMEOUT_S, RecordingTurn, order
from tests.supervisor.stub_engine import answer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence

    from inferencecenter.ipc.messages import ModelInfo
    from inferencecenter.protocol.events import Swap
    from inferencecenter.supervisor.model_manager import ModelEngine
    from inferencecenter.supervisor.planning import Planner


BROKEN = Path("refuse -1")
"""The file of a replica that cannot be loaded."""


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


class FakeRpcServers:
    """The RPC server on the node ``box``, which each engine uses that starts while the node has joined."""

    def __init__(self, supervisor: Supervisor, nodes: NodeTable) -> None:
        self._nodes = nodes
        self._status = RpcServerStatus(node="box", model=supervisor.name)
        supervisor.subscribe(self._engine_changed)

    def _engine_changed(self, status: EngineStatus) -> None:
        if status.state is EngineState.STARTING:
            usable = "box" in self._nodes.joined and not self._nodes.is_drained("box")
            self._status = replace(self._status, state="ready" if usable else "missing")
        elif status.state is EngineState.ASLEEP:
            self._status = replace(self._status, state="stopped")

    @property
    def servers(self) -> tuple[RpcServerStatus, ...]:
        """The one server."""
        return (self._status,)

    async def can_start(self, nodes: Collection[str]) -> bool:
        """Return whether its node has joined."""
        return self._nodes.joined.issuperset(nodes)


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
    nodes: NodeTable | None = None
    swaps: list[Swap] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    seen: list[tuple[str, EngineState]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.news = asyncio.Event()
        self.models = ModelManager(
            self.registry(),
            make=self.make,
            max_resident=0,
            min_residency_s=self.min_residency_s,
            nodes=self.nodes,
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

    def make(self, spec: ModelSpec, admit: Callable[[ModelEngine], Awaitable[bool]]) -> ManagedModel:
        """Build a model with stub engines."""
        planner = cast("Planner", FakePlanner(self.room, lambda: self.fault))

        def make_engine(
            spec: ModelSpec, admit: Callable[[Supervisor], Awaitable[bool]], node: str = LOCAL_NODE
        ) -> Supervisor:
            supervisor = Supervisor(
                EngineOptions(
                    backend="echo",
                    model_name=spec.name if spec.path != BROKEN else f"{spec.path}",
                    slots=2,
                    max_queue=10,
                    max_restarts=1,
                    swap_patience_s=spec.engine.swap_patience_s,
                    restart_backoff_min_s=0.01,
                    restart_backoff_max_s=0.02,
                ),
                admit=lambda: admit(supervisor),
                node=node,
            )
            return supervisor

        if spec.rpc_nodes:
            assert self.nodes is not None
            engine = make_engine(spec, admit)
            return ManagedModel(spec, planner, engine, RpcNodes(engine, FakeRpcServers(engine, self.nodes)))

        if spec.replicas == 1:
            return ManagedModel(spec, planner, make_engine(spec, admit))

        async def admit_replica(supervisor: Supervisor) -> bool:
            return await admit(replicas) and supervisor.wanted

        def make_replica(spec: ModelSpec, _index: int, node: str) -> Replica:
            return Replica(make_engine(spec, admit_replica, node), planner, spec)

        is_drained = (lambda _: False) if self.nodes is None else self.nodes.is_drained
        replicas = ReplicaSet(spec, make=make_replica, is_drained=is_drained)
        return ManagedModel(spec, planner, replicas)

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

    def watch(self, supervisor: ModelEngine) -> ModelEngine:
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
    harness = make_manager()
    await harness.ready("first")
    assert [(each.name, each.default, each.state) for each in harness.models.describe()] == [
        ("first", True, "loaded"),
        ("second", False, "unloaded"),
    ]
    assert harness.models.params_of("second") == {"temp": 6}
    assert await ended(harness.submit("t1", 3, model="second")) == answer(3)
    assert (harness.state("first"), harness.state("second")) == (EngineState.READY, EngineState.READY)
    assert [each.state for each in harness.models.describe()] == ["loaded", "loaded"]
    assert harness.models.default == "first"


async def test_unknown_model_is_not_found(make_manager: Callable[..., ManagerHarness]) -> None:
    """Every request gets the error, which lists the available ones."""
    harness = make_manager()
    asked: list[Callable[[], object]] = [
        lambda: harness.models.engine("third"),
        lambda: harness.models.ensure_loaded("third"),
        lambda: harness.models.unload("third"),
        lambda: harness.models.swap("third", harness.tell),
    ]
    for ask in asked:
        with pytest.raises(InferenceCenterError, match="third") as refusal:
            ask()
        assert refusal.value.code is ErrorCode.MODEL_NOT_FOUND
        assert refusal.value.hint == "There are first, second."


async def test_swap_does_not_interrupt_turns(make_manager: Callable[..., ManagerHarness]) -> None:
    """Running turns end on their model, later ones go to the new default."""
    harness = make_manager()
    await harness.ready("first")
    running = harness.submit("t1", 5, how="hold")
    await asyncio.wait_for(running.spoke.wait(), TIMEOUT_S)
    assert (await harness.swap("second")).phase == "done"
    assert {swap.phase for swap in harness.swaps} == {"loading", "done"}
    assert harness.changed == ["second"] == [harness.models.default]
    assert harness.models.status.model is not None
    harness.submit("t2", 5)
    assert harness.models.engine("first").busy
    harness.models.engine("first").release("t1")
    assert await ended(running) == answer(5)
    assert (running.interruptions, running.recalls) == (0, 0)


async def test_swap_without_room_waits_for_running_turns(make_manager: Callable[..., ManagerHarness]) -> None:
    """New turns wait meanwhile, and are answered by the new model."""
    harness = make_manager(room=1)
    await harness.ready("first")
    running = harness.submit("t1", 5, how="hold")
    await asyncio.wait_for(running.spoke.wait(), TIMEOUT_S)
    harness.models.swap("second", harness.tell)
    await harness.until(lambda: any(swap.phase == "draining" for swap in harness.swaps))
    waiting = harness.submit("t2", 4)
    assert waiting.submissions == 0
    harness.models.engine("first").release("t1")
    await harness.until(lambda: harness.swaps[-1].phase == "done")
    assert (await ended(running), running.interruptions) == (answer(5), 0)
    assert (await ended(waiting), waiting.recalls) == (answer(4), 1)
    assert harness.state("first") is EngineState.ASLEEP


async def test_swap_patience_interrupts_a_long_turn(make_manager: Callable[..., ManagerHarness]) -> None:
    """A turn that takes too long is interrupted, and resumes on its model, for which the new one is evicted."""
    harness = make_manager(room=1, patience_s=0.05)
    await harness.ready("first")
    running = harness.submit("t1", 5, how="hold")
    await asyncio.wait_for(running.spoke.wait(), TIMEOUT_S)
    assert (await harness.swap("second")).phase == "done"
    await harness.until(lambda: ("first", EngineState.ASLEEP) in harness.seen)
    assert running.interruptions == 1
    assert running.recalls == 0
    await harness.ready("first")
    assert harness.models.default == "second"
    harness.models.engine("first").abort("t1")
    await asyncio.wait_for(running.ended.wait(), TIMEOUT_S)
    assert answer(5).startswith(running.text)


@pytest.mark.slow
@pytest.mark.parametrize("room", [1, 2])
async def test_failed_swap_keeps_the_old_model(make_manager: Callable[..., ManagerHarness], room: int) -> None:
    """The caller gets the reason, the old model is loaded again if it was evicted, and the next attempt starts over."""
    harness = make_manager(room=room, names=("first", "refuse -1", "second"))
    await harness.ready("first")
    failed = await harness.swap("refuse -1")
    assert (failed.phase, failed.model) == ("failed", "refuse -1")
    assert "allocate" in failed.detail
    assert (harness.models.default, harness.changed) == ("first", [])
    await harness.ready("first")
    assert await ended(harness.submit("t1", 3)) == answer(3)
    harness.swaps.clear()
    assert (await harness.swap("refuse -1")).phase == "failed"
    harness.swaps.clear()
    assert (await harness.swap("second")).phase == "done"


@pytest.mark.parametrize("room", [1, 2])
async def test_oversized_model_evicts_none(make_manager: Callable[..., ManagerHarness], room: int) -> None:
    """No model is evicted and none started for it; callers get the reason, and may retry."""
    harness = make_manager(room=room, names=("first", "huge", "second"))
    await harness.ready("first")
    running = harness.submit("t1", 5, how="hold")
    await asyncio.wait_for(running.spoke.wait(), TIMEOUT_S)
    for _ in range(2):
        harness.swaps.clear()
        failed = await harness.swap("huge")
        assert (failed.phase, failed.detail) == ("failed", "Does not fit in memory.")
        assert {swap.phase for swap in harness.swaps} <= {"loading", "failed"}
    harness.models.ensure_loaded("huge")
    await harness.until(lambda: harness.state("huge") is EngineState.FAILED)
    with pytest.raises(InferenceCenterError, match="Does not fit"):
        harness.models.ensure_loaded("huge")
    assert (harness.models.default, harness.state("first")) == ("first", EngineState.READY)
    harness.models.engine("first").release("t1")
    assert await ended(running) == answer(5)
    assert running.interruptions == 0
    harness.swaps.clear()
    assert (await harness.swap("second")).phase == "done"


async def test_swap_ends_after_a_planning_error(make_manager: Callable[..., ManagerHarness]) -> None:
    """The caller gets the reason, the next swap can run, and the old default answers, also after sleeping."""
    harness = make_manager(names=("first", "odd", "second"))
    await harness.ready("first")
    failed = await harness.swap("odd")
    assert (failed.phase, failed.model) == ("failed", "odd")
    assert "ValueError: cannot convert float NaN to integer" in failed.detail
    assert (harness.models.default, harness.changed) == ("first", [])
    harness.models.unload("first")
    await harness.until(lambda: harness.state("first") is EngineState.ASLEEP)
    assert await ended(harness.submit("t1", 3)) == answer(3)
    harness.swaps.clear()
    assert (await harness.swap("second")).phase == "done"


async def test_swap_ends_if_its_model_cannot_be_created(
    make_manager: Callable[..., ManagerHarness], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller gets the reason, such as a missing GPU in its first plan, and the old default continues."""
    harness = make_manager()
    await harness.ready("first")

    def fail(*_: object) -> ManagedModel:
        raise InferenceCenterError(ErrorCode.INVALID_CONFIG, "There is no GPU 1.")

    monkeypatch.setattr(harness.models, "_make", fail)
    assert (await harness.swap("second")).detail == "There is no GPU 1."
    assert await ended(harness.submit("t1", 3)) == answer(3)


@pytest.mark.slow
async def test_request_for_an_unloadable_model_gets_the_reason(make_manager: Callable[..., ManagerHarness]) -> None:
    """The next request tries again."""
    harness = make_manager(names=("first", "refuse -1"))
    await harness.ready("first")
    harness.models.ensure_loaded("refuse -1")
    await harness.until(lambda: harness.state("refuse -1") is EngineState.FAILED)
    with pytest.raises(InferenceCenterError, match="allocate"):
        harness.models.ensure_loaded("refuse -1")
    assert harness.state("refuse -1") is None
    harness.models.ensure_loaded("refuse -1")
    await harness.until(lambda: harness.state("refuse -1") is EngineState.FAILED)


async def give_up(harness: ManagerHarness, name: str) -> None:
    """Kill a model's engines until it is given up."""
    for _ in range(2):
        await harness.ready(name)
        pid = harness.models.engine(name).status.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await harness.until(lambda: harness.state(name) is not EngineState.READY)
    await harness.until(lambda: harness.state(name) is EngineState.FAILED)


@pytest.mark.parametrize("how", ["reload", "reload of another entry", "swap"])
async def test_given_up_engine_is_revived(make_manager: Callable[..., ManagerHarness], how: str) -> None:
    """A reload or a load request revives it: it loads at once, and turns run again."""
    harness = make_manager()
    await give_up(harness, "first")
    with pytest.raises(InferenceCenterError) as refusal:
        harness.submit("t1", 3)
    assert (refusal.value.code, refusal.value.retry_after_ms) == (ErrorCode.ENGINE_UNAVAILABLE, None)
    with pytest.raises(InferenceCenterError, match="failed"):
        harness.models.ensure_loaded("first")
    if how == "swap":
        assert (await harness.swap("first")).phase == "done"
    elif how == "reload":
        harness.models.apply(harness.registry())
    else:
        harness.models.apply(harness.registry(first=harness.spec("first", kv_type_k="q8_0")))
    await harness.ready("first")
    assert await ended(harness.submit("t2", 3)) == answer(3)
    assert not harness.models.engine("first").given_up


async def test_started_turns_wait_for_their_model(make_manager: Callable[..., ManagerHarness]) -> None:
    """A model that could not be loaded keeps them until it is requested again; turns without output fail."""
    harness = make_manager(names=("first", "huge"), room=2)
    await harness.ready("first")
    begun = RecallableTurn(order("t1", "count 3", answer=pack_tokens([0])), models=harness.models)
    silent = RecallableTurn(order("t2", "count 3"), models=harness.models)
    for turn in (begun, silent):
        harness.models.engine("huge").submit(turn)
    await harness.until(lambda: harness.state("huge") is EngineState.FAILED)
    await asyncio.wait_for(silent.ended.wait(), TIMEOUT_S)
    assert ([type(end) for end in silent.terminal], begun.terminal) == ([Failed], [])
    with pytest.raises(InferenceCenterError, match="Does not fit"):
        harness.models.ensure_loaded("huge")
    await asyncio.wait_for(begun.ended.wait(), TIMEOUT_S)
    assert begun.recalls == 1


async def test_model_recovers_when_its_device_returns(make_manager: Callable[..., ManagerHarness]) -> None:
    """The waking turn gets the reason, loading fails with it, and the model is ready again when the device is."""
    harness = make_manager(names=("first", "second"))
    await harness.ready("first")
    await ended(harness.submit("t1", 1, model="second"))
    harness.models.unload("second")
    await harness.until(lambda: harness.state("second") is EngineState.ASLEEP)
    harness.fault = InferenceCenterError(ErrorCode.INVALID_CONFIG, "There is no GPU 7.")
    turn = harness.submit("t2", 1, model="second")
    await harness.until(lambda: harness.state("second") is EngineState.FAILED)
    await asyncio.wait_for(turn.ended.wait(), TIMEOUT_S)
    (end,) = turn.terminal
    assert isinstance(end, Failed)
    assert "There is no GPU 7." in end.message
    assert harness.models.describe()[1].state == "failed"
    harness.fault = None
    await harness.ready("second")
    assert await ended(harness.submit("t3", 1, model="second")) == answer(1)


async def test_swap_ends_after_an_internal_error(
    make_manager: Callable[..., ManagerHarness], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its caller gets the error, the lock on changes is released, and the next swap succeeds."""
    harness = make_manager()
    await harness.ready("first")

    async def fail(*_: object) -> str | None:
        raise ValueError("a defect")

    with monkeypatch.context() as patched:
        patched.setattr(harness.models, "_load", fail)
        failed = await harness.swap("second")
    assert (failed.phase, "a defect" in failed.detail) == ("failed", True)
    harness.swaps.clear()
    assert (await harness.swap("second")).phase == "done"


async def test_concurrent_swap_is_refused(make_manager: Callable[..., ManagerHarness]) -> None:
    """A swap to the default itself succeeds at once."""
    harness = make_manager()
    await harness.ready("first")
    harness.models.swap("second", harness.tell)
    await asyncio.sleep(0)
    with pytest.raises(InferenceCenterError) as refusal:
        harness.models.swap("first", harness.tell)
    assert (refusal.value.code, refusal.value.retry_after_ms) == (ErrorCode.MODEL_LOADING, 1000)
    await harness.until(lambda: harness.swaps[-1].phase == "done")
    harness.swaps.clear()
    assert (await harness.swap("second")).phase == "done"
    assert harness.changed == ["second", "second"]


async def test_least_recently_used_model_is_evicted(make_manager: Callable[..., ManagerHarness]) -> None:
    """A third model replaces it; it is loaded again on demand."""
    harness = make_manager(names=("first", "second", "third"))
    await harness.ready("first")
    await ended(harness.submit("t1", 1, model="second"))
    await ended(harness.submit("t2", 1, model="first"))
    await ended(harness.submit("t3", 1, model="third"))
    assert [harness.state(name) for name in harness.names] == [
        EngineState.READY,
        EngineState.ASLEEP,
        EngineState.READY,
    ]
    assert await ended(harness.submit("t4", 2, model="second")) == answer(2)
    assert harness.state("first") is EngineState.ASLEEP


async def test_one_client_does_not_evict_the_model_of_another(make_manager: Callable[..., ManagerHarness]) -> None:
    """Its turn waits while the other client's model is new; an operator's load does not wait, and stays too."""
    harness = make_manager(room=1, min_residency_s=3600.0, names=("first", "second", "third"))
    await harness.ready("first")
    await ended(harness.submit("t1", 1, client_id="ada"))
    waiting = harness.submit("t2", 2, model="second", client_id="eve")
    await asyncio.wait_for(waiting.was_delayed.wait(), TIMEOUT_S)
    assert 0 < waiting.delays_s[0] <= 3600
    assert await ended(harness.submit("t3", 1, client_id="ada")) == answer(1)
    assert (harness.state("first"), waiting.events) == (EngineState.READY, [])
    assert (await harness.swap("third")).phase == "done"
    assert (harness.state("third"), waiting.events) == (EngineState.READY, [])
    harness.models.unload("third")
    assert await ended(waiting) == answer(2)


async def test_swap_ends_if_its_model_is_evicted_at_once(make_manager: Callable[..., ManagerHarness]) -> None:
    """It was ready for a moment: the turn of another model that waited for its place runs."""
    harness = make_manager(room=1, names=("first", "second", "third"))
    await harness.ready("first")
    for number in range(3):
        waiting = harness.submit(f"t{number}", 2, model="second", client_id="eve")
        harness.swaps.clear()
        assert (await harness.swap("third")).phase == "done"
        assert await ended(waiting) == answer(2)
        harness.swaps.clear()
        assert (await harness.swap("first")).phase == "done"


async def test_only_user_of_a_model_can_evict_it_at_once(make_manager: Callable[..., ManagerHarness]) -> None:
    """Alternating between models then costs other clients nothing."""
    harness = make_manager(room=1, min_residency_s=3600.0)
    await harness.ready("first")
    for number, name in enumerate(("first", "second", "first")):
        assert await ended(harness.submit(f"t{number}", 2, model=name, client_id="eve")) == answer(2)
    harness.models.ensure_loaded("second", "eve")
    await harness.ready("second")


async def test_unloaded_model_is_loaded_on_demand(make_manager: Callable[..., ManagerHarness]) -> None:
    """Unloading waits for its running turn; a model that was never requested has nothing to unload."""
    harness = make_manager()
    await harness.ready("first")
    running = harness.submit("t1", 5, how="hold")
    await asyncio.wait_for(running.spoke.wait(), TIMEOUT_S)
    harness.models.unload("first")
    harness.models.unload("second")
    harness.models.engine("first").release("t1")
    await harness.until(lambda: harness.state("first") is EngineState.ASLEEP)
    assert (running.text, running.interruptions) == (answer(5), 0)
    assert await ended(harness.submit("t2", 2)) == answer(2)


async def test_limits_reach_every_ready_engine(make_manager: Callable[..., ManagerHarness]) -> None:
    """They depend on its number of slots."""
    harness = make_manager()
    await harness.ready("first")
    asked: list[int] = []

    def limit(slots: int) -> EngineLimits:
        asked.append(slots)
        return EngineLimits(active_slots=slots, prefill_share=1.0, lowest_class=2, pause_ms=0)

    harness.models.engine("second")
    harness.models.limit(limit)
    assert asked == [stub_engine.MODEL.slots]


# Other entries.


async def test_changed_entry_is_reloaded(make_manager: Callable[..., ManagerHarness]) -> None:
    """Running turns end with the old engine; if both would use the same KV directory, it ends first."""
    harness = make_manager()
    await harness.ready("first")
    old = harness.watch(harness.models.engine("first"))
    running = harness.submit("t1", 5, how="hold")
    await asyncio.wait_for(running.spoke.wait(), TIMEOUT_S)
    harness.models.apply(harness.registry(first=harness.spec("first", kv_type_k="q8_0")))
    await harness.until(
        lambda: harness.models.engine("first") is not old and harness.state("first") is EngineState.READY
    )
    assert not running.ended.is_set()
    old.release("t1")
    assert await ended(running) == answer(5)
    assert (running.interruptions, running.recalls) == (0, 0)
    await harness.until(lambda: old.status.state is EngineState.STOPPED)


async def test_changed_parameters_keep_the_engine(make_manager: Callable[..., ManagerHarness]) -> None:
    """They apply from the next turn on."""
    harness = make_manager()
    await harness.ready("first")
    old = harness.models.engine("first")
    harness.models.apply(harness.registry(first=replace(harness.spec("first"), params={"temp": 0.5})))
    await asyncio.sleep(0)
    async with harness.models._changing:
        assert harness.models.params_of("first") == {"temp": 0.5}
    assert harness.models.engine("first") is old
    assert old.status.state is EngineState.READY


async def test_queued_turns_move_to_the_changed_entry(make_manager: Callable[..., ManagerHarness]) -> None:
    """If the KV directory is the same, started and waiting turns go to the new engine."""
    harness = make_manager(patience_s=0.05)
    await harness.ready("first")
    old = harness.watch(harness.models.engine("first"))
    running = harness.submit("t1", 5, how="hold")
    await asyncio.wait_for(running.spoke.wait(), TIMEOUT_S)
    harness.models.apply(harness.registry(first=harness.spec("first", max_queue=5)))
    await harness.until(lambda: harness.models.engine("first") is not old)
    assert (running.interruptions, running.recalls) == (1, 1)
    harness.models.engine("first").abort("t1")
    await asyncio.wait_for(running.ended.wait(), TIMEOUT_S)
    assert answer(5).startswith(running.text)


async def test_changed_entry_that_cannot_be_loaded_keeps_the_old_model(
    make_manager: Callable[..., ManagerHarness],
) -> None:
    """The old engine continues."""
    harness = make_manager(names=("first", "second"))
    await harness.ready("first")
    old = harness.watch(harness.models.engine("first"))
    broken = replace(harness.spec("first", kv_type_k="q8_0"), path=Path("broken"))
    make = harness.make

    def make_broken(spec: ModelSpec, admit: Callable[[ModelEngine], Awaitable[bool]]) -> ManagedModel:
        made = make(replace(spec, name="refuse -1"), admit)
        made.supervisor.subscribe(partial(harness._see, "refuse -1"))
        return made

    harness.models._make = make_broken
    harness.models.apply(harness.registry(first=broken))
    await harness.until(lambda: len(harness.models.supervisors) == 2)
    await harness.until(lambda: ("refuse -1", EngineState.STOPPED) in harness.seen)
    assert harness.models.engine("first") is old
    assert await ended(harness.submit("t1", 3)) == answer(3)


async def test_entries_can_be_added_and_removed(make_manager: Callable[..., ManagerHarness]) -> None:
    """A new default is loaded before it is used; a removed one ends after its turns, and is not found any more."""
    harness = make_manager()
    await harness.ready("first")
    old = harness.watch(harness.models.engine("first"))
    running = harness.submit("t1", 5, how="hold")
    await asyncio.wait_for(running.spoke.wait(), TIMEOUT_S)
    harness.names = ("third",)
    harness.models.apply(harness.registry("third"))
    await harness.until(lambda: harness.changed == ["third"])
    await harness.until(lambda: harness.models.names == ("third",))
    with pytest.raises(InferenceCenterError):
        harness.models.engine("first")
    assert not running.ended.is_set()
    old.release("t1")
    assert await ended(running) == answer(5)
    await harness.until(lambda: old.status.state is EngineState.STOPPED)
    assert await ended(harness.submit("t2", 2)) == answer(2)


async def test_stop_ends_a_loading_engine(make_manager: Callable[..., ManagerHarness]) -> None:
    """The others end, too."""
    harness = make_manager(names=("first", "wait"))
    await harness.ready("first")
    harness.models.swap("wait", harness.tell)
    harness.models.apply(harness.registry(first=harness.spec("first", kv_type_k="q8_0")))
    await harness.until(lambda: harness.state("wait") is EngineState.STARTING)
    supervisors = harness.models.supervisors
    await harness.models.stop()
    assert [each.status.state for each in supervisors] == [EngineState.STOPPED, EngineState.STOPPED]


async def test_rescan_finds_new_models(make_manager: Callable[..., ManagerHarness]) -> None:
    """Existing ones are unchanged, also if the directory cannot be read."""
    harness = make_manager()
    fresh = harness.registry(first=harness.spec("first", max_queue=5), third=harness.spec("third"))
    harness.models.apply(replace(harness.registry(), reread=lambda: fresh))
    await harness.ready("first")
    await harness.until(lambda: not harness.models._changing.locked())
    engine = harness.models.engine("first")
    with pytest.raises(InferenceCenterError):
        harness.models.engine("third")
    harness.models.rescan()
    assert harness.models.names == ("first", "second", "third")
    assert harness.models.engine("first") is engine
    assert await ended(harness.submit("t1", 2, model="third")) == answer(2)
    harness.models._registry = replace(harness.models._registry, reread=unreadable)
    harness.models.rescan()
    assert harness.models.names == ("first", "second", "third")


async def test_removed_models_are_forgotten(make_manager: Callable[..., ManagerHarness]) -> None:
    """Others are unchanged."""
    harness = make_manager()
    await harness.ready("first")
    engine = harness.models.engine("first")
    left = replace(harness.registry(), models={"first": harness.spec("first")})
    harness.models._registry = replace(harness.models._registry, reread=lambda: left)
    harness.models.forget_removed()
    await asyncio.sleep(0)
    async with harness.models._changing:
        assert harness.models.names == ("first",)
    assert harness.models.engine("first") is engine


def unreadable() -> Registry:
    """Raise for settings that exclude each other."""
    raise InferenceCenterError(ErrorCode.INVALID_CONFIG, "no")


# Models with several engines.


async def test_replicas_are_loaded_evicted_and_swapped_together(make_manager: Callable[..., ManagerHarness]) -> None:
    """They take the place of one model: another that has no room evicts all, and their turns continue on all."""
    harness = make_manager(room=1, patience_s=0.05)
    await harness.ready("first")
    harness.models.apply(harness.registry(second=replace(harness.spec("second"), nodes=("local",) * 2)))
    assert (await harness.swap("second")).phase == "done"
    pair = harness.models.engine("second")
    await harness.until(lambda: pair.loads == 2)
    assert harness.models.describe()[1].replicas is not None
    assert [each.state for each in harness.models.describe()[1].replicas or ()] == ["loaded"] * 2
    harness.swaps.clear()
    assert (await harness.swap("first")).phase == "done"
    assert [each.state for each in pair.status.replicas] == [EngineState.ASLEEP] * 2
    turns = [harness.submit(f"t{number}", 3, model="second") for number in range(4)]
    assert [await ended(turn) for turn in turns] == [answer(3)] * 4
    assert pair.loads == 4
    assert not harness.models.engine("first").holds_memory


async def test_changed_number_of_replicas_continues_the_turns(make_manager: Callable[..., ManagerHarness]) -> None:
    """The first keeps its KV directory, so the old engines end before the new ones are loaded."""
    harness = make_manager(patience_s=0.05)
    await harness.ready("first")
    for replicas in (2, 1):
        old = harness.watch(harness.models.engine("first"))
        running = harness.submit(f"t{replicas}", 5, how="hold")
        await asyncio.wait_for(running.spoke.wait(), TIMEOUT_S)
        harness.models.apply(harness.registry(first=replace(harness.spec("first"), nodes=("local",) * replicas)))
        await harness.until(lambda old=old: harness.models.engine("first") is not old)  # type: ignore[misc]
        assert (running.interruptions, running.recalls) == (1, 1)
        assert len(harness.models.engine("first").status.replicas) == (2 if replicas == 2 else 0)
        harness.models.engine("first").abort(running.turn_id)
        await asyncio.wait_for(running.ended.wait(), TIMEOUT_S)
        assert answer(5).startswith(running.text)


async def test_failed_replica_is_started_again_by_a_load(make_manager: Callable[..., ManagerHarness]) -> None:
    """It was lost too often while the other served; a swap to the same model, or a reload, starts it."""
    harness = make_manager()
    harness.models.apply(harness.registry(first=replace(harness.spec("first"), nodes=("local",) * 2)))
    await harness.until(lambda: len(harness.models.statuses["first"].replicas) == 2)
    pair = harness.models.engine("first")
    assert isinstance(pair, ReplicaSet)
    same = harness.registry(first=replace(harness.spec("first"), nodes=("local",) * 2))
    revivals: list[Callable[[], None]] = [
        lambda: harness.models.swap("first", harness.tell),
        lambda: harness.models.apply(same),
    ]
    for revive in revivals:
        await harness.until(lambda: all(each.state is EngineState.READY for each in pair.replicas))
        for _ in range(2):
            await harness.until(lambda: pair.replicas[1].state is EngineState.READY)
            os.kill(pair.supervisors[1].status.pid or 0, signal.SIGKILL)
            await harness.until(lambda: pair.replicas[1].state is not EngineState.READY)
        await harness.until(lambda: pair.replicas[1].state is EngineState.FAILED)
        assert harness.state("first") is EngineState.READY
        revive()
    await harness.until(lambda: all(each.state is EngineState.READY for each in pair.replicas))


async def replaced(harness: ManagerHarness, spec: ModelSpec) -> ReplicaSet:
    """Return the replicas of another entry of the default model, once they are those in use."""
    harness.models.apply(harness.registry(first=spec))
    await harness.until(lambda: isinstance(harness.models.engine("first"), ReplicaSet))
    replicas = harness.watch(harness.models.engine("first"))
    assert isinstance(replicas, ReplicaSet)
    await harness.until(lambda: all(each.state is EngineState.READY for each in replicas.replicas))
    return replicas


async def test_changed_entry_rolls_through_the_replicas(make_manager: Callable[..., ManagerHarness]) -> None:
    """Also their number; one that cannot be loaded keeps the entry as it was, and the list of models says why."""
    harness = make_manager()
    before = replace(harness.spec("first"), nodes=("local",) * 2)
    pair = await replaced(harness, before)
    harness.models.apply(harness.registry(first=replace(before, path=BROKEN)))
    await harness.until(lambda: (roll := harness.models.describe()[0].roll) is not None and roll.failed)
    async with harness.models._changing:
        assert harness.models.spec_of("first") == before
    assert [each.state for each in pair.replicas] == [EngineState.READY] * 2
    roll = harness.models.describe()[0].roll
    assert roll is not None
    assert (roll.done, roll.total, roll.failed) == (0, 2, True)
    assert "allocate" in roll.detail
    for path, number in (("tuned", 2), ("tuned", 3), ("other", 2)):
        entry = replace(before, path=Path(path), nodes=("local",) * number)
        harness.models.apply(harness.registry(first=entry))
        await harness.until(lambda entry=entry: harness.models._models["first"].spec == entry)  # type: ignore[misc]
        assert harness.models.engine("first") is pair
        assert [each.state for each in pair.replicas] == [EngineState.READY] * number
        assert all(each.spec.path == entry.path for each in pair.replicas)
        assert harness.models.describe()[0].roll is None
        assert len(harness.models.supervisors) == number
        assert await ended(harness.submit(f"{path}{number}", 3)) == answer(3)


async def test_replicas_that_change_machines_end_before_the_new_ones(
    make_manager: Callable[..., ManagerHarness],
) -> None:
    """Also with another file: on a machine the new engine would take the place of the old one."""
    harness = make_manager(nodes=NodeTable())
    before = replace(harness.spec("first"), nodes=("box", "spare"))
    pair = await replaced(harness, before)
    states: list[tuple[bool, bool]] = []
    pair.subscribe(lambda _: states.append((pair.holds_memory, harness.models.engine("first") is pair)))
    harness.models.apply(harness.registry(first=replace(before, nodes=("spare", "box"), path=Path("tuned"))))
    await harness.until(lambda: harness.models.engine("first") is not pair)
    assert (False, True) in states
    assert await ended(harness.submit("t1", 3)) == answer(3)


async def test_machine_is_drained_and_returns(make_manager: Callable[..., ManagerHarness]) -> None:
    """With the replicas that run there; not the last machine of a model, and no unknown one."""
    table = NodeTable()
    table.update({"box": JoinedNode("10.0.0.2", alive=True), "spare": JoinedNode("10.0.0.3", alive=True)})
    harness = make_manager(nodes=table)
    pair = await replaced(harness, replace(harness.spec("first"), nodes=("box", "spare")))
    harness.models.drain_node("box")
    none_left = "would have no machine"
    for name, problem in (("spare", none_left), ("local", none_left), ("x", "is no machine")):
        with pytest.raises(InferenceCenterError, match=problem):
            harness.models.drain_node(name)
    await harness.until(lambda: pair.replicas[0].state is EngineState.STOPPED)
    _, box, spare = harness.models.nodes
    assert (box.engines[0].status.state, spare.engines[0].status.state) == (EngineState.STOPPED, EngineState.READY)
    harness.models.undrain_node("box")
    await harness.until(lambda: pair.replicas[0].state is EngineState.READY)
    assert [each.drain for each in harness.models.nodes] == ["none"] * 3


async def test_replicas_follow_the_cluster(make_manager: Callable[..., ManagerHarness]) -> None:
    """Those of a model on all machines."""
    table = NodeTable()
    harness = make_manager(nodes=table)
    pair = await replaced(harness, replace(harness.spec("first"), on_all_nodes=True, nodes=("local",) * 2))
    table.update({"own": JoinedNode("10.0.0.1", alive=True, own=True), "box": JoinedNode("10.0.0.2", alive=True)})
    await harness.until(lambda: [each.state for each in pair.replicas] == [EngineState.READY] * 3)
    assert [each.node for each in pair.replicas] == ["local", "local", "box"]


async def test_machine_whose_devices_are_used_is_drained_and_returns(
    make_manager: Callable[..., ManagerHarness],
) -> None:
    """The answer says what the drain waits for; the engine then runs without the machine until that is back."""
    table = NodeTable()
    joined = {"box": JoinedNode("10.0.0.2", alive=True)}
    table.update(joined)
    harness = make_manager(nodes=table)
    harness.models.apply(harness.registry(first=replace(harness.spec("first"), rpc_nodes=("box",))))
    await harness.until(lambda: bool(harness.models.nodes[1].rpc_servers))
    await harness.ready("first")
    turn = harness.submit("t", 3, how="hold")
    await asyncio.wait_for(turn.spoke.wait(), TIMEOUT_S)
    harness.models.drain_node("box")
    box = harness.models.nodes[1]
    assert (box.drain, box.drain_waits_for) == ("draining", ("1 running turn of first",))
    harness.models.release("t")
    await harness.until(lambda: harness.models.nodes[1].rpc_servers[0].state == "missing")
    await harness.ready("first")
    await harness.until(lambda: harness.models.nodes[1].drain == "drained")
    table.update(joined)
    harness.models.undrain_node("box")
    assert [each.state for each in harness.models.nodes[1].rpc_servers] == ["missing"]
    table.update(joined)
    await harness.until(lambda: harness.models.nodes[1].rpc_servers[0].state == "ready")
    await harness.ready("first")


async def test_engine_with_rpc_nodes_ends_before_its_successor_is_started(
    make_manager: Callable[..., ManagerHarness],
) -> None:
    """Also with another file: the new engine's RPC servers take the place of the old one's."""
    table = NodeTable()
    table.update({"box": JoinedNode("10.0.0.2", alive=True)})
    harness = make_manager(nodes=table)
    before = replace(harness.spec("first"), rpc_nodes=("box",))
    harness.models.apply(harness.registry(first=before))
    await harness.until(lambda: bool(harness.models.nodes[1].rpc_servers))
    await harness.ready("first")
    old = harness.models.engine("first")
    states: list[tuple[bool, bool]] = []
    old.subscribe(lambda _: states.append((old.holds_memory, harness.models.engine("first") is old)))
    harness.models.apply(harness.registry(first=replace(before, path=Path("tuned"))))
    await harness.until(lambda: harness.models.engine("first") is not old)
    assert (False, True) in states
    assert await ended(harness.submit("t", 3)) == answer(3)


async def test_drain_needs_a_cluster(make_manager: Callable[..., ManagerHarness]) -> None:
    """The daemon of one machine has none."""
    with pytest.raises(InferenceCenterError, match="in no cluster"):
        make_manager().models.drain_node("box")

"""Several engines of one model: placement, loss, poison turns and the figures of all."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from inferencecenter.config.sections import EngineSettings
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.core.tasks import TaskGroup
from inferencecenter.ipc import engine_child
from inferencecenter.ipc.engine_options import EngineOptions
from inferencecenter.ipc.messages import Cancelled, Failed
from inferencecenter.ipc.port import EngineState, EngineStatus, RollStatus, SessionKv
from inferencecenter.models.registry import ModelSpec
from inferencecenter.supervisor import replica_set
from inferencecenter.supervisor.poison_turns import PoisonTurnStore, SuspectedTurns
from inferencecenter.supervisor.process import LocalLauncher, NodeUnreachableError
from inferencecenter.supervisor.replica_set import Replica, ReplicaSet, loaded_siblings
from inferencecenter.supervisor.supervisor import Supervisor
from tests.supervisor import stub_engine
from tests.supervisor.harness import TIMEOUT_S, RecordingTurn, end_of, order
from tests.supervisor.stub_engine import answer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from inferencecenter.ipc.messages import FromEngine
    from inferencecenter.supervisor.planning import Planner
    from inferencecenter.supervisor.poison_turns import Suspicion
    from inferencecenter.supervisor.process import EngineProcess

SLOTS = stub_engine.MODEL.slots


@dataclass(eq=False)
class PlacedTurn(RecordingTurn):
    """A turn of a session, which is resubmitted to the set."""

    replicas: ReplicaSet | None = None
    forked_from: str | None = None
    resubmitted: asyncio.Event = field(default_factory=asyncio.Event)
    refusals: list[ErrorCode] = field(default_factory=list)

    @property
    def session_kv(self) -> SessionKv:
        """The KV of its session, or of the parent."""
        return SessionKv(self.order.session_id, self.n_tokens, self.forked_from)

    def resubmit(self) -> None:
        """Submit it again."""
        super().resubmit()
        assert self.replicas is not None
        try:
            self.replicas.submit(self)
        except InferenceCenterError as error:
            self.refusals.append(error.code)
        self.resubmitted.set()


class AwayLauncher(LocalLauncher):
    """Starts engines here as if on a machine, while that is not ``away``."""

    def __init__(self, node: str, away: set[str]) -> None:
        super().__init__()
        self._node, self._away = node, away

    async def launch(
        self,
        options: EngineOptions,
        *,
        is_first: bool,
        on_message: Callable[[FromEngine], None],
        on_drain: Callable[[], None],
    ) -> EngineProcess:
        """Start an engine if the machine can be reached."""
        if self._node in self._away:
            raise NodeUnreachableError(f"{self._node} is away")
        return await super().launch(options, is_first=is_first, on_message=on_message, on_drain=on_drain)


@dataclass
class SetHarness:
    """Replicas with stub engines, which log their steps in files ``0``, ``1``, ..."""

    folder: Path
    count: int = 2
    options: dict[str, object] = field(default_factory=dict)
    model_names: dict[str, str] = field(default_factory=dict)
    drained: frozenset[str] = frozenset()
    away: set[str] = field(default_factory=set)
    placed: list[str] = field(default_factory=list)
    seen: list[EngineStatus] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.news = asyncio.Event()
        self.store = PoisonTurnStore(self.folder / "suspects.json")
        suspicions: dict[str, Suspicion] = {}
        base: dict[str, object] = {
            "backend": "echo",
            "slots": 2,
            "max_queue": 10,
            "max_restarts": 100,
            "restart_backoff_min_s": 0.01,
            "restart_backoff_max_s": 0.02,
        }

        def make(spec: ModelSpec, index: int, node: str) -> Replica:
            own = {"model_path": str(self.folder / str(index))}
            if (name := self.model_names.get(spec.path.name)) is not None:
                own["model_name"] = name
            supervisor = Supervisor(
                EngineOptions(**(base | self.options | own)),
                suspicions=suspicions,
                suspicion_file=self.store,
                launcher=AwayLauncher(node, self.away),
                node=node,
            )
            return Replica(supervisor, cast("Planner", object()), spec)

        self.set = ReplicaSet(
            self.spec(),
            make=make,
            is_drained=self.drained.__contains__,
            placed=self.placed.append,
        )
        self.set.subscribe(self._see)

    def spec(self, path: str = "old", *, count: int | None = None) -> ModelSpec:
        """Return an entry; its path says how the stub engine calls itself (``model_names``)."""
        nodes = tuple(f"box{index}" for index in range(self.count if count is None else count))
        return ModelSpec(name="stub", path=Path(path), engine=EngineSettings(), nodes=nodes)

    def _see(self, status: EngineStatus) -> None:
        self.seen.append(status)
        self.news.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for a condition on the states."""
        async with asyncio.timeout(TIMEOUT_S):
            while not holds():
                self.news.clear()
                await self.news.wait()

    async def ready(self) -> None:
        """Wait until all engines are ready."""
        await self.until(lambda: self.states == (EngineState.READY,) * self.count)

    @property
    def states(self) -> tuple[EngineState, ...]:
        """The states of the replicas."""
        return tuple(each.state for each in self.set.status.replicas)

    @property
    def turns(self) -> tuple[int, ...]:
        """The unfinished turns of each replica."""
        return tuple(each.n_turns for each in self.set.supervisors)

    def submit(self, turn_id: str, text: str = "hold 2", *, session: str = "", parent: str = "") -> PlacedTurn:
        """Submit a turn of a session, by default one of the turn's name."""
        turn = PlacedTurn(
            order(turn_id, text, session_id=session or turn_id), replicas=self.set, forked_from=parent or None
        )
        self.set.submit(turn)
        return turn

    def kill(self, index: int) -> None:
        """Kill an engine with SIGKILL."""
        pid = self.set.supervisors[index].status.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    def engines_of(self, turn_id: str) -> set[str]:
        """Return the processes that ran steps of a turn."""
        files = [self.folder / str(index) for index in range(self.count)]
        lines = [line.split() for path in files if path.exists() for line in path.read_text().splitlines()]
        return {pid for pid, *turns in lines if turn_id in turns}


@pytest.fixture
async def make_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., SetHarness]]:
    """Make sets, whose engines are stopped at the end."""
    monkeypatch.setattr(engine_child, "MODULE", stub_engine.MODULE)
    made: list[SetHarness] = []

    def make(**fields: object) -> SetHarness:
        made.append(SetHarness(tmp_path, **fields))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        await each.set.stop()


@pytest.fixture
async def pair(make_set: Callable[..., SetHarness]) -> SetHarness:
    """Two replicas that are ready."""
    found = make_set()
    found.set.start()
    await found.ready()
    return found


async def release(pair: SetHarness, *turns: PlacedTurn) -> None:
    """Have held turns end."""
    for turn in turns:
        pair.set.release(turn.turn_id)
        await end_of(turn)


async def test_sessions_spread_and_return(pair: SetHarness) -> None:
    """New sessions go to the least work; later turns, and those of a fork, to the replica that ran the session."""
    first, second = pair.submit("a"), pair.submit("b")
    assert pair.turns == (1, 1)
    await asyncio.gather(first.spoke.wait(), second.spoke.wait())
    await release(pair, first)
    pair.set.submit(again := PlacedTurn(order("b2", "hold 2", session_id="b"), replicas=pair.set))
    fork = pair.submit("c", parent="b")
    assert (pair.turns, pair.placed) == ((0, 3), ["new", "new", "kv", "kv"])
    assert pair.set.status.model is not None
    assert pair.set.status.model.slots == 2 * SLOTS
    await release(pair, second, again, fork)


async def test_released_session_is_forgotten(pair: SetHarness) -> None:
    """Its name may be used by another session."""
    await end_of(pair.submit("a", "count 1"))
    await end_of(pair.submit("b", "count 1"))
    pair.set.release("b")
    await end_of(pair.submit("b2", "count 1", session="b"))
    assert pair.placed == ["new"] * 3


async def test_killed_engine_passes_its_turns_on_at_once(make_set: Callable[..., SetHarness]) -> None:
    """They end on the other replica, with each letter once, although their own is not restarted for an hour."""
    found = make_set(options={"restart_backoff_min_s": 3600.0, "restart_backoff_max_s": 3600.0, "echo_delay_ms": 5})
    found.set.start()
    await found.ready()
    turns = [found.submit(f"t{number}", "count 40") for number in range(4)]
    await asyncio.gather(*(turn.spoke.wait() for turn in turns))
    found.kill(0)
    for turn in turns:
        await end_of(turn)
        assert turn.text == answer(40)
    assert [turn.interruptions for turn in turns] == [1, 0, 1, 0]
    assert (found.states, found.set.status.state) == ((EngineState.BACKOFF, EngineState.READY), EngineState.READY)
    assert found.placed[-2:] == ["lost", "lost"]
    found.submit("t0b", "count 1", session="t0")
    assert found.placed[-1] == "kv"


async def test_moved_turn_can_be_aborted(pair: SetHarness) -> None:
    """On its way from one replica to the other it ends as a waiting turn does."""
    turn = pair.submit("a")
    await turn.spoke.wait()
    pair.set.subscribe(lambda _: pair.set.abort("a") if pair.states[0] is EngineState.BACKOFF else None)
    pair.kill(0)
    await asyncio.wait_for(turn.ended.wait(), TIMEOUT_S)
    assert turn.terminal == [Cancelled("a")]
    assert pair.turns == (0, 0)


async def test_queue_limit_is_that_of_all_replicas(make_set: Callable[..., SetHarness]) -> None:
    """Turns of a lost replica are taken in addition."""
    found = make_set(options={"max_queue": 1, "restart_backoff_min_s": 3600.0, "restart_backoff_max_s": 3600.0})
    found.set.start()
    await found.ready()
    turns = [found.submit(f"t{number}") for number in range(2 * SLOTS + 1)]
    with pytest.raises(InferenceCenterError) as refusal:
        found.submit("late")
    assert refusal.value.code is ErrorCode.QUEUE_FULL
    await asyncio.gather(*(turn.spoke.wait() for turn in turns))
    lost = turns[1::2]
    found.kill(1)
    await asyncio.gather(*(turn.resubmitted.wait() for turn in lost))
    assert found.turns == (len(turns), 0)
    await release(found, *turns)


@pytest.mark.parametrize("how", ["die", "die-reading", "flood"])
async def test_poison_turn_kills_one_replica_only(pair: SetHarness, how: str) -> None:
    """It stays where it crashed an engine and fails there; all others end, on one replica or the other."""
    victims = [pair.submit(f"v{number}", "count 60") for number in range(4)]
    poison = pair.submit("poison", f"{how} 3")
    await asyncio.wait_for(poison.ended.wait(), TIMEOUT_S)
    (failure,) = poison.terminal
    assert isinstance(failure, Failed)
    assert failure.code == ErrorCode.ENGINE_CRASHED.value
    for turn in victims:
        await end_of(turn)
        assert turn.text == answer(60)
    assert [each.restarts for each in pair.set.status.replicas][1] == 0
    assert pair.store.of("") == SuspectedTurns()


async def test_turn_whose_engines_are_killed_from_outside_is_isolated(pair: SetHarness) -> None:
    """It moves after the first kill, with the suspicion, and stays alone on its replica after the second."""
    turn, other = pair.submit("a", "oom 30"), pair.submit("b")
    await asyncio.gather(turn.spoke.wait(), other.spoke.wait())
    await asyncio.wait_for(turn.ended.wait(), TIMEOUT_S)
    (failure,) = turn.terminal
    assert isinstance(failure, Failed)
    assert len(pair.engines_of("a")) == 4
    assert [each.restarts for each in pair.set.status.replicas] in ([1, 2], [1, 3])
    await release(pair, other)


async def test_replica_that_cannot_be_loaded_leaves_its_turns_to_the_others(
    make_set: Callable[..., SetHarness], tmp_path: Path
) -> None:
    """The set serves with what it has; it fails when all have failed."""
    found = make_set(options={"model_name": "wait", "max_restarts": 0})
    (tmp_path / "0").touch()  # it loads, and the other waits
    found.set.start()
    await found.until(lambda: found.states[0] is EngineState.READY)
    turns = [found.submit(f"t{number}", "count 3") for number in range(SLOTS)]
    found.kill(1)
    await found.until(lambda: found.states[1] is EngineState.FAILED)
    for turn in turns:
        await end_of(turn)
    assert (found.set.status.serves, found.set.given_up, found.set.load_failure) == (True, False, None)
    await end_of(found.submit("last", "count 3"))
    (tmp_path / "1").touch()  # now it loads
    found.set.revive()
    await found.until(lambda: found.states[1] is EngineState.READY)
    found.kill(1)
    await found.until(lambda: found.states[1] is EngineState.FAILED)
    found.kill(0)
    await found.until(lambda: found.states[0] is EngineState.FAILED)
    assert found.set.given_up
    with pytest.raises(InferenceCenterError):
        found.submit("refused")


async def test_turns_of_an_earlier_daemon_spread_at_the_start(make_set: Callable[..., SetHarness]) -> None:
    """Until then the first replica keeps them; one that was suspected stays there."""
    found = make_set()
    found.store.put("", SuspectedTurns({"t0": 1}, {"t0": 0}))
    turns = [found.submit(f"t{number}") for number in range(5)]
    assert found.turns == (5, 0)
    found.set.start(asleep=True)
    await asyncio.gather(*(turn.spoke.wait() for turn in turns))
    assert found.turns in ((3, 2), (2, 3))
    assert [turn.recalls for turn in turns] == [0, 1, 1, 1, 1]
    await release(found, *turns)


async def test_sleeping_replica_wakes_for_its_turns_only(make_set: Callable[..., SetHarness]) -> None:
    """An explicit load wakes all, and an eviction ends all."""
    found = make_set()
    found.set.start(asleep=True)
    assert found.states == (EngineState.ASLEEP,) * 2
    assert found.set.status.serves
    assert not found.set.wanted
    turn = found.submit("a")
    assert found.set.wanted
    await turn.spoke.wait()
    assert found.states == (EngineState.READY, EngineState.ASLEEP)
    assert (found.set.busy, found.set.holds_memory, found.set.users) == (True, True, {"ada"})
    assert loaded_siblings(found.set.replicas, 1) == [found.set.replicas[0].planner]
    assert loaded_siblings(found.set.replicas, 0) == []
    found.set.wake("ada", urgent=True)
    await found.until(lambda: found.states[1] is EngineState.READY)
    await release(found, turn)
    await found.set.evict()
    assert not found.set.holds_memory


async def test_lookups_go_to_a_ready_replica(pair: SetHarness) -> None:
    """The one with the least work."""
    turn = pair.submit("a")
    await turn.spoke.wait()
    answers: list[asyncio.Future[Any]] = [
        pair.set.tokenize((), first=True, client_id="ada"),
        pair.set.count_tokens((), first=True, client_id="ada"),
        pair.set.detokenize([1], client_id="ada"),
    ]
    assert [len(each._tokenizer) for each in pair.set.supervisors] == [0, 3]
    for each in answers:
        each.cancel()
    await release(pair, turn)


async def test_status_sums_the_replicas(pair: SetHarness) -> None:
    """It is that of the most usable replica, with the figures of all."""
    turns = [pair.submit(f"t{number}") for number in range(3)]
    await asyncio.gather(*(turn.spoke.wait() for turn in turns))
    status = pair.set.status
    assert (status.running, status.state, len(status.replicas)) == (3, EngineState.READY, 2)
    assert pair.set.model is pair.set.model is status.model
    assert pair.set.loads == 2
    assert pair.set.loaded_at_s is not None
    await release(pair, *turns)


async def test_drained_machine_ends_its_turns_elsewhere(make_set: Callable[..., SetHarness]) -> None:
    """Running and waiting ones, with each letter once; its engine ends, and new turns go to the others."""
    found = make_set(options={"swap_patience_s": 0.0, "echo_delay_ms": 5})
    found.set.start()
    await found.ready()
    turns = [found.submit(f"t{number}", "count 40") for number in range(2 * SLOTS + 2)]
    await asyncio.gather(*(turn.spoke.wait() for turn in turns[: 2 * SLOTS]))
    await found.set.drain("box0")
    assert found.states == (EngineState.STOPPED, EngineState.READY)
    for turn in turns:
        await end_of(turn)
        assert turn.text == answer(40)
    assert {turn.interruptions for turn in turns} == {0, 1}
    new = [found.submit(f"n{number}", "count 1") for number in range(3)]
    assert found.turns == (0, 3)
    assert found.set.status.model is not None
    assert found.set.status.model.slots == SLOTS
    for turn in new:
        await end_of(turn)


async def test_drained_machine_ends_its_running_turns_first(pair: SetHarness) -> None:
    """Within the patience of a swap they are not interrupted; the next turn of their session goes elsewhere."""
    running = pair.submit("a")
    await running.spoke.wait()
    tasks = TaskGroup("test")
    draining = tasks.spawn(pair.set.drain("box0"), name="drain")
    await asyncio.sleep(0)
    other = pair.submit("b")
    assert pair.turns == (1, 1)
    await release(pair, running)
    await draining
    assert running.interruptions == 0
    await end_of(pair.submit("a2", "count 1", session="a"))
    assert pair.turns == (0, 1)
    assert pair.placed == ["new"] * 3
    await release(pair, other)


async def test_machine_returns_after_a_drain(pair: SetHarness) -> None:
    """With a new engine, since others of the model are loaded."""
    await pair.set.drain("box1")
    await pair.set.drain("box1")
    pair.set.undrain("box1")
    await pair.ready()
    turns = [pair.submit("a"), pair.submit("b")]
    assert pair.turns == (1, 1)
    await asyncio.gather(*(turn.spoke.wait() for turn in turns))
    await release(pair, *turns)


async def test_drained_machine_is_not_started(make_set: Callable[..., SetHarness]) -> None:
    """A restarted daemon remembers it; turns that are there at its start go to the others."""
    found = make_set(drained=frozenset({"box0"}))
    turn = found.submit("early", "count 2")
    found.set.start()
    await end_of(turn)
    assert found.states == (EngineState.STOPPED, EngineState.READY)
    found.set.undrain("box0")
    await found.ready()


async def test_turns_of_a_drained_model_wait(make_set: Callable[..., SetHarness]) -> None:
    """If all its machines are drained, as after a change of the configuration, they run when one returns."""
    found = make_set(drained=frozenset({"box0", "box1"}))
    found.set.start()
    turn = found.submit("a", "count 2")
    assert found.set.load_failure is None
    found.set.undrain("box1")
    await found.until(lambda: found.states[1] is EngineState.STARTING or found.states[1] is EngineState.READY)
    found.set.undrain("box0")
    await end_of(turn)


async def test_machine_that_is_lost_can_be_drained(make_set: Callable[..., SetHarness]) -> None:
    """Its engine is not started again, and the drain does not wait for it."""
    found = make_set(options={"restart_backoff_min_s": 3600.0, "restart_backoff_max_s": 3600.0})
    found.set.start()
    await found.ready()
    found.kill(0)
    await found.until(lambda: found.states[0] is EngineState.BACKOFF)
    await found.set.drain("box0")
    assert found.states == (EngineState.STOPPED, EngineState.READY)


async def test_replicas_follow_machines(make_set: Callable[..., SetHarness]) -> None:
    """One for each that joins but those that are drained; one that is lost with its machine ends, and returns."""
    found = make_set(count=1, options={"restart_backoff_min_s": 3600.0, "restart_backoff_max_s": 3600.0})
    found.set.start()
    await found.ready()
    await found.set.follow({"box1", "box2"}, {"box2"}.__contains__)
    assert [each.node for each in found.set.replicas] == ["box0", "box1", "box2"]
    await found.until(lambda: found.states == (EngineState.READY, EngineState.READY, EngineState.STOPPED))
    await found.set.follow({"box0"}, {"box2"}.__contains__)
    assert found.states[1] is EngineState.READY  # it is connected, whatever the cluster says
    found.kill(1)
    await found.until(lambda: found.states[1] is EngineState.BACKOFF)
    await found.set.follow({"box0"}, {"box2"}.__contains__)
    assert found.states == (EngineState.READY, EngineState.STOPPED, EngineState.STOPPED)
    await found.set.follow({"box0", "box1"}, {"box2"}.__contains__)
    await found.until(lambda: found.states[1] is EngineState.READY)


async def test_places_of_machines_that_left_are_used_again(
    make_set: Callable[..., SetHarness], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model has a bounded number of replicas, however many machines come and go."""
    monkeypatch.setattr(replica_set, "MAX_REPLICAS", 2)
    found = make_set(count=1)
    found.set.start()
    await found.ready()
    drained = {"box1", "box2", "box3"}.__contains__
    await found.set.follow({"box0", "box1"}, drained)
    await found.set.follow({"box0", "box2"}, drained)
    assert [each.node for each in found.set.replicas] == ["box0", "box2"]
    await found.set.follow({"box0", "box2", "box3"}, drained)
    assert [each.node for each in found.set.replicas] == ["box0", "box2"]


# A changed entry.


@pytest.fixture
async def trio(make_set: Callable[..., SetHarness]) -> SetHarness:
    """Three replicas that are ready, and then record their states; running turns move without patience."""
    found = make_set(
        count=3,
        options={"swap_patience_s": 0.0, "echo_delay_ms": 5},
        model_names={"broken": "refuse -1", "foreign": "foreign"},
    )
    found.set.start()
    await found.ready()
    found.seen.clear()
    return found


def progress(found: SetHarness) -> tuple[int, int] | None:
    """Return how many steps of a change are done, and of how many."""
    roll = found.set.status.roll
    return None if roll is None else (roll.done, roll.total)


def fewest_ready(found: SetHarness) -> int:
    """Return how many replicas were ready when there were fewest."""
    return min(sum(each.state is EngineState.READY for each in status.replicas) for status in found.seen)


async def test_roll_replaces_one_replica_after_the_other(trio: SetHarness) -> None:
    """All others are ready meanwhile; turns move with their text, each once, since the weights are the same."""
    pids = {each.status.pid for each in trio.set.supervisors}
    turns = [trio.submit(f"t{number}", "count 200") for number in range(2 * SLOTS)]
    await asyncio.gather(*(turn.spoke.wait() for turn in turns))
    changed = replace(trio.spec(), engine=EngineSettings(sleep_after_s=7))
    assert await trio.set.roll(changed) is None
    for turn in turns:
        await end_of(turn)
        assert turn.text == answer(200)
    assert trio.states == (EngineState.READY,) * 3
    assert pids.isdisjoint(each.status.pid for each in trio.set.supervisors)
    assert all(each.spec == changed for each in trio.set.replicas)
    assert fewest_ready(trio) == 2
    seen = {(each.roll.done, each.roll.total) for each in trio.seen if each.roll is not None}
    assert seen == {(number, 3) for number in range(4)}
    assert trio.set.status.roll is None


@pytest.mark.parametrize("path", ["tuned", "foreign"])
async def test_turns_never_continue_on_other_weights(trio: SetHarness, path: str) -> None:
    """They move to the old file's other replicas, and the last of these ends them before it is replaced."""
    turns = [trio.submit(f"t{number}", "hold 40") for number in range(6)]
    await asyncio.gather(*(turn.spoke.wait() for turn in turns))
    old = {str(each.status.pid) for each in trio.set.supervisors}
    last = trio.set.supervisors[2]
    tasks = TaskGroup("test")
    rolling = tasks.spawn(_roll(trio, path), name="roll")
    await trio.until(lambda: progress(trio) == (2, 3))
    new = [trio.submit(f"n{number}", "count 2") for number in range(4)]
    for turn in new:
        await end_of(turn)
    assert all(trio.engines_of(turn.turn_id).isdisjoint(old) for turn in new)
    assert (last.n_turns, trio.set.status.running) == (6, 6)
    assert trio.set.status.roll is not None
    assert trio.set.status.roll.detail == f"Waits for 6 turns of the former engine on {last.node} to end or move."
    await release(trio, *turns)
    await rolling
    for turn in turns:
        assert turn.text == answer(40)
        assert trio.engines_of(turn.turn_id) <= old
    assert fewest_ready(trio) == 2
    assert trio.states == (EngineState.READY,) * 3
    assert trio.set.model is not None
    assert trio.set.model.name == ("foreign" if path == "foreign" else "stub")


async def test_last_replica_keeps_turns_that_begin_anew(trio: SetHarness) -> None:
    """After a shift of the context or the loss of its engine: elsewhere they would continue on other weights."""
    turn = trio.submit("a", "hold 3")
    await turn.spoke.wait()
    old = trio.set.supervisors[0]
    rolling = TaskGroup("test").spawn(_roll(trio, "tuned"), name="roll")
    await trio.until(lambda: progress(trio) == (2, 3))
    (last,) = [each for each in trio.set.supervisors if each.n_turns]
    assert last is not old
    assert last not in [each.supervisor for each in trio.set.replicas]
    shifted, later = (
        PlacedTurn(order(name, text, session_id="a", answer=turn.tokens[:8]), replicas=trio.set)
        for name, text in (("a2", "hold 3"), ("a3", "count 3"))
    )
    trio.set.submit(shifted)
    assert last.n_turns == 2
    pid = last.status.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await trio.until(lambda: last.loads == 2)
    assert last.n_turns == 2
    trio.set.submit(later)
    await end_of(later)  # so the engine has all others
    await release(trio, turn)
    trio.set.release("a2")
    await end_of(shifted)
    await rolling
    assert turn.text == answer(3)


async def _roll(found: SetHarness, path: str) -> None:
    assert await found.set.roll(found.spec(path)) is None


async def test_replica_that_cannot_be_loaded_stops_the_roll(trio: SetHarness) -> None:
    """The others were not touched, its place has the old model again, and the status says why."""
    turns = [trio.submit(f"t{number}", "count 200") for number in range(6)]
    await asyncio.gather(*(turn.spoke.wait() for turn in turns))
    before = [each.status.pid for each in trio.set.supervisors]
    failure = await trio.set.roll(trio.spec("broken"))
    assert failure is not None
    assert "allocate" in failure
    for turn in turns:
        await end_of(turn)
        assert turn.text == answer(200)
    assert trio.states == (EngineState.READY,) * 3
    assert [each.status.pid for each in trio.set.supervisors][1:] == before[1:]
    assert all(each.spec == trio.spec() for each in trio.set.replicas)
    assert trio.set.status.roll == RollStatus(done=0, total=3, failed=True, detail=failure)
    assert fewest_ready(trio) == 2
    await _roll(trio, "tuned")
    assert trio.set.status.roll is None


async def test_late_failure_puts_all_replicas_back(make_set: Callable[..., SetHarness], tmp_path: Path) -> None:
    """The first had been replaced already: a model has one entry."""
    found = make_set(model_names={"half": "wait"}, options={"load_timeout_s": 3600.0, "max_restarts": 0})
    found.set.start()
    await found.ready()
    (tmp_path / "1").unlink(missing_ok=True)  # the second waits, and is killed
    (tmp_path / "0").touch()
    tasks = TaskGroup("test")
    results: list[str | None] = []

    async def roll() -> None:
        results.append(await found.set.roll(found.spec("half")))

    rolling = tasks.spawn(roll(), name="roll")
    await found.until(lambda: found.set.replicas[1].supervisor.status.load_fraction == 0.5)
    assert progress(found) == (1, 2)
    found.kill(1)
    await rolling
    assert results != [None]
    assert all(each.spec == found.spec() for each in found.set.replicas)
    assert found.states == (EngineState.READY,) * 2


async def test_number_of_replicas_changes_without_a_restart(trio: SetHarness) -> None:
    """Those on machines that stay continue; removed ones pass their turns on."""
    pids = [each.status.pid for each in trio.set.supervisors]
    turns = [trio.submit(f"t{number}", "count 200") for number in range(6)]
    await asyncio.gather(*(turn.spoke.wait() for turn in turns))
    assert await trio.set.roll(trio.spec(count=1)) is None
    assert [each.status.pid for each in trio.set.supervisors] == pids[:1]
    for turn in turns:
        await end_of(turn)
        assert turn.text == answer(200)
    assert await trio.set.roll(trio.spec(count=3)) is None
    assert trio.states == (EngineState.READY,) * 3
    assert trio.set.supervisors[0].status.pid == pids[0]
    await end_of(trio.submit("last", "count 1"))


def test_machines_that_change_places_are_not_rolled(make_set: Callable[..., SetHarness]) -> None:
    """Their engines would be beside others meanwhile."""
    found = make_set()
    entries = {("box0",): True, ("box0", "box1", "box2"): True, ("box1",): False, ("local",): False}
    assert {nodes: found.set.can_roll(replace(found.spec(), nodes=nodes)) for nodes in entries} == entries
    assert not found.set.can_roll(replace(found.spec(), on_all_nodes=True))


async def test_only_replica_keeps_new_turns_waiting(make_set: Callable[..., SetHarness]) -> None:
    """Until the new engine is ready; what it runs ends before that."""
    found = make_set(count=1)
    found.set.start()
    await found.ready()
    running = found.submit("a")
    await running.spoke.wait()
    rolling = TaskGroup("test").spawn(_roll(found, "tuned"), name="roll")
    await found.until(lambda: found.set.status.roll is not None)
    await asyncio.sleep(0)
    waiting = found.submit("b", "count 3")
    await release(found, running)
    await rolling
    await end_of(waiting)
    assert (running.interruptions, waiting.interruptions) == (0, 0)
    assert found.engines_of("a").isdisjoint(found.engines_of("b"))


async def test_sleeping_replicas_are_replaced_without_being_loaded(make_set: Callable[..., SetHarness]) -> None:
    """Nothing needs them; the next turn loads the new model."""
    found = make_set()
    found.set.start(asleep=True)
    await _roll(found, "tuned")
    assert found.states == (EngineState.ASLEEP,) * 2
    await end_of(found.submit("a", "count 2"))


async def test_roll_begins_no_step_while_another_replica_restarts(trio: SetHarness) -> None:
    """Else two would be missing."""
    trio.kill(1)
    await trio.until(lambda: trio.states[1] is not EngineState.READY)
    await _roll(trio, "tuned")
    assert trio.states == (EngineState.READY,) * 3
    assert fewest_ready(trio) == 2


async def test_machine_that_cannot_be_reached_stops_no_roll(trio: SetHarness) -> None:
    """Its replica is not waited for, and is the new one when it returns."""
    trio.away.add("box1")
    trio.kill(1)
    await trio.until(lambda: trio.set.supervisors[1].unreachable)
    trio.seen.clear()
    await _roll(trio, "tuned")
    assert all(each.spec == trio.spec("tuned") for each in trio.set.replicas)
    assert fewest_ready(trio) == 1
    await end_of(trio.submit("a", "count 3"))
    trio.away.clear()
    await trio.until(lambda: trio.states == (EngineState.READY,) * 3)


async def test_answer_whose_weights_are_lost_fails(trio: SetHarness) -> None:
    """The machine that was to end it cannot be reached any more; the change goes on."""
    turn = trio.submit("a")
    await turn.spoke.wait()
    rolling = TaskGroup("test").spawn(_roll(trio, "tuned"), name="roll")
    await trio.until(lambda: progress(trio) == (2, 3))
    (last,) = [each for each in trio.set.supervisors if each.n_turns]
    trio.away.add(last.node)
    assert last.status.pid is not None
    os.kill(last.status.pid, signal.SIGKILL)
    await rolling
    assert turn.refusals == [ErrorCode.ENGINE_UNAVAILABLE]
    trio.away.clear()
    await trio.until(lambda: trio.states == (EngineState.READY,) * 3)


async def test_drain_during_a_roll(trio: SetHarness) -> None:
    """A machine that is drained meanwhile gets no engine; it returns with the new entry."""
    turn = trio.submit("a")
    await turn.spoke.wait()
    rolling = TaskGroup("test").spawn(_roll(trio, "tuned"), name="roll")
    await trio.until(lambda: trio.set.status.roll is not None)
    await trio.set.drain("box2")
    await release(trio, turn)
    await rolling
    assert trio.states == (EngineState.READY, EngineState.READY, EngineState.STOPPED)
    assert all(each.spec == trio.spec("tuned") for each in trio.set.replicas)
    trio.set.undrain("box2")
    await trio.until(lambda: trio.states == (EngineState.READY,) * 3)


async def test_stop_ends_a_roll(trio: SetHarness) -> None:
    """The engine that is being replaced, and none is started."""
    turn = trio.submit("a")
    await turn.spoke.wait()
    rolling = TaskGroup("test").spawn(_roll(trio, "foreign"), name="roll")
    await trio.until(lambda: trio.set.status.roll is not None)
    await trio.set.stop()
    await rolling
    assert {each.status.state for each in trio.set.supervisors} == {EngineState.STOPPED}

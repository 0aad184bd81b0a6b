"""Several engines of one model: placement, loss, poison turns and the figures of all."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import pytest

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.core.tasks import TaskGroup
from inferencecenter.ipc import engine_child
from inferencecenter.ipc.engine_options import EngineOptions
from inferencecenter.ipc.messages import Cancelled, Failed
from inferencecenter.ipc.port import EngineState, EngineStatus, SessionKv
from inferencecenter.supervisor import replica_set
from inferencecenter.supervisor.poison_turns import PoisonTurnStore, SuspectedTurns
from inferencecenter.supervisor.replica_set import Replica, ReplicaSet, loaded_siblings
from inferencecenter.supervisor.supervisor import Supervisor
from tests.supervisor import stub_engine
from tests.supervisor.harness import TIMEOUT_S, RecordingTurn, end_of, order
from tests.supervisor.stub_engine import answer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from inferencecenter.supervisor.planning import Planner
    from inferencecenter.supervisor.poison_turns import Suspicion

SLOTS = stub_engine.MODEL.slots


@dataclass(eq=False)
class PlacedTurn(RecordingTurn):
    """A turn of a session, which is resubmitted to the set."""

    replicas: ReplicaSet | None = None
    forked_from: str | None = None
    resubmitted: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def session_kv(self) -> SessionKv:
        """The KV of its session, or of the parent."""
        return SessionKv(self.order.session_id, self.n_tokens, self.forked_from)

    def resubmit(self) -> None:
        """Submit it again."""
        super().resubmit()
        assert self.replicas is not None
        self.replicas.submit(self)
        self.resubmitted.set()


@dataclass
class SetHarness:
    """Replicas with stub engines, which log their steps in files ``0``, ``1``, ..."""

    folder: Path
    count: int = 2
    options: dict[str, object] = field(default_factory=dict)
    drained: frozenset[str] = frozenset()
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

        def make(index: int, node: str) -> Replica:
            supervisor = Supervisor(
                EngineOptions(**(base | self.options | {"model_path": str(self.folder / str(index))})),
                suspicions=suspicions,
                suspicion_file=self.store,
                node=node,
            )
            return Replica(supervisor, cast("Planner", object()))

        self.set = ReplicaSet(
            [make(index, f"box{index}") for index in range(self.count)],
            make=make,
            is_drained=self.drained.__contains__,
            placed=self.placed.append,
        )
        self.set.subscribe(self._see)

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

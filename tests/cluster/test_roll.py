"""Replicas behind hosts, which are replaced one after the other."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from inferencecenter.config.sections import EngineSettings
from inferencecenter.core.tasks import TaskGroup
from inferencecenter.ipc.engine_options import EngineOptions
from inferencecenter.ipc.port import EngineState, EngineStatus
from inferencecenter.models.registry import ModelSpec
from inferencecenter.supervisor.remote import RemoteLauncher
from inferencecenter.supervisor.replica_set import Replica, ReplicaSet
from inferencecenter.supervisor.supervisor import Supervisor
from tests.supervisor.harness import end_of, order
from tests.supervisor.stub_engine import answer
from tests.supervisor.test_replica_set import PlacedTurn

if TYPE_CHECKING:
    from inferencecenter.supervisor.planning import Planner
    from tests.cluster.harness import Front


@pytest.mark.slow
async def test_roll_ends_the_host_of_each_replica_and_starts_another(front: Front) -> None:
    """Turns go on meanwhile, each ends once with its text, and one replica at most is missing."""

    def make(spec: ModelSpec, index: int, node: str) -> Replica:
        launcher = RemoteLauncher(f"stub/{index}", spec.engine, listener=front.listener, starter=front.starter)
        options = EngineOptions(backend="echo", echo_delay_ms=5, swap_patience_s=0.05, max_queue=100)
        return Replica(Supervisor(options, launcher=launcher, node=node), cast("Planner", object()), spec)

    before = ModelSpec(name="stub", path=Path("old"), engine=EngineSettings(backend="echo"), nodes=("box0", "box1"))
    replicas = ReplicaSet(before, make=make)
    n_ready: list[int] = []
    is_ready = asyncio.Event()

    def see(status: EngineStatus) -> None:
        n_ready.append(sum(each.state is EngineState.READY for each in status.replicas))
        if n_ready[-1] == 2:
            is_ready.set()

    replicas.subscribe(see)
    replicas.start()
    await is_ready.wait()
    n_ready.clear()
    is_over = asyncio.Event()
    turns: list[PlacedTurn] = []

    async def talk(name: str) -> None:
        while not is_over.is_set():
            turns.append(turn := PlacedTurn(order(f"{name}-{len(turns)}", "count 30"), replicas=replicas))
            replicas.submit(turn)
            await end_of(turn)

    tasks = TaskGroup("test")
    clients = [tasks.spawn(talk(f"client{number}"), name="client") for number in range(4)]
    changed = ModelSpec(name="stub", path=Path("new"), engine=EngineSettings(backend="echo"), nodes=("box0", "box1"))
    assert await replicas.roll(changed) is None
    is_over.set()
    await asyncio.gather(*clients)
    assert {turn.text for turn in turns} == {answer(30)}
    assert {len(turn.terminal) for turn in turns} == {1}
    assert min(n_ready) == 1
    assert [ticket.engine for ticket in front.starter.tickets] == ["stub/0", "stub/1"] * 2
    for host in front.starter.hosts[:2]:
        await asyncio.to_thread(host.wait, 60)
    await replicas.stop()

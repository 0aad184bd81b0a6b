"""A daemon with engines on two machines, each in a network namespace, and what happens to the network to one of them.

In each case every turn ends once, its text is that of an undisturbed run, no character is lost or repeated, and the
machine is used again afterwards.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from inferencecenter.ipc.port import EngineState
from tests.cluster.agent_driver import NODES_VARIABLE
from tests.cluster.harness import HOST, Front, LocalStarter
from tests.cluster.network import Machine, open_machine, processes
from tests.cluster.test_ray import Cluster, begin, check_texts, check_use, close, until_ready
from tests.e2e.harness import Daemon, connect_client, run_daemon
from tests.ports import free_port
from tests.supervisor.harness import TIMEOUT_S, ObservedSupervisor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.e2e.harness import SocketClient

pytestmark = [pytest.mark.slow]
AGENT = "tests.cluster.node_agent"
NEAR, FAR = "near", "far"


@dataclass
class NetworkedCluster:
    """A daemon, and the machine whose network is disturbed; the other one is never."""

    daemon: Daemon
    far: Machine

    @property
    def far_tokens(self) -> float:
        """How many tokens were generated there."""
        return self.daemon.metric("node_generated_tokens_total", node=FAR)

    @property
    def losses(self) -> float:
        """How many engines there were started again."""
        return self.daemon.metric("node_engine_restarts_total", node=FAR)

    async def run_turns(self, client: SocketClient, disturb: Callable[[], None]) -> None:
        """Disturb four turns in the middle of their answers, and check their texts."""
        await until_ready(self.daemon)
        before = self.far_tokens
        prompts = await begin(client, 4)
        disturb()
        await check_texts(client, prompts)
        assert self.far_tokens > before, "turns were on the machine"
        await close(client, prompts)

    async def check_return(self, client: SocketClient) -> None:
        """Wait until the machine is back, and check that later turns use it."""
        await until_ready(self.daemon)
        await check_use(self.daemon, client, FAR)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetworkedCluster]:
    """A daemon with a replica on each machine."""
    folder = tmp_path_factory.mktemp("network")
    with ExitStack() as held:
        near, far = (held.enter_context(open_machine(AGENT)) for _ in range(2))
        path = folder / "daemon.toml"
        path.write_text(
            f'[cluster]\naddress = "{far.front_address}:1"\nport = {free_port()}\nfiles_port = 0\n'
            f'[models.twin]\nslots = 2\nnodes = ["{NEAR}", "{FAR}"]\n'
        )
        settings = {
            "program": "tests.cluster.agent_daemon",
            "INFERENCECENTER_CONFIG": str(path),
            "INFERENCECENTER_ENGINE__BACKEND": "echo",
            "INFERENCECENTER_ENGINE__ECHO_DELAY_MS": "5",
            "INFERENCECENTER_MODEL__NAME": "twin",
            "INFERENCECENTER_ENGINE__RESTART_BACKOFF_MIN_S": "0.1",
            "INFERENCECENTER_ENGINE__RESTART_BACKOFF_MAX_S": "0.5",
            NODES_VARIABLE: json.dumps({NEAR: near.address, FAR: far.address}),
        }
        daemon = held.enter_context(run_daemon(folder / "state", None, **settings))
        yield NetworkedCluster(daemon, far)
        far.wire.mend()


def cut(machine: Machine) -> None:
    """Drop all packets."""
    machine.wire.cut()


def cut_to_machine(machine: Machine) -> None:
    """Drop what the daemon sends; it hears the machine's heartbeats."""
    machine.wire.cut(to_here=False)


def cut_to_daemon(machine: Machine) -> None:
    """Drop what the machine sends; it hears the daemon's heartbeats."""
    machine.wire.cut(to_there=False)


def mend(machine: Machine) -> None:
    """Carry packets again."""
    machine.wire.mend()


@pytest.mark.parametrize(
    ("disturb", "restore"),
    [
        (cut, mend),
        (cut_to_machine, mend),
        (cut_to_daemon, mend),
        (Machine.unplug, Machine.plug_in),
    ],
    ids=["partition", "nothing-arrives-there", "nothing-arrives-here", "unplugged"],
)
async def test_lost_machine_costs_no_text(
    cluster: NetworkedCluster, disturb: Callable[[Machine], None], restore: Callable[[Machine], None]
) -> None:
    """Its turns continue on the other machine while it is lost."""
    async with connect_client(cluster.daemon) as client:
        before = cluster.losses
        try:
            await cluster.run_turns(client, lambda: disturb(cluster.far))
        finally:
            restore(cluster.far)
        await cluster.check_return(client)
        assert cluster.losses > before


async def test_reset_connections_cost_no_text(cluster: NetworkedCluster) -> None:
    """Both ends are told; turns continue at once, and the engine with its KV is used again."""
    async with connect_client(cluster.daemon) as client:
        before = processes(cluster.far.pid)
        await cluster.run_turns(client, cluster.far.reset_connections)
        await cluster.check_return(client)
        assert processes(cluster.far.pid) == before


async def test_slow_network_loses_no_engine(cluster: NetworkedCluster) -> None:
    """Packets that take long in both directions are no loss."""
    async with connect_client(cluster.daemon) as client:
        before = cluster.losses
        try:
            await cluster.run_turns(client, lambda: cluster.far.wire.delay(0.5))
            await cluster.check_return(client)
        finally:
            cluster.far.wire.mend()
        assert cluster.losses == before


async def test_short_silence_loses_no_engine(cluster: NetworkedCluster) -> None:
    """TCP sends again what was dropped, and the heartbeats arrive in time."""
    async with connect_client(cluster.daemon) as client:
        before = cluster.losses

        def cut_for_a_moment() -> None:
            cluster.far.wire.cut()
            asyncio.get_running_loop().call_later(0.5, cluster.far.wire.mend)

        await cluster.run_turns(client, cut_for_a_moment)
        assert cluster.losses == before


@pytest.mark.usefixtures("stopped")
async def test_orphan_of_a_partition_ends_itself(tmp_path: Path) -> None:
    """After ``orphan_s`` without the front host and engine end, though no connection was reset."""
    with open_machine() as machine:
        address = (machine.front_address, free_port())
        starter = LocalStarter(tmp_path / "node", module=HOST, address=address, within=machine.command)
        front = await Front.open(tmp_path, starter=starter, host=address[0], port=address[1], orphan_s=5.0)
        try:
            watched = ObservedSupervisor(launcher=front.launcher)
            watched.supervisor.start()
            await watched.until(EngineState.READY)
            host, engine = processes(starter.hosts[0].pid)
            machine.wire.cut()
            await asyncio.to_thread(starter.hosts[0].wait, TIMEOUT_S)
            assert processes(host) == processes(engine) == []
            await watched.supervisor.stop()
        finally:
            starter.clean_up()
            front.files.close()
            await front.listener.close()


@pytest.mark.timeout(300)
async def test_node_of_ray_returns_after_a_partition(tmp_path: Path) -> None:
    """Its turns continue on the daemon's machine, and Ray starts its next engine when the network is back."""
    with ExitStack() as held:
        machine = held.enter_context(open_machine())
        cluster = Cluster(tmp_path, f"{machine.front_address}:{free_port()}")
        held.callback(cluster.kill)
        cluster.add("one")
        cluster.add("two", within=machine.command)
        daemon = held.enter_context(run_daemon(tmp_path / "state", None, **cluster.daemon_settings("local", "two")))
        async with connect_client(daemon) as client:
            await until_ready(daemon)
            prompts = await begin(client, 4)
            machine.wire.cut()
            await check_texts(client, prompts)
            machine.wire.mend()
            assert daemon.metric("node_engine_restarts_total", node="two") > 0
            await until_ready(daemon)
            await check_use(daemon, client, "two")

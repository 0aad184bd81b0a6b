"""Engines that use RPC servers of nodes: how their starts and exits depend on these."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from inferencecenter.cluster.certificates import ClusterCertificates
from inferencecenter.cluster.rpc_launcher import RpcLauncher, RpcLink, RpcNode, RpcTunnels
from inferencecenter.cluster.rpc_tunnel import HostLost
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.port import EngineState
from inferencecenter.ipc.rpc_tunnel import RpcServerEnded
from inferencecenter.supervisor.process import LocalLauncher, NodeUnreachableError
from inferencecenter.supervisor.rpc_nodes import FORGET_S, RpcNodes
from tests.cluster import stub_rpc_server
from tests.cluster.harness import LocalStarter
from tests.ports import free_port
from tests.supervisor.harness import TIMEOUT_S, ObservedSupervisor, end_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping
    from pathlib import Path

    from inferencecenter.ipc.engine_options import EngineOptions
    from inferencecenter.supervisor.remote import HostStarter

pytestmark = pytest.mark.usefixtures("stub", "stopped")
LONG = "a long answer " * 20
CRASHED = HostLost("m", "", RpcServerEnded(detail="the RPC server was killed by SIGABRT"))
KILLED = HostLost("m", "", RpcServerEnded(detail="the RPC server was killed by SIGKILL", from_outside=True))
VANISHED = HostLost("m", "no heartbeat for 3 s")


@dataclass
class FakeTunnels:
    """Opens links that a test breaks; nodes that are away have none."""

    away: set[str] = field(default_factory=set)
    links: list[RpcLink] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    probed: list[str] = field(default_factory=list)
    opened: asyncio.Event = field(default_factory=asyncio.Event)

    async def open(self, name: str, node: str, starter: HostStarter) -> RpcLink:
        """Return a link."""
        if name == f"m/probe/rpc/{node}":
            self.probed.append(node)
        else:
            assert name == f"m/rpc/{node}"
        if node in self.away:
            raise NodeUnreachableError("it has not joined")
        link = RpcLink(node, close=lambda: self.closed.append(node))
        link.address.set_result(f"127.0.0.1:{len(self.links)}")
        self.links.append(link)
        self.opened.set()
        return link


@dataclass
class FakePlanner:
    """Records for which servers it plans."""

    fits_host: bool = True
    refusal: str = ""
    servers: list[dict[str, str]] = field(default_factory=list)

    def at_launch(self, options: EngineOptions, servers: Mapping[str, str]) -> EngineOptions:
        """Return the options."""
        self.servers.append(dict(servers))
        if self.refusal:
            raise InferenceCenterError(ErrorCode.INVALID_CONFIG, self.refusal)
        return options


@dataclass
class Bench:
    """A supervisor that uses the nodes ``a`` and ``b``."""

    tunnels: FakeTunnels = field(default_factory=FakeTunnels)
    planner: FakePlanner = field(default_factory=FakePlanner)
    drained: set[str] = field(default_factory=set)
    now_s: float = 0.0

    def start(self, **options: object) -> ObservedSupervisor:
        """Return a started supervisor."""
        nodes = [RpcNode(name, LocalStarter(None)) for name in ("a", "b")]  # type: ignore[arg-type]
        launcher = RpcLauncher(
            "m",
            nodes,
            tunnels=self.tunnels,  # type: ignore[arg-type]
            planner=self.planner,  # type: ignore[arg-type]
            local=LocalLauncher(),
            is_drained=lambda name: name in self.drained,
        )
        watched = ObservedSupervisor(launcher=launcher, **options)  # type: ignore[arg-type]
        self.nodes = RpcNodes(watched.supervisor, launcher, monotonic=lambda: self.now_s)
        watched.supervisor.start()
        return watched

    @property
    def states(self) -> dict[str, str]:
        """The states of the RPC servers by node, with the details of those that are missing."""
        return {each.node: " ".join(filter(None, (each.state, each.detail))) for each in self.nodes.statuses}


async def test_engine_is_planned_for_the_servers_that_end_with_it() -> None:
    """In the order of the nodes."""
    bench = Bench()
    watched = bench.start()
    await watched.until(EngineState.READY)
    assert bench.planner.servers == [{"a": "127.0.0.1:0", "b": "127.0.0.1:1"}]
    await end_of(watched.submit("t", "count 3"))
    assert bench.tunnels.closed == []
    await watched.supervisor.stop()
    assert sorted(bench.tunnels.closed) == ["a", "b"]


@pytest.mark.parametrize(
    ("lost", "detail"),
    [
        (CRASHED, "on b: the RPC server was killed by SIGABRT"),
        (KILLED, "on b: the RPC server was killed by SIGKILL"),
        (VANISHED, "the RPC server on b was lost: no heartbeat for 3 s"),
    ],
)
async def test_lost_server_is_a_lost_engine(lost: HostLost, detail: str) -> None:
    """Its turn continues on the next engine, which has new servers; the exit names the node and the cause."""
    bench = Bench()
    watched = bench.start(echo_delay_ms=2)
    await watched.until(EngineState.READY)
    turn = watched.submit("t", LONG)
    await asyncio.wait_for(turn.spoke.wait(), TIMEOUT_S)
    with capture_logs() as logs:
        bench.tunnels.links[1].lost.set_result(lost)
        await end_of(turn)
    assert (turn.text, turn.interruptions, turn.submissions) == (LONG, 1, 2)
    assert [line["detail"] for line in logs if line["event"] == "engine_restarts"] == [detail]
    assert sorted(bench.tunnels.closed) == ["a", "b"]
    assert len(bench.tunnels.links) == 4


async def test_lost_nodes_do_not_use_up_the_restarts() -> None:
    """A crash of a server does: it may be the model's doing."""
    bench = Bench()
    watched = bench.start(max_restarts=1)
    for lost in (VANISHED, VANISHED, CRASHED):
        await watched.until(EngineState.READY)
        bench.tunnels.links[-1].lost.set_result(lost)
    await watched.until(EngineState.READY)
    bench.tunnels.links[-1].lost.set_result(CRASHED)
    await watched.until(EngineState.FAILED)
    assert watched.supervisor.given_up


async def test_engine_that_dies_alone_keeps_its_own_reason() -> None:
    """No server was lost."""
    watched = Bench().start()
    await watched.until(EngineState.READY)
    watched.kill()
    await watched.until(EngineState.BACKOFF)
    assert "the engine was killed by SIGKILL" in watched.supervisor.status.detail


async def test_missing_node_is_done_without_where_the_model_fits() -> None:
    """The engine runs on what remains."""
    bench = Bench(FakeTunnels(away={"a"}))
    watched = bench.start()
    await watched.until(EngineState.READY)
    assert bench.planner.servers == [{"b": "127.0.0.1:0"}]
    bench = Bench(FakeTunnels(away={"a", "b"}))
    watched = bench.start()
    await watched.until(EngineState.READY)
    assert bench.planner.servers == [{}]
    await end_of(watched.submit("t", "count 3"))


async def test_missing_node_is_waited_for_where_the_model_does_not_fit() -> None:
    """The state says for what, the other server ends, and the node's return is used."""
    bench = Bench(FakeTunnels(away={"a"}), FakePlanner(fits_host=False))
    watched = bench.start(max_restarts=1)
    turn = watched.submit("t", "count 3")
    for _ in range(3):
        await watched.until(EngineState.BACKOFF)
    assert watched.supervisor.status.detail == (
        "the engine cannot be started: the node a has no RPC server: it has not joined; "
        "the model does not fit without it"
    )
    assert set(bench.tunnels.closed) == {"b"}
    bench.tunnels.away.clear()
    await end_of(turn)
    assert list(bench.planner.servers[-1]) == ["a", "b"]


async def test_configured_device_of_a_missing_node_is_waited_for() -> None:
    """The plan's refusal is no internal error."""
    bench = Bench(FakeTunnels(away={"a"}), FakePlanner(refusal="There is no GPU RPC0[a]."))
    watched = bench.start()
    await watched.until(EngineState.BACKOFF)
    assert "There is no GPU RPC0[a].; the node a has no RPC server" in watched.supervisor.status.detail


# Nodes that are drained, and nodes that are back.


async def test_drained_node_is_left_between_turns() -> None:
    """The running turn ends first; one that arrives meanwhile runs on the next engine, which is planned without it."""
    bench = Bench()
    watched = bench.start(echo_delay_ms=2)
    await watched.until(EngineState.READY)
    assert bench.states == {"a": "ready", "b": "ready"}
    running = watched.submit("t", LONG)
    await asyncio.wait_for(running.spoke.wait(), TIMEOUT_S)
    bench.drained.add("a")
    async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as group:
        group.create_task(bench.nodes.drain("a"))
        await asyncio.sleep(0)
        late = watched.submit("u", "count 3")
    assert (running.text, running.interruptions, running.submissions) == (LONG, 0, 1)
    await end_of(late)
    assert bench.planner.servers[-1].keys() == {"b"}
    assert bench.states == {"a": "missing it is drained", "b": "ready"}


async def test_drain_interrupts_turns_that_take_too_long() -> None:
    """They continue on the next engine at the exact character."""
    bench = Bench()
    watched = bench.start(echo_delay_ms=2, swap_patience_s=0.0)
    await watched.until(EngineState.READY)
    turn = watched.submit("t", LONG)
    await asyncio.wait_for(turn.spoke.wait(), TIMEOUT_S)
    bench.drained.add("a")
    await asyncio.wait_for(bench.nodes.drain("a"), TIMEOUT_S)
    await end_of(turn)
    assert (turn.text, turn.submissions) == (LONG, 2)


async def test_node_that_is_drained_while_the_engine_loads_is_left() -> None:
    """Also an engine that was launched before the node was drained."""
    bench = Bench()
    watched = bench.start()
    await asyncio.wait_for(bench.tunnels.opened.wait(), TIMEOUT_S)
    bench.drained.add("a")
    await asyncio.wait_for(bench.nodes.drain("a"), TIMEOUT_S)
    await watched.until(EngineState.READY)
    await watched.until(EngineState.READY)
    assert bench.states == {"a": "missing it is drained", "b": "ready"}


async def test_drained_node_without_which_the_model_does_not_fit_is_waited_for() -> None:
    """The turns wait, the state says for what, and continue once it is not drained any more."""
    bench = Bench(planner=FakePlanner(fits_host=False))
    watched = bench.start()
    await watched.until(EngineState.READY)
    bench.drained.add("a")
    await asyncio.wait_for(bench.nodes.drain("a"), TIMEOUT_S)
    turn = watched.submit("t", "count 3")
    await watched.until(EngineState.BACKOFF)
    assert watched.supervisor.status.detail == (
        "the engine cannot be started: the node a is drained; the model does not fit without it"
    )
    assert bench.states == {"a": "missing it is drained", "b": "stopped"}
    bench.drained.clear()
    await end_of(turn)


async def test_drain_of_an_engine_that_sleeps_or_is_lost_does_not_wait() -> None:
    """There is nothing to end, and the next start knows it."""
    bench = Bench()
    watched = bench.start()
    await watched.until(EngineState.READY)
    await watched.supervisor.evict()
    assert bench.states == {"a": "stopped", "b": "stopped"}
    bench.drained.add("a")
    await asyncio.wait_for(bench.nodes.drain("a"), TIMEOUT_S)
    assert watched.supervisor.status.state is EngineState.ASLEEP
    assert len(bench.planner.servers) == 1


async def test_node_that_is_back_is_used_when_there_are_no_turns() -> None:
    """It is probed first; one that has not joined, or is not missing, is not."""
    bench = Bench(FakeTunnels(away={"a"}))
    watched = bench.start(echo_delay_ms=2)
    await watched.until(EngineState.READY)
    assert bench.states == {"a": "missing it has no RPC server: it has not joined", "b": "ready"}
    bench.tunnels.away.clear()
    await bench.nodes.rejoin({"b"})
    turn = watched.submit("t", LONG)
    await bench.nodes.rejoin({"a", "b"})
    assert bench.tunnels.probed == []
    await end_of(turn)
    await bench.nodes.rejoin({"a", "b"})
    await watched.until(EngineState.READY)
    assert bench.tunnels.probed == ["a"]
    assert bench.states == {"a": "ready", "b": "ready"}
    assert len(bench.planner.servers) == 2


async def test_attempts_to_use_a_node_again_back_off() -> None:
    """The engine is not ended for a node that runs no server, and not for one that comes and goes all the time."""
    bench = Bench(FakeTunnels(away={"a"}))
    watched = bench.start()
    await watched.until(EngineState.READY)
    tried_s = []
    while bench.now_s < 2 * FORGET_S:
        before = len(bench.planner.servers), watched.supervisor.status.pid
        await bench.nodes.rejoin({"a"})
        assert before == (len(bench.planner.servers), watched.supervisor.status.pid)
        if bench.tunnels.probed:
            bench.tunnels.probed.clear()
            tried_s.append(bench.now_s)
        bench.now_s += 5
    assert tried_s == [0, 30, 90, 210, 450, 930, 1890, 3690, 5490]
    bench.tunnels.away.clear()
    bench.now_s += FORGET_S
    await bench.nodes.rejoin({"a"})
    assert bench.tunnels.probed == ["a"]
    await watched.until(EngineState.READY)
    bench.tunnels.away.add("a")
    bench.tunnels.links[-2].lost.set_result(VANISHED)
    await watched.until(EngineState.READY)
    await bench.nodes.rejoin({"a"})
    assert bench.tunnels.probed == ["a"]
    bench.nodes.undrain()
    await bench.nodes.rejoin({"a"})
    assert bench.tunnels.probed == ["a", "a"]


# Real processes: of the tunnels, of the host, and of a server that returns what it gets.


@pytest.fixture
async def tunnels(tmp_path: Path) -> AsyncIterator[RpcTunnels]:
    """Tunnels on a free port."""
    certificates = ClusterCertificates(tmp_path / "cluster")
    tunnels = RpcTunnels(certificates, listen="127.0.0.1", port=0, lost_after_s=3.0)
    yield tunnels
    await tunnels.close()


@pytest.fixture
def starter(tmp_path: Path) -> Iterator[LocalStarter]:
    """Starts hosts whose servers are stubs."""
    starter = LocalStarter(tmp_path, module="tests.cluster.stub_rpc_host")
    yield starter
    starter.clean_up()


async def say(link: RpcLink, text: bytes) -> bytes:
    """Send the server a text, and return what it answers until it closes the connection or has returned as much."""
    host, port = link.address.result().split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(text)
    try:
        return await asyncio.wait_for(reader.readexactly(len(text)), TIMEOUT_S)
    except asyncio.IncompleteReadError as error:
        return error.partial
    finally:
        writer.close()


@pytest.mark.slow
async def test_tunnel_of_processes(tunnels: RpcTunnels, starter: LocalStarter) -> None:
    """Opened, used, closed: then the host ends with its server. The next one has another port."""
    link = await tunnels.open("m", "a", starter)
    assert await say(link, b"hello") == b"hello"
    link.close()
    await starter.ended()
    link = await tunnels.open("m", "a", starter)
    assert await say(link, b"hello") == b"hello"
    assert await say(link, b"abort") == b""
    lost = await asyncio.wait_for(link.lost, TIMEOUT_S)
    assert lost.server == RpcServerEnded(detail="the RPC server was killed by SIGABRT: the stub aborts")
    await starter.ended()


@pytest.mark.slow
async def test_server_that_does_not_start(
    tunnels: RpcTunnels, starter: LocalStarter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is its last line, as of a llama.cpp without RPC."""
    monkeypatch.setenv(stub_rpc_server.REFUSES, "1")
    with pytest.raises(NodeUnreachableError, match="the RPC server ended with status 1: it was built without RPC"):
        await tunnels.open("m", "a", starter)
    await starter.ended()


@pytest.mark.slow
async def test_lost_process_of_tunnels_is_replaced(tunnels: RpcTunnels, starter: LocalStarter) -> None:
    """All of its links are lost, and the next one starts another process."""
    link = await tunnels.open("m", "a", starter)
    assert tunnels._process is not None
    tunnels._process.kill()
    lost = await asyncio.wait_for(link.lost, TIMEOUT_S)
    assert lost.reason == "the process of the tunnels has ended"
    await starter.ended()
    assert await say(await tunnels.open("m", "a", starter), b"hello") == b"hello"


@pytest.mark.slow
async def test_port_that_is_taken(tmp_path: Path, starter: LocalStarter) -> None:
    """The error names the setting."""
    port = free_port()
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", port)
    async with server:
        tunnels = RpcTunnels(ClusterCertificates(tmp_path / "c"), listen="127.0.0.1", port=port, lost_after_s=3.0)
        with pytest.raises(NodeUnreachableError, match=r"cluster\.rpc_port: .*in use"):
            await tunnels.open("m", "a", starter)

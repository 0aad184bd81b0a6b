"""What the table of machines says of each."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import pytest

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.hardware.nvml import GpuReading, Gpus
from inferencecenter.ipc.link import NodeGpu, NodeResources
from inferencecenter.ipc.messages import ContextFull, Failed, Finished, Started, StepOutput, TokenDelta, TraceStage
from inferencecenter.ipc.port import EngineState, EngineStatus
from inferencecenter.supervisor.nodes import (
    HostLink,
    JoinedNode,
    LinkTraffic,
    NodeEngine,
    NodeTable,
    machine_resources,
)
from inferencecenter.supervisor.remote import ClockTranslation
from inferencecenter.supervisor.rpc_nodes import RpcServerStatus
from tests.supervisor.test_step_metrics import FINISHED

if TYPE_CHECKING:
    from inferencecenter.ipc.messages import TurnEvent

if TYPE_CHECKING:
    from pathlib import Path

READY = EngineStatus(state=EngineState.READY)
RESOURCES = NodeResources(ram_used_bytes=1, ram_total_bytes=2, gpus=(NodeGpu("gpu", 3, 4),))


def engine(node: str, replica: int = 0, link: HostLink | None = None) -> NodeEngine:
    """Return an engine with the KV of three sessions."""
    return NodeEngine(node=node, model="m", replica=replica, status=READY, sessions=3, link=link)


def test_nodes_are_those_joined_and_those_of_models() -> None:
    """This machine is the first, and the others are in the order of their names."""
    table = NodeTable()
    table.update({"box2": JoinedNode("10.0.0.2", alive=True), "box1": JoinedNode("10.0.0.1", alive=False)})
    statuses = table.statuses([engine("box3"), engine("local", 1), engine("box2", 2)])
    assert [(each.name, each.address, each.state, each.sessions) for each in statuses] == [
        ("local", None, "up", 3),
        ("box1", "10.0.0.1", "down", 0),
        ("box2", "10.0.0.2", "up", 3),
        ("box3", None, "down", 3),
    ]


def test_connected_engine_tells_of_its_node() -> None:
    """The latest heartbeat counts, and a node whose engine is connected is up, whatever the cluster answers."""
    table = NodeTable()
    links = (HostLink(2.0, "1.0", RESOURCES), HostLink(0.5, "1.0", None))
    _, box = table.statuses([engine("box", each, link) for each, link in enumerate(links)])
    assert (box.state, box.beat_age_s, box.version, box.resources) == ("up", 0.5, "1.0", RESOURCES)


def test_rpc_servers_make_their_machines_known() -> None:
    """One that an engine uses shows that its node is there."""
    table = NodeTable()
    table.update({})
    servers = [RpcServerStatus(node="box", model="m", state="ready"), RpcServerStatus(node="away", model="m")]
    _, away, box = table.statuses([], servers)
    assert [(each.name, each.state, each.rpc_servers) for each in (away, box)] == [
        ("away", "down", (servers[1],)),
        ("box", "up", (servers[0],)),
    ]


def test_drain_names_what_it_waits_for() -> None:
    """Turns of engines there, and of those that use its devices; nothing before the drain and after it."""
    table = NodeTable()
    busy = replace(engine("box"), status=replace(READY, running=2))
    servers = [
        RpcServerStatus(node="box", model="large", state="ready", running=1),
        RpcServerStatus(node="box", model="other", state="starting"),
        RpcServerStatus(node="box", model="idle", state="ready"),
    ]
    assert table.statuses([busy], servers)[1].drain_waits_for == ()
    table.drain("box")
    assert table.statuses([busy], servers)[1].drain_waits_for == (
        "2 running turns of m",
        "1 running turn of large",
        "the engine of other, which loads",
    )
    table.finish_drain("box")
    assert table.statuses([busy], servers)[1].drain_waits_for == ()


def test_unreachable_cluster_says_nothing_about_nodes() -> None:
    """What was read before is shown, with an unknown state."""
    table = NodeTable()
    assert [each.state for each in table.statuses([engine("box")])] == ["up", "unknown"]
    table.update({"box": JoinedNode("10.0.0.2", alive=True)})
    table.update(None)
    _, box = table.statuses([])
    assert (box.address, box.state) == ("10.0.0.2", "unknown")


def test_traffic_of_a_node_is_that_of_its_engines() -> None:
    """A lost connection counts on."""
    engines = [replace(engine("box", each), traffic=LinkTraffic(1, 20, 1)) for each in range(2)]
    _, box = NodeTable().statuses(engines)
    assert box.traffic == LinkTraffic(2, 40, 2)
    assert LinkTraffic() + LinkTraffic(1, 2, 3) == LinkTraffic(1, 2, 3)


def test_stages_get_times_of_this_machine() -> None:
    """The least difference of the latest heartbeats counts: others were sent earlier than it seems."""
    clock = ClockTranslation()
    stages = (TraceStage("queue", 1000.0, 1001.5), TraceStage("prefill", 1001.5, 1002.0, 7))
    finished = msgspec.structs.replace(FINISHED, turn_id="t", stages=stages)
    delta = TokenDelta("t", b"", "x")
    plain = step(delta)
    assert clock.translate(plain) is plain
    for late_s in (0.5, 0.25, 2.0):
        clock.update(here_s=100.0 + late_s, there_s=1000.0)
    for event in (
        Started("t", b"", 0, stages),
        finished,
        Failed(turn_id="t", code="internal", message="", stages=stages),
        ContextFull(turn_id="t", n_tokens=9, end=finished),
    ):
        same, moved = clock.translate(step(delta, event)).events
        assert same == delta
        moved = moved.end or moved if isinstance(moved, ContextFull) else moved
        assert isinstance(moved, Started | Finished | Failed)
        assert [(each.began_s, each.ended_s, each.tokens) for each in moved.stages] == [
            (100.25, 101.75, 0),
            (101.75, 102.25, 7),
        ]


def test_old_heartbeats_are_dropped() -> None:
    """Clocks drift apart, so that a small difference of long ago means nothing."""
    clock = ClockTranslation()
    clock.update(here_s=0.0, there_s=0.0)
    for second in range(100):
        clock.update(here_s=second + 1.0, there_s=second)
    (event,) = clock.translate(step(Started("t", b"", 0, (TraceStage("queue", 5.0, 6.0),)))).events
    assert isinstance(event, Started)
    assert event.stages[0].began_s == 6.0


def test_gpus_of_this_machine_are_read() -> None:
    """What NVML does not report is unknown."""
    reading = GpuReading(name="GTX", vram_used_bytes=1, vram_total_bytes=2, temperature_c=60.0)
    found = machine_resources(Gpus((reading, GpuReading())))
    assert found.gpus == (NodeGpu("GTX", 1, 2, None, 60.0), NodeGpu("", 0, 0))
    assert found.ram_total_bytes


def step(*events: TurnEvent) -> StepOutput:
    """Return a step with these events."""
    return StepOutput(events, running=1, waiting=0, rss_bytes=1)


def test_drained_nodes_are_remembered(tmp_path: Path) -> None:
    """By the next daemon, for which the drain has ended; a file that cannot be read drains none."""
    path = tmp_path / "drained.json"
    table = NodeTable(path)
    table.drain("box")
    assert [each.drain for each in table.statuses([])] == ["none", "draining"]
    table.finish_drain("box")
    assert [each.drain for each in table.statuses([])] == ["none", "drained"]
    again = NodeTable(path)
    assert again.is_drained("box")
    again.undrain("box")
    assert not NodeTable(path).is_drained("box")
    path.write_text("{")
    assert not NodeTable(path).is_drained("box")


def test_drain_that_cannot_be_stored_is_refused(tmp_path: Path) -> None:
    """The next daemon would use the node."""
    table = NodeTable(tmp_path / "missing" / "drained.json")
    with pytest.raises(InferenceCenterError) as refusal:
        table.drain("box")
    assert refusal.value.code is ErrorCode.STORAGE_UNAVAILABLE
    assert not table.is_drained("box")


def test_joined_nodes_are_told(tmp_path: Path) -> None:
    """Those that are alive, without the daemon's own; an unreachable cluster changes nothing."""
    table, seen = NodeTable(tmp_path / "drained.json"), []
    table.subscribe(lambda: seen.append(table.joined))
    table.update(
        {
            "front": JoinedNode("10.0.0.1", alive=True, own=True),
            "box2": JoinedNode("10.0.0.2", alive=True),
            "box3": JoinedNode("10.0.0.3", alive=False),
        }
    )
    table.update(None)
    assert seen == [{"box2"}]

"""What the table of machines says of each."""

from __future__ import annotations

from inferencecenter.ipc.link import NodeGpu, NodeResources
from inferencecenter.ipc.port import EngineState, EngineStatus
from inferencecenter.supervisor.nodes import HostLink, JoinedNode, NodeEngine, NodeTable

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


def test_unreachable_cluster_says_nothing_about_nodes() -> None:
    """What was read before is shown, with an unknown state."""
    table = NodeTable()
    assert [each.state for each in table.statuses([engine("box")])] == ["up", "unknown"]
    table.update({"box": JoinedNode("10.0.0.2", alive=True)})
    table.update(None)
    _, box = table.statuses([])
    assert (box.address, box.state) == ("10.0.0.2", "unknown")

"""Metrics of machines: what is shown of engines here and elsewhere, and what is left out."""

from __future__ import annotations

from dataclasses import replace

from inferencecenter.hardware.nvml import GpuReading, Gpus
from inferencecenter.ipc.link import NodeGpu, NodeResources
from inferencecenter.ipc.port import EngineState, EngineStatus
from inferencecenter.server.status_pages import show_nodes
from inferencecenter.supervisor.nodes import LinkTraffic, NodeEngine, NodeStatus
from inferencecenter.supervisor.rpc_nodes import RpcServerStatus
from inferencecenter.telemetry.metrics import DaemonMetrics

HERE = EngineStatus(EngineState.READY, node="local", running=2, parked_bytes=7, parked_ram_bytes=3, restarts=1)
THERE = EngineStatus(EngineState.BACKOFF, node="box2", waiting=4, parked_sessions=5, restarts=6)
BOX = NodeStatus(
    name="box2",
    address="10.0.0.2",
    state="up",
    beat_age_s=0.5,
    engines=(
        NodeEngine(node="box2", model="m", replica=1, status=THERE, sessions=9, traffic=LinkTraffic(100, 200, 3)),
    ),
    rpc_servers=(
        RpcServerStatus(node="box2", model="large", state="ready"),
        RpcServerStatus(node="box2", model="other", state="missing"),
    ),
    resources=NodeResources(ram_used_bytes=1, ram_total_bytes=2, gpus=(NodeGpu("GPU", 3, 4, 50.0), NodeGpu("", 5, 6))),
)


def shown(metrics: DaemonMetrics, name: str, **labels: str) -> float | None:
    """Return a sample's value."""
    return metrics.registry.get_sample_value(f"inferencecenter_node_{name}", labels)


def test_engines_are_shown_by_machine() -> None:
    """Replicas on the same machine are added up."""
    metrics = DaemonMetrics()
    status = replace(HERE, replicas=(HERE, HERE, THERE))
    show_nodes(metrics.nodes, {"m": status}, (), Gpus())
    assert shown(metrics, "engines_ready", node="local", model="m") == 2
    assert shown(metrics, "running_turns", node="local", model="m") == 4
    assert shown(metrics, "parked_bytes", node="local", model="m", tier="ram") == 6
    assert shown(metrics, "parked_bytes", node="local", model="m", tier="disk") == 8
    assert shown(metrics, "engine_restarts_total", node="local", model="m") == 2
    assert shown(metrics, "engines_ready", node="box2", model="m") == 0
    assert shown(metrics, "waiting_turns", node="box2", model="m") == 4
    assert shown(metrics, "parked_sessions", node="box2", model="m") == 5
    assert shown(metrics, "engine_restarts_total", node="box2", model="m") == 6


def test_engine_without_replicas_is_local() -> None:
    """Without a cluster there are no states of machines, but this one's memory and GPUs."""
    metrics = DaemonMetrics()
    gpu = GpuReading(vram_used_bytes=1, vram_total_bytes=2, temperature_c=60.0)
    show_nodes(metrics.nodes, {"m": EngineStatus(EngineState.READY)}, (), Gpus((gpu,)))
    assert shown(metrics, "engines_ready", node="local", model="m") == 1
    assert shown(metrics, "state", node="local", state="up") is None
    assert shown(metrics, "gpu_memory_used_bytes", node="local", gpu="0") == 1
    assert shown(metrics, "gpu_temperature_celsius", node="local", gpu="0") == 60
    assert shown(metrics, "gpu_utilization_percent", node="local", gpu="0") is None
    assert shown(metrics, "memory_total_bytes", node="local")


def test_machines_of_the_cluster() -> None:
    """State, heartbeat, connections, memory and GPUs; a figure that is unknown is absent."""
    metrics = DaemonMetrics()
    local = NodeStatus(name="local", address=None, state="up")
    show_nodes(metrics.nodes, {}, (local, BOX), Gpus())
    assert shown(metrics, "state", node="box2", state="up") == 1
    assert shown(metrics, "state", node="box2", state="down") == 0
    assert shown(metrics, "drain", node="local", state="none") == 1
    assert shown(metrics, "sessions", node="box2") == 9
    assert shown(metrics, "rpc_servers_used", node="box2", model="large") == 1
    assert shown(metrics, "rpc_servers_used", node="box2", model="other") == 0
    assert shown(metrics, "heartbeat_age_seconds", node="box2") == 0.5
    assert shown(metrics, "heartbeat_age_seconds", node="local") is None
    assert shown(metrics, "link_sent_bytes_total", node="box2") == 100
    assert shown(metrics, "link_received_bytes_total", node="box2") == 200
    assert shown(metrics, "link_reconnects_total", node="box2") == 3
    assert shown(metrics, "memory_used_bytes", node="box2") == 1
    assert shown(metrics, "gpu_memory_total_bytes", node="box2", gpu="1") == 6
    assert shown(metrics, "gpu_utilization_percent", node="box2", gpu="0") == 50
    assert shown(metrics, "gpu_utilization_percent", node="box2", gpu="1") is None
    show_nodes(metrics.nodes, {}, (local,), Gpus())
    assert shown(metrics, "state", node="box2", state="up") is None
    assert shown(metrics, "memory_used_bytes", node="box2") is None
    assert shown(metrics, "link_sent_bytes_total", node="box2") == 100, "a counter never falls"

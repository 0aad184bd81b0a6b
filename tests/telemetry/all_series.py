"""A metrics page with every series that a daemon can show."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, get_args

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from inferencecenter.core.errors import ErrorCode
from inferencecenter.hardware.nvml import SLOWDOWN_NAMES, GpuReading, Gpus
from inferencecenter.hardware.pressure import PressureState
from inferencecenter.hardware.thermal import ThermalState
from inferencecenter.ipc.messages import StepOutput, StepStats, TokenDelta, pack_tokens
from inferencecenter.ipc.port import EngineState, EngineStatus
from inferencecenter.protocol.values import FinishReason, TurnStats
from inferencecenter.server.status_pages import show_engines, show_gpus, show_nodes, show_processes
from inferencecenter.sessions.observability import TurnRecord
from inferencecenter.supervisor.nodes import NodeStatus
from inferencecenter.supervisor.step_metrics import StepMeter
from inferencecenter.telemetry.metrics import DaemonMetrics
from tests.supervisor.stub_engine import MODEL

if TYPE_CHECKING:
    from collections.abc import Iterator

GPU = GpuReading(
    name="Stub",
    uuid="GPU-0",
    index=0,
    temperature_c=60.0,
    vram_total_bytes=6,
    vram_used_bytes=2,
    power_watts=90.0,
    power_limit_watts=120.0,
    fan_percent=40.0,
    utilization_percent=70.0,
    sm_clock_mhz=1500,
    slowdowns=SLOWDOWN_NAMES,
)

BOX = NodeStatus(name="box2", address="10.0.0.2", state="up", beat_age_s=0.5)

# Name of a sample to its labels, and these to the values that they have.
SeriesByName = dict[str, dict[str, set[str]]]


def busy_metrics() -> DaemonMetrics:
    """Return metrics of a daemon in which every event has occurred."""
    metrics = DaemonMetrics()
    engines = {MODEL.name: EngineStatus(EngineState.READY, model=MODEL, pid=os.getpid())}
    show_engines(metrics.engines, engines)
    show_processes(metrics.machine, engines)
    show_gpus(metrics.machine, Gpus((GPU,), driver_version="580.1"))
    show_nodes(metrics.nodes, engines, (BOX,), Gpus((GPU,)))
    metrics.set_thermal("cool", states=ThermalState)
    metrics.set_memory("easy", used_bytes=1, limit_bytes=2, states=PressureState)
    metrics.refused_connections.labels("401").inc()
    metrics.foreign_fields.labels("chat", "store").inc()
    for outcome in ("done", "error", "failed", "unknown"):
        metrics.mcp.call_ended("weather", outcome)
    metrics.mcp.call_s.labels("weather").observe(0.1)
    metrics.mcp.listing_failed("weather")
    metrics.mcp.set_up("weather", is_up=True)
    meter = StepMeter(metrics.engines, metrics.nodes, model=MODEL.name)
    for _ in range(2):
        delta = TokenDelta("turn", pack_tokens([1]), "x")
        meter.step(
            StepOutput((delta,), running=1, waiting=0, rss_bytes=1, work=StepStats(0.1, rows=1, prefill_tokens=1))
        )
    meter.step(StepOutput((), running=1, waiting=0, rss_bytes=1, work=StepStats(0.1, texts=2, text_tokens=9)))
    for finish in ("done", "cancelled", *ErrorCode):
        metrics.embedding_ended(model=MODEL.name, client_id="client", finish=finish, n_tokens=9)
    for finish in (*get_args(FinishReason), *ErrorCode):
        metrics.turn_ended(_record(finish))
    return metrics


def samples_of(metrics: DaemonMetrics) -> SeriesByName:
    """Return the page's samples."""
    found: SeriesByName = {}
    for sample in _samples(metrics):
        labels = found.setdefault(sample.name, {})
        for name, value in sample.labels.items():
            labels.setdefault(name, set()).add(value)
    return found


def _samples(metrics: DaemonMetrics) -> Iterator[Any]:
    for family in text_string_to_metric_families(generate_latest(metrics.registry).decode()):
        yield from family.samples


def _record(finish: str) -> TurnRecord:
    return TurnRecord(
        client_id="ada",
        session_id="s",
        turn_id="t",
        model=MODEL.name,
        finish=finish,
        stats=TurnStats(
            queue_ms=1.0,
            ttft_ms=1.0,
            total_ms=1.0,
            prompt_tokens=1,
            cached_tokens=1,
            tokens=1,
            tps=1.0,
            preempted=0,
        ),
    )

"""Metrics of the machines that run engines: the label ``node`` is ``local`` for the daemon's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from inferencecenter.telemetry.instruments import label_text

if TYPE_CHECKING:
    from prometheus_client import Gauge

    from inferencecenter.telemetry.instruments import Count, MetricRegistry


@dataclass(frozen=True, slots=True)
class NodeMeters:
    """The counters of a model's engines on one machine that each step updates."""

    steps: Count
    tokens: Count
    prefill_tokens: Count
    decode_s: Count
    prefill_s: Count


class NodeMetrics:
    """Metrics with the label ``node``.

    Gauges are read when the metrics are scraped; those of machines are absent while they are unknown, and those of the
    cluster for a daemon in none.
    """

    def __init__(self, registry: MetricRegistry) -> None:
        self._registry = registry
        self._gauges: list[Gauge] = []
        self._declare_engines(registry)
        self._declare_machines(registry)

    def _declare_engines(self, registry: MetricRegistry) -> None:
        labels = ("node", "model")
        self.engines_ready = self._gauge(
            "engines_ready", "Engines on a machine that accept turns, including sleeping ones.", *labels
        )
        self.running_turns = self._gauge("running_turns", "Turns with a slot on a machine.", *labels)
        self.waiting_turns = self._gauge("waiting_turns", "Turns that wait for a slot of a machine's engines.", *labels)
        self.parked_sessions = self._gauge("parked_sessions", "Sessions whose KV is parked on a machine.", *labels)
        self.parked_bytes = self._gauge(
            "parked_bytes", "Bytes of KV parked on a machine, by tier: ram or disk.", *labels, "tier"
        )
        self.engine_restarts = registry.counter(
            "node_engine_restarts", "Restarts of engines of a machine after a loss.", *labels
        )
        self.steps = registry.counter("node_steps", "Steps with prefill or decode on a machine.", *labels)
        self.tokens = registry.counter("node_generated_tokens", "Tokens generated on a machine.", *labels)
        self.prefill_tokens = registry.counter("node_prefill_tokens", "Tokens prefilled on a machine.", *labels)
        self.decode_s = registry.counter("node_decode_seconds", "Time spent on decode on a machine.", *labels)
        self.prefill_s = registry.counter("node_prefill_seconds", "Time spent on prefill on a machine.", *labels)

    def _declare_machines(self, registry: MetricRegistry) -> None:
        self.state = self._gauge(
            "state",
            "1 for the current state of a machine of the cluster: up, down, or unknown while the cluster's head does "
            "not answer.",
            "node",
            "state",
        )
        self.drain = self._gauge(
            "drain", "1 for the current state of a machine: none, draining or drained.", "node", "state"
        )
        self.sessions = self._gauge("sessions", "Sessions whose KV is on a machine.", "node")
        self.rpc_servers_used = self._gauge(
            "rpc_servers_used", "1 if a model's engine uses its RPC server on another machine.", "node", "model"
        )
        self.heartbeat_age_s = self._gauge(
            "heartbeat_age_seconds", "Time since the last heartbeat of any engine on another machine.", "node"
        )
        self.link_sent_bytes = registry.counter(
            "node_link_sent_bytes", "Bytes sent to engines on another machine, before encryption.", "node"
        )
        self.link_received_bytes = registry.counter(
            "node_link_received_bytes", "Bytes received from engines on another machine, after decryption.", "node"
        )
        self.link_reconnects = registry.counter(
            "node_link_reconnects", "Connections of engines on another machine that were made again.", "node"
        )
        self.memory_used_bytes = self._gauge("memory_used_bytes", "Main memory of a machine in use.", "node")
        self.memory_total_bytes = self._gauge("memory_total_bytes", "Main memory of a machine.", "node")
        self.gpu_memory_used_bytes = self._gauge(
            "gpu_memory_used_bytes", "Used memory of a machine's GPU, by all processes.", "node", "gpu"
        )
        self.gpu_memory_total_bytes = self._gauge(
            "gpu_memory_total_bytes", "Total memory of a machine's GPU.", "node", "gpu"
        )
        self.gpu_utilization_percent = self._gauge(
            "gpu_utilization_percent", "Share of time in which a machine's GPU was busy.", "node", "gpu"
        )
        self.gpu_temperature_c = self._gauge(
            "gpu_temperature_celsius", "Temperature of a machine's GPU.", "node", "gpu"
        )

    def of(self, node: str, model: str) -> NodeMeters:
        """Return the counters of a model's engines on a machine that each step updates."""
        labels = (label_text(node), label_text(model))
        return NodeMeters(
            steps=self.steps.labels(*labels),
            tokens=self.tokens.labels(*labels),
            prefill_tokens=self.prefill_tokens.labels(*labels),
            decode_s=self.decode_s.labels(*labels),
            prefill_s=self.prefill_s.labels(*labels),
        )

    def clear(self) -> None:
        """Drop the gauges: a machine that has left has no state."""
        for gauge in self._gauges:
            gauge.clear()

    def _gauge(self, name: str, documentation: str, *labels: str) -> Gauge:
        gauge = self._registry.gauge(f"node_{name}", documentation, *labels)
        self._gauges.append(gauge)
        return gauge

"""Every Prometheus metric of the daemon, declared once.

Label values come from closed tables; names of clients are bounded (``instruments.BoundedLabel``).
"""

from __future__ import annotations

import contextlib
import platform
from typing import TYPE_CHECKING, Final, Protocol

from inferencecenter import __version__
from inferencecenter.core.errors import ErrorCode
from inferencecenter.telemetry.engine_metrics import EngineMetrics
from inferencecenter.telemetry.instruments import BoundedLabel, Gauges, MetricRegistry, label_text
from inferencecenter.telemetry.loop_monitor import BOUNDS_S
from inferencecenter.telemetry.node_metrics import NodeMetrics

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client import Gauge

    from inferencecenter.telemetry.instruments import MetricRegistry


# Metrics of the machine: processes, memory and GPUs. All are gauges read at a scrape.


class MachineMetrics:
    """Metrics of the machine. Those of GPUs have the label ``gpu``, NVML's index; unavailable readings are absent."""

    def __init__(self, registry: MetricRegistry) -> None:
        self._declare_processes(registry)
        self._declare_gpus(registry)

    def _declare_processes(self, registry: MetricRegistry) -> None:
        self.process_cpu_s = registry.counter(
            "process_cpu_seconds",
            "CPU time of a process since its start: front, or the engine of a model.",
            "process",
            "model",
        )
        self.process_rss_bytes = registry.gauge(
            "process_resident_memory_bytes", "Resident memory of a process, including mapped files.", "process", "model"
        )
        self.memory_pressure = registry.gauge(
            "memory_pressure",
            "1 for the current memory pressure: easy, shedding (parked KV is evicted) or full.",
            "state",
        )
        self.memory_used_bytes = registry.gauge(
            "memory_used_bytes", "Main memory in use, measured as memory_limit_bytes is."
        )
        self.memory_limit_bytes = registry.gauge(
            "memory_limit_bytes", "Main memory in use above which parked KV is evicted."
        )

    def _declare_gpus(self, registry: MetricRegistry) -> None:
        self._gpu_gauges: list[Gauge] = []

        def gauge(name: str, documentation: str, *labels: str) -> Gauge:
            declared = registry.gauge(f"gpu_{name}", documentation, "gpu", *labels)
            self._gpu_gauges.append(declared)
            return declared

        self.gpu_info = gauge("info", "Always 1 for each GPU; the labels describe it.", "name", "uuid", "driver")
        self.gpu_temperature_c = gauge("temperature_celsius", "Temperature of a GPU.")
        self.gpu_power_watts = gauge("power_watts", "Power draw of a GPU.")
        self.gpu_power_limit_watts = gauge("power_limit_watts", "Power limit of a GPU.")
        self.gpu_fan_percent = gauge("fan_percent", "Fan speed of a GPU.")
        self.gpu_utilization_percent = gauge("utilization_percent", "Share of time in which a GPU was busy.")
        self.gpu_memory_used_bytes = gauge("memory_used_bytes", "Used memory of a GPU, by all processes.")
        self.gpu_memory_total_bytes = gauge("memory_total_bytes", "Total memory of a GPU.")
        self.gpu_sm_clock_mhz = gauge("sm_clock_megahertz", "SM clock of a GPU.")
        self.gpu_slowdown = gauge("slowdown", "1 for each reason for which a GPU is throttled now.", "reason")
        self.thermal_state = registry.gauge(
            "thermal_state", "1 for the current thermal state of the GPUs: cool, warm or hot.", "state"
        )

    def clear_gpus(self) -> None:
        """Drop the readings of GPUs: one that no longer responds has no temperature."""
        for gauge in self._gpu_gauges:
            gauge.clear()

    def clear_processes(self) -> None:
        """Drop the readings of processes: one that has ended uses nothing."""
        self.process_cpu_s.clear()
        self.process_rss_bytes.clear()


# A tool that only computes, up to ``mcp.NAME.timeout_s``.
_TOOL_CALL_BOUNDS_S: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class McpMetrics:
    """Metrics of the declared MCP servers, by name."""

    def __init__(self, registry: MetricRegistry) -> None:
        self._calls = registry.counter(
            "mcp_calls",
            "Ended calls of tools of MCP servers, by outcome: done, error (reported by the tool), failed (the tool did "
            "not run) or unknown (it may have run).",
            "server",
            "outcome",
        )
        self.call_s = registry.histogram(
            "mcp_call_seconds",
            "Duration of calls of tools of MCP servers, without the time in the account's queue.",
            "server",
            bounds=_TOOL_CALL_BOUNDS_S,
        )
        self._listing_failures = registry.counter(
            "mcp_listing_failures", "Lists of tools that an MCP server did not deliver.", "server"
        )
        self._up = registry.gauge(
            "mcp_server_up",
            "1 if the last attempt to connect to an MCP server succeeded, else 0; absent before the first.",
            "server",
        )

    def call_ended(self, server: str, outcome: str) -> None:
        self._calls.labels(server, outcome).inc()

    def listing_failed(self, server: str) -> None:
        self._listing_failures.labels(server).inc()

    def set_up(self, server: str, *, is_up: bool) -> None:
        self._up.labels(server).set(is_up)

    def server_removed(self, server: str) -> None:
        """Drop the state of a server that is no longer declared, or is declared otherwise."""
        with contextlib.suppress(KeyError):
            self._up.remove(server)


MAX_CLIENTS: Final = 50
# From a short prompt after a cached history on a GPU to a long text on two cores behind a queue.
_FIRST_TOKEN_BOUNDS_S: Final = (0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
# A free slot admits a turn within a step; engine.queue_timeout_s ends the longest waits.
_QUEUE_BOUNDS_S: Final = (0.001, 0.01, 0.1, 0.5, 1, 5, 10, 30, 60, 300)


class TurnFigures(Protocol):
    """The figures of a turn."""

    @property
    def queue_ms(self) -> float: ...
    @property
    def ttft_ms(self) -> float: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def preempted(self) -> int: ...


class EndedTurn(Protocol):
    """A turn that ended. ``finish`` is its ``finish_reason``, or the error code of a failed one."""

    @property
    def client_id(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def finish(self) -> str: ...
    @property
    def stats(self) -> TurnFigures: ...


class DaemonMetrics:
    """The daemon's metrics in a registry of their own; two instances share nothing.

    All are updated and exposed on the event loop.
    """

    def __init__(self) -> None:
        self.registry = registry = MetricRegistry()
        self._declare_sockets(registry)
        self._declare_turns(registry)
        self._declare_embeddings(registry)
        self._clients = BoundedLabel(MAX_CLIENTS)
        self.task_failures = registry.counter(
            "task_failures",
            "Unexpected exceptions of background tasks, by part of the daemon; permanent tasks are restarted.",
            "part",
        )
        self.engines = EngineMetrics(registry)
        self.nodes = NodeMetrics(registry)
        self.machine = MachineMetrics(registry)
        self.mcp = McpMetrics(registry)
        self.loop_lag_s = registry.histogram(
            "loop_lag_seconds",
            "Delay of a callback on the front's event loop, measured every 200 ms while clients are connected.",
            bounds=BOUNDS_S,
        ).labels()
        build = registry.gauge("build_info", "Always 1; the labels are the versions.", "version", "python")
        build.labels(__version__, platform.python_version()).set(1)

    def count_fields(self, dialect: str, fields: Iterable[str]) -> None:
        """Count a request with fields that have no effect."""
        for field in fields:
            self.foreign_fields.labels(dialect, field).inc()

    def _declare_sockets(self, registry: MetricRegistry) -> None:
        self.connections = registry.gauge("connections", "Open WebSockets.")
        self.unauthenticated_connections = registry.gauge(
            "unauthenticated_connections",
            "Open WebSockets that have not authenticated; they are counted separately from those of clients.",
        )
        self.evicted_connections = registry.counter(
            "evicted_connections", "Unauthenticated WebSockets that were closed to admit newer ones."
        ).labels()
        self.refused_handshakes = registry.counter(
            "refused_handshakes", "WebSocket upgrades without a credential refused by the rate limit of their address."
        ).labels()
        self.frames_in = registry.counter("frames_in", "WebSocket frames received.").labels()
        self.frames_out = registry.counter("frames_out", "WebSocket frames sent.").labels()
        self.outbox_bytes = Gauges(
            "inferencecenter_outbox_bytes", "Bytes queued for slow readers.", registry=registry
        ).labels()
        self.outbox_overflows = registry.counter(
            "outbox_overflows", "Sockets aborted because they stopped reading."
        ).labels()
        self.errors = registry.counter("errors", "Errors sent to clients, by code of the error table.", "code")
        for code in ErrorCode:
            self.errors.labels(code.value)  # so that the first error counts as an increase
        self.refused_connections = registry.counter(
            "refused_connections",
            "Refused WebSocket upgrades, and connections closed before their request was read, by HTTP status.",
            "status",
        )
        self.http_requests = registry.gauge("http_requests", "HTTP requests of clients in progress.")
        self.http_responses = registry.counter(
            "http_responses", "HTTP responses to clients, by path pattern and status.", "path", "status"
        )
        self.foreign_fields = registry.counter(
            "foreign_fields",
            "Requests with a field that has no effect, by dialect and field; fields in no table are unknown.",
            "dialect",
            "field",
        )
        self.login_failures = registry.counter("login_failures", "Failed authentication attempts.").labels()

    def _declare_turns(self, registry: MetricRegistry) -> None:
        self.sessions = registry.gauge("sessions", "Open sessions.")
        self.archived_sessions = registry.gauge("archived_sessions", "Stored sessions that no memory holds until used.")
        self.session_loads = registry.counter(
            "session_loads", "Archived sessions that were loaded because they were used."
        ).labels()
        self.storage_failing = registry.gauge("storage_failing", "1 while sessions cannot be written to storage.")
        self.records_set_aside = registry.counter(
            "records_set_aside", "Records of sessions that were not written because of a defect; the log names them."
        ).labels()
        self.turns = registry.counter(
            "turns", "Ended turns, by finish_reason, or by code of the error table.", "model", "finish"
        )
        self.first_token_s = registry.histogram(
            "time_to_first_token_seconds",
            "Time from infer to the first token, of ended turns.",
            "model",
            bounds=_FIRST_TOKEN_BOUNDS_S,
        )
        self.queue_s = registry.histogram(
            "queue_wait_seconds", "Time that ended turns waited for a slot.", "model", bounds=_QUEUE_BOUNDS_S
        )
        self.preemptions = registry.counter("preemptions", "Preemptions of ended turns.", "model")
        self.client_turns = registry.counter(
            "client_turns", "Ended turns by client; clients after the first 50 are counted as other.", "client"
        )
        self.client_tokens = registry.counter(
            "client_tokens",
            "Tokens of ended turns, by client as above and kind: prompt, cached (of the prompt) or generated.",
            "client",
            "kind",
        )

    def _declare_embeddings(self, registry: MetricRegistry) -> None:
        self.embedding_requests = registry.counter(
            "embedding_requests",
            "Ended requests for embeddings or scores, by model and by done, cancelled or a code of the error table.",
            "model",
            "finish",
        )

    def embedding_ended(self, *, model: str, client_id: str, finish: str, n_tokens: int) -> None:
        """Count a request for embeddings that ended, successfully or not, and the tokens that were computed for it."""
        self.embedding_requests.labels(label_text(model), finish).inc()
        self.client_tokens.labels(self._clients.of(client_id), "prompt").inc(n_tokens)

    def connection_refused(self, status: int) -> None:
        self.refused_connections.labels(str(status)).inc()

    def turn_ended(self, record: EndedTurn) -> None:
        """Count a turn that ended, successfully or not."""
        stats = record.stats
        model, client = label_text(record.model), self._clients.of(record.client_id)
        self.turns.labels(model, record.finish).inc()
        self.queue_s.labels(model).observe(stats.queue_ms / 1000)
        first_token_s = self.first_token_s.labels(model)
        if stats.tokens:
            first_token_s.observe(stats.ttft_ms / 1000)
        self.preemptions.labels(model).inc(stats.preempted)
        self.client_turns.labels(client).inc()
        self.client_tokens.labels(client, "prompt").inc(stats.prompt_tokens)
        self.client_tokens.labels(client, "cached").inc(stats.cached_tokens)
        self.client_tokens.labels(client, "generated").inc(stats.tokens)

    def set_thermal(self, state: str, *, states: Iterable[str]) -> None:
        _mark(self.machine.thermal_state, state, states)

    def set_memory(
        self, state: str, *, used_bytes: float | None, limit_bytes: float | None, states: Iterable[str]
    ) -> None:
        """Set the memory pressure, one of ``states``, and the usage and limit of main memory."""
        _mark(self.machine.memory_pressure, state, states)
        self.machine.memory_used_bytes.set(_or_nan(used_bytes))
        self.machine.memory_limit_bytes.set(_or_nan(limit_bytes))


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value


def _mark(gauge: Gauge, state: str, states: Iterable[str]) -> None:
    for each in states:
        gauge.labels(each).set(each == state)

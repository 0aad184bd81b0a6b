"""Every Prometheus metric of the daemon, declared once.

Label values come from closed tables; names of clients are bounded (``instruments.BoundedLabel``).
"""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Final, Protocol

from prometheus_client import CollectorRegistry, Gauge

from inferencecenter import __version__
from inferencecenter.core.errors import ErrorCode
from inferencecenter.telemetry.engine_metrics import EngineMetrics
from inferencecenter.telemetry.instruments import BoundedLabel, Counts, Gauges, Histograms, label_text
from inferencecenter.telemetry.loop_monitor import BOUNDS_S
from inferencecenter.telemetry.machine_metrics import MachineMetrics

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_CLIENTS: Final = 50
# From a short prompt after a cached history on a GPU to a long text on two cores behind a queue.
_FIRST_TOKEN_BOUNDS_S: Final = (0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
# A free slot admits a turn within a step; engine.queue_timeout_s ends the longest waits.
_QUEUE_BOUNDS_S: Final = (0.001, 0.01, 0.1, 0.5, 1, 5, 10, 30, 60, 300)


class TurnFigures(Protocol):
    """A turn's figures. ``finish`` is its ``finish_reason``, or the error code of a failed one."""

    @property
    def client_id(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def finish(self) -> str: ...
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


class DaemonMetrics:
    """The daemon's metrics in a registry of their own; two instances share nothing.

    All are updated and exposed on the event loop.

    Args:
        max_clients: Clients with series of their own.
    """

    def __init__(self, *, max_clients: int = MAX_CLIENTS) -> None:
        self.registry = registry = CollectorRegistry()
        self._declare_sockets(registry)
        self._declare_turns(registry)
        self._clients = BoundedLabel(max_clients)
        self.task_failures = Counts(
            "inferencecenter_task_failures",
            "Unexpected exceptions of background work, by the part of the daemon; what is to go on is started again.",
            ["part"],
            registry=registry,
        )
        self.engines = EngineMetrics(registry)
        self.machine = MachineMetrics(registry)
        self.loop_lag_s = Histograms(
            "inferencecenter_loop_lag_seconds",
            "What a callback waits for the front's event loop, measured every 50 ms while there are connections.",
            bounds=BOUNDS_S,
            registry=registry,
        ).labels()
        build = Gauge("inferencecenter_build_info", "1, with what runs.", ["version", "python"], registry=registry)
        build.labels(__version__, platform.python_version()).set(1)

    def _declare_sockets(self, registry: CollectorRegistry) -> None:
        self.connections = Gauge("inferencecenter_connections", "Open WebSockets.", registry=registry)
        self.unauthenticated_connections = Gauge(
            "inferencecenter_unauthenticated_connections",
            "Open WebSockets that have not authenticated, which are counted apart from those of clients.",
            registry=registry,
        )
        self.evicted_connections = Counts(
            "inferencecenter_evicted_connections",
            "WebSockets that had not authenticated and were closed for newer ones.",
            registry=registry,
        ).labels()
        self.refused_handshakes = Counts(
            "inferencecenter_refused_handshakes",
            "WebSocket upgrades without a credential that were refused, as their address makes too many.",
            registry=registry,
        ).labels()
        self.frames_in = Counts("inferencecenter_frames_in", "WebSocket frames received.", registry=registry).labels()
        self.frames_out = Counts("inferencecenter_frames_out", "WebSocket frames sent.", registry=registry).labels()
        self.outbox_bytes = Gauges(
            "inferencecenter_outbox_bytes", "Bytes that wait for slow readers.", registry=registry
        ).labels()
        self.outbox_overflows = Counts(
            "inferencecenter_outbox_overflows", "Sockets aborted because they stopped reading.", registry=registry
        ).labels()
        self.errors = Counts(
            "inferencecenter_errors", "Errors sent to clients, by code of the error table.", ["code"], registry=registry
        )
        for code in ErrorCode:
            self.errors.labels(code.value)  # so that the first error counts as an increase
        self.refused_connections = Counts(
            "inferencecenter_refused_connections",
            "WebSocket upgrades refused, and connections turned away before their request was heard, by HTTP status.",
            ["status"],
            registry=registry,
        )
        self.http_requests = Gauge(
            "inferencecenter_http_requests", "HTTP requests of clients that are being answered.", registry=registry
        )
        self.http_responses = Counts(
            "inferencecenter_http_responses",
            "HTTP answers to clients, by the address's pattern and by status.",
            ["path", "status"],
            registry=registry,
        )
        self.login_failures = Counts("inferencecenter_login_failures", "Wrong credentials.", registry=registry).labels()

    def _declare_turns(self, registry: CollectorRegistry) -> None:
        self.sessions = Gauge("inferencecenter_sessions", "Open sessions.", registry=registry)
        self.storage_failing = Gauge(
            "inferencecenter_storage_failing", "1 while sessions cannot be written down.", registry=registry
        )
        self.records_set_aside = Counts(
            "inferencecenter_records_set_aside",
            "Records of sessions that a defect kept from being written; the log names them.",
            registry=registry,
        ).labels()
        self.turns = Counts(
            "inferencecenter_turns",
            "Turns that ended, by finish_reason, or by code of the error table.",
            ["model", "finish"],
            registry=registry,
        )
        self.first_token_s = Histograms(
            "inferencecenter_time_to_first_token_seconds",
            "From infer to the first token, of turns that ended.",
            ["model"],
            bounds=_FIRST_TOKEN_BOUNDS_S,
            registry=registry,
        )
        self.queue_s = Histograms(
            "inferencecenter_queue_wait_seconds",
            "What turns that ended had waited for a slot.",
            ["model"],
            bounds=_QUEUE_BOUNDS_S,
            registry=registry,
        )
        self.preemptions = Counts(
            "inferencecenter_preemptions",
            "How often turns that ended had given their slot to others.",
            ["model"],
            registry=registry,
        )
        self.client_turns = Counts(
            "inferencecenter_client_turns",
            "Turns that ended, by client; all but the first 50 clients together are other.",
            ["client"],
            registry=registry,
        )
        self.client_tokens = Counts(
            "inferencecenter_client_tokens",
            "Tokens of turns that ended, by client as above and kind: prompt, cached (of the prompt) or generated.",
            ["client", "kind"],
            registry=registry,
        )

    def connection_refused(self, status: int) -> None:
        self.refused_connections.labels(str(status)).inc()

    def turn_ended(self, record: TurnFigures) -> None:
        """Count a turn that ended, successfully or not."""
        model, client = label_text(record.model), self._clients.of(record.client_id)
        self.turns.labels(model, record.finish).inc()
        self.queue_s.labels(model).observe(record.queue_ms / 1000)
        first_token_s = self.first_token_s.labels(model)
        if record.tokens:
            first_token_s.observe(record.ttft_ms / 1000)
        self.preemptions.labels(model).inc(record.preempted)
        self.client_turns.labels(client).inc()
        self.client_tokens.labels(client, "prompt").inc(record.prompt_tokens)
        self.client_tokens.labels(client, "cached").inc(record.cached_tokens)
        self.client_tokens.labels(client, "generated").inc(record.tokens)

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

"""Every Prometheus metric, declared once. Labels take their values from closed tables, never from what clients send."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

_FIRST_TOKEN_BUCKETS_S: Final = (0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKEN_BUCKETS_S: Final = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
_QUEUE_BUCKETS_S: Final = (0.001, 0.01, 0.1, 0.5, 1, 5, 10, 30, 60, 300)


class TurnFigures(Protocol):
    """What is counted of a turn. ``finish`` is its ``finish_reason``, or the error code of one that failed."""

    @property
    def finish(self) -> str: ...  # noqa: D102
    @property
    def queue_ms(self) -> float: ...  # noqa: D102
    @property
    def ttft_ms(self) -> float: ...  # noqa: D102
    @property
    def total_ms(self) -> float: ...  # noqa: D102
    @property
    def prompt_tokens(self) -> int: ...  # noqa: D102
    @property
    def cached_tokens(self) -> int: ...  # noqa: D102
    @property
    def tokens(self) -> int: ...  # noqa: D102
    @property
    def preempted(self) -> int: ...  # noqa: D102


class Metrics:
    """The daemon's metrics in a registry of their own; two instances share nothing."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        self.connections = Gauge("inferencecenter_connections", "Open WebSockets.", registry=registry)
        self.frames_in = Counter("inferencecenter_frames_in", "WebSocket frames received.", registry=registry)
        self.frames_out = Counter("inferencecenter_frames_out", "WebSocket frames sent.", registry=registry)
        self.outbox_bytes = Gauge(
            "inferencecenter_outbox_bytes", "Bytes that wait for slow readers.", registry=registry
        )
        self.outbox_overflows = Counter(
            "inferencecenter_outbox_overflows", "Sockets aborted because they stopped reading.", registry=registry
        )
        self.errors = Counter(
            "inferencecenter_errors", "Errors sent to clients, by code of the error table.", ["code"], registry=registry
        )
        self.refused_connections = Counter(
            "inferencecenter_refused_connections",
            "WebSocket upgrades refused, by HTTP status.",
            ["status"],
            registry=registry,
        )
        self.login_failures = Counter("inferencecenter_login_failures", "Wrong credentials.", registry=registry)

        self.sessions = Gauge("inferencecenter_sessions", "Open sessions.", registry=registry)
        self.turns = Counter(
            "inferencecenter_turns",
            "Turns that ended, by finish_reason, or by code of the error table.",
            ["finish"],
            registry=registry,
        )
        self.tokens = Counter("inferencecenter_generated_tokens", "Tokens generated.", registry=registry)
        self.prompt_tokens = Counter(
            "inferencecenter_prompt_tokens", "Prompt tokens of finished turns.", registry=registry
        )
        self.cached_tokens = Counter(
            "inferencecenter_cached_prompt_tokens",
            "Prompt tokens of finished turns whose KV was reused.",
            registry=registry,
        )
        self.preemptions = Counter(
            "inferencecenter_preemptions",
            "How often turns that ended had given their slot to others.",
            registry=registry,
        )
        self.first_token_s = Histogram(
            "inferencecenter_time_to_first_token_seconds",
            "From infer to the first token.",
            buckets=_FIRST_TOKEN_BUCKETS_S,
            registry=registry,
        )
        self.token_s = Histogram(
            "inferencecenter_inter_token_seconds",
            "Mean time between the tokens of a turn.",
            buckets=_TOKEN_BUCKETS_S,
            registry=registry,
        )
        self.queue_s = Histogram(
            "inferencecenter_queue_wait_seconds", "From infer to a slot.", buckets=_QUEUE_BUCKETS_S, registry=registry
        )

        self.engine_ready = Gauge(
            "inferencecenter_engine_ready",
            "1 while turns can be run, also by an engine that they wake.",
            registry=registry,
        )
        self.engine_state = Gauge(
            "inferencecenter_engine_state", "1 for the state the engine process is in.", ["state"], registry=registry
        )
        self.engine_restarts = Gauge(
            "inferencecenter_engine_restarts", "Starts of the engine process after a loss.", registry=registry
        )
        self.engine_rss_bytes = Gauge(
            "inferencecenter_engine_resident_memory_bytes", "Memory of the engine process.", registry=registry
        )
        self.running_turns = Gauge("inferencecenter_running_turns", "Turns that hold a slot.", registry=registry)
        self.waiting_turns = Gauge("inferencecenter_waiting_turns", "Turns that wait for a slot.", registry=registry)

        self.parked_sessions = Gauge(
            "inferencecenter_parked_sessions", "Sessions whose KV is kept outside the slots.", registry=registry
        )
        self.parked_bytes = Gauge(
            "inferencecenter_parked_bytes", "Bytes of KV kept outside the slots.", registry=registry
        )

        self.gpu_temperature_c = Gauge(
            "inferencecenter_gpu_temperature_celsius", "Temperature of the GPU; NaN without one.", registry=registry
        )
        self.gpu_power_watts = Gauge(
            "inferencecenter_gpu_power_watts", "Power drawn by the GPU; NaN without one.", registry=registry
        )
        self.gpu_memory_used_bytes = Gauge(
            "inferencecenter_gpu_memory_used_bytes", "Used memory of the GPU; NaN without one.", registry=registry
        )
        self.gpu_memory_total_bytes = Gauge(
            "inferencecenter_gpu_memory_total_bytes", "Memory of the GPU; NaN without one.", registry=registry
        )
        self.gpu_utilization_percent = Gauge(
            "inferencecenter_gpu_utilization_percent",
            "Share of time the GPU was busy; NaN without one.",
            registry=registry,
        )
        self.thermal_state = Gauge(
            "inferencecenter_thermal_state", "1 for how the GPUs are: cool, warm or hot.", ["state"], registry=registry
        )
        self.gpu_slowdown = Gauge(
            "inferencecenter_gpu_slowdown", "1 for what slows a GPU down now.", ["reason"], registry=registry
        )
        self.memory_pressure = Gauge(
            "inferencecenter_memory_pressure",
            "1 for how short memory is: easy, shedding or full.",
            ["state"],
            registry=registry,
        )
        self.memory_counted_bytes = Gauge(
            "inferencecenter_memory_counted_bytes", "Memory that counts towards the ceiling.", registry=registry
        )
        self.memory_ceiling_bytes = Gauge(
            "inferencecenter_memory_ceiling_bytes", "Bytes above which memory counts as short.", registry=registry
        )

    def turn_ended(self, record: TurnFigures) -> None:
        """Count a turn that ended, well or not."""
        self.turns.labels(record.finish).inc()
        self.tokens.inc(record.tokens)
        self.prompt_tokens.inc(record.prompt_tokens)
        self.cached_tokens.inc(record.cached_tokens)
        self.preemptions.inc(record.preempted)
        self.queue_s.observe(record.queue_ms / 1000)
        if record.tokens:
            self.first_token_s.observe(record.ttft_ms / 1000)
        if record.tokens > 1:
            self.token_s.observe((record.total_ms - record.ttft_ms) / 1000 / (record.tokens - 1))

    def set_engine_state(self, state: str, *, states: Iterable[str]) -> None:
        """Mark ``state`` as the one of ``states`` that the engine is in."""
        for each in states:
            self.engine_state.labels(each).set(each == state)

    def set_thermal(
        self, state: str, slowdowns: Collection[str], *, states: Iterable[str], known_slowdowns: Iterable[str]
    ) -> None:
        """Mark how the GPUs are, of ``states``, and what slows them down, of ``known_slowdowns``."""
        for each in states:
            self.thermal_state.labels(each).set(each == state)
        for reason in known_slowdowns:
            self.gpu_slowdown.labels(reason).set(reason in slowdowns)

    def set_memory(
        self, state: str, *, used_bytes: float | None, limit_bytes: float | None, states: Iterable[str]
    ) -> None:
        """Mark how short memory is, of ``states``, and show the figures; ``None`` for one that is not known."""
        for each in states:
            self.memory_pressure.labels(each).set(each == state)
        self.memory_counted_bytes.set(or_nan(used_bytes))
        self.memory_ceiling_bytes.set(or_nan(limit_bytes))

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


def or_nan(value: float | None) -> float:
    """Return a reading for a gauge: NaN stands for one that is not there."""
    return float("nan") if value is None else value

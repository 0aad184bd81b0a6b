"""Metrics of the engines, of which there is one for each model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, get_args

from inferencecenter.telemetry.instruments import label_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from prometheus_client import Gauge

    from inferencecenter.telemetry.instruments import Count, Distribution, MetricRegistry

# A GPU generates a token in some milliseconds, two old cores one of a large model in a second. People read ten a second
# and notice differences between 50 and 300 ms, where the bounds are closest.
_TOKEN_BOUNDS_S: Final = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
# A step with prefill aims at engine.target_step_ms, 150 unless set.
_STEP_BOUNDS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_TEXT_BOUNDS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_TURN_BOUNDS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
# About 2 ms for 1500 tokens of a small model, a hundred times as much for a long conversation with a large one.
_MOVE_BOUNDS_S: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1)
_MOVE_KINDS: Final = ("park", "restore", "copy")
_SOURCES: Final = ("slot", "neighbour", "parked", "prefix", "computed")  # codespell:ignore neighbour

PlacementKind: TypeAlias = Literal["new", "kv", "moved", "lost"]
"""How a turn was placed: without a session's KV, at the KV, elsewhere although there is KV, or after its loss."""


@dataclass(frozen=True, slots=True)
class EngineMeters:
    """The instruments of one model that each step updates."""

    tokens: Count
    inter_token_s: Distribution
    step_s: Distribution
    batch_turns: Distribution
    decode_s: Count
    prefill_s: Count
    encode_s: Count
    prefill_tokens: Count
    drafted: Count
    accepted: Count
    fetches: Count
    embedded_texts: Distribution
    embedded_tokens: Count
    embedding_s: Count
    sources: Mapping[str, Count]
    moves: Mapping[str, Distribution]


class EngineMetrics:
    """Metrics with the label ``model``.

    Gauges are read from the engines' statuses when the metrics are scraped.
    """

    def __init__(self, registry: MetricRegistry) -> None:
        self._registry = registry
        self._gauges: list[Gauge] = []
        self._declare_state(registry)
        self._declare_steps(registry)
        self._declare_embeddings(registry)
        self._declare_kv(registry)

    def _declare_state(self, registry: MetricRegistry) -> None:
        self.info = self._gauge(
            "model_info",
            "Always 1 for each loaded model; the labels describe it.",
            "model",
            "architecture",
            "backend",
            "library",
        )
        self.ready = self._gauge(
            "engine_ready", "1 while turns are accepted, including by a sleeping engine that they start.", "model"
        )
        self.state = self._gauge("engine_state", "1 for the current state of the engine process.", "model", "state")
        self.restarts = registry.counter("engine_restarts", "Restarts of the engine process after a loss.", "model")
        self.gpu_layers = self._gauge("gpu_layers", "Layers of the model on GPUs.", "model")
        self.slots = self._gauge("slots", "Maximum number of turns that run at once.", "model")
        self.running_turns = self._gauge("running_turns", "Turns with a slot.", "model")
        self.waiting_turns = self._gauge("waiting_turns", "Turns waiting for a slot.", "model")
        self.replica_state = self._gauge(
            "replica_state",
            "1 for the current state of each replica of a model with several.",
            "model",
            "replica",
            "state",
        )
        self.replica_running_turns = self._gauge(
            "replica_running_turns", "Turns with a slot of a replica.", "model", "replica"
        )
        self.replica_waiting_turns = self._gauge(
            "replica_waiting_turns", "Turns that wait for a slot of a replica.", "model", "replica"
        )
        self.replica_restarts = registry.counter(
            "replica_restarts", "Restarts of a replica's engine process after a loss.", "model", "replica"
        )
        self.placed_turns = registry.counter(
            "placed_turns",
            "Turns submitted to a replica: of a session without KV (new), to the replica with its KV (kv), to another "
            "one where they run sooner (moved), or after the KV was lost (lost).",
            "model",
            "kind",
        )

    def _declare_steps(self, registry: MetricRegistry) -> None:
        self.tokens = registry.counter("generated_tokens", "Generated tokens.", "model")
        self.inter_token_s = registry.histogram(
            "inter_token_seconds",
            "Time between two frames with tokens of a turn, including the time that it is preempted.",
            "model",
            bounds=_TOKEN_BOUNDS_S,
        )
        self.step_s = registry.histogram(
            "step_seconds", "Duration of a step with prefill or decode.", "model", bounds=_STEP_BOUNDS_S
        )
        self.batch_turns = registry.histogram(
            "batch_turns", "Turns that decode together in one step.", "model", bounds=_TURN_BOUNDS
        )
        self.decode_s = registry.counter("decode_seconds", "Time spent on decode.", "model")
        self.prefill_s = registry.counter("prefill_seconds", "Time spent on prefill.", "model")
        self.encode_s = registry.counter("image_encode_seconds", "Time spent on encoding images.", "model")
        self.prefill_tokens = registry.counter(
            "prefill_tokens", "Tokens computed by prefill, including those computed again after a preemption.", "model"
        )

        self.drafted_tokens = registry.counter(
            "drafted_tokens", "Tokens drafted, from earlier text or by a draft model.", "model"
        )
        self.accepted_tokens = registry.counter(
            "accepted_tokens", "Drafted tokens that were accepted; they are included in the generated ones.", "model"
        )

    def _declare_embeddings(self, registry: MetricRegistry) -> None:
        self.embedding_batch_texts = registry.histogram(
            "embedding_batch_texts",
            "Texts that an embedding or reranking model computes together.",
            "model",
            bounds=_TEXT_BOUNDS,
        )
        self.embedding_tokens = registry.counter(
            "embedding_tokens", "Tokens of texts computed by an embedding or reranking model.", "model"
        )
        self.embedding_s = registry.counter("embedding_seconds", "Time spent on computing embeddings.", "model")

    def _declare_kv(self, registry: MetricRegistry) -> None:
        self.prompt_tokens = registry.counter(
            "prompt_tokens",
            "Prompt tokens of turns that began, by source of their KV: the session's slot, a neighbor, "
            "parked, a shared prefix, or none (computed).",
            "model",
            "source",
        )
        self.kv_move_s = registry.histogram(
            "kv_move_seconds",
            "Duration of a KV transfer, by kind: park, restore or copy.",
            "model",
            "kind",
            bounds=_MOVE_BOUNDS_S,
        )
        self.kv_fetches = registry.counter("kv_fetches", "Parked sequences read from disk.", "model")
        self.parked_sessions = self._gauge("parked_sessions", "Sessions whose KV is parked outside the slots.", "model")
        self.parked_bytes = self._gauge("parked_bytes", "Bytes of parked KV, by tier: ram or disk.", "model", "tier")

    def of(self, model: str) -> EngineMeters:
        """Return the instruments of a model that each step updates."""
        model = label_text(model)
        return EngineMeters(
            tokens=self.tokens.labels(model),
            inter_token_s=self.inter_token_s.labels(model),
            step_s=self.step_s.labels(model),
            batch_turns=self.batch_turns.labels(model),
            decode_s=self.decode_s.labels(model),
            prefill_s=self.prefill_s.labels(model),
            encode_s=self.encode_s.labels(model),
            prefill_tokens=self.prefill_tokens.labels(model),
            drafted=self.drafted_tokens.labels(model),
            accepted=self.accepted_tokens.labels(model),
            fetches=self.kv_fetches.labels(model),
            embedded_texts=self.embedding_batch_texts.labels(model),
            embedded_tokens=self.embedding_tokens.labels(model),
            embedding_s=self.embedding_s.labels(model),
            sources={source: self.prompt_tokens.labels(model, source) for source in _SOURCES},
            moves={kind: self.kv_move_s.labels(model, kind) for kind in _MOVE_KINDS},
        )

    def placement_counter(self, model: str) -> Callable[[PlacementKind], None]:
        """Return a function that counts how a turn of a model with replicas was placed."""
        counts = {kind: self.placed_turns.labels(label_text(model), kind) for kind in get_args(PlacementKind)}

        def count(kind: PlacementKind) -> None:
            counts[kind].value += 1

        return count

    def clear(self) -> None:
        """Drop the gauges: a model that is gone has no state."""
        for gauge in self._gauges:
            gauge.clear()

    def _gauge(self, name: str, documentation: str, *labels: str) -> Gauge:
        gauge = self._registry.gauge(name, documentation, *labels)
        self._gauges.append(gauge)
        return gauge

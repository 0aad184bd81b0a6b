"""Metrics of the engines, of which there is one for each model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from prometheus_client import Gauge

from inferencecenter.telemetry.instruments import Counts, Histograms, label_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prometheus_client import CollectorRegistry

    from inferencecenter.telemetry.instruments import Count, Distribution

# A GPU generates a token in some milliseconds, two old cores one of a large model in a second. People read ten a second
# and notice differences between 50 and 300 ms, where the bounds are closest.
_TOKEN_BOUNDS_S: Final = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
# A step with prefill aims at engine.target_step_ms, 150 unless set.
_STEP_BOUNDS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_TURN_BOUNDS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
# About 2 ms for 1500 tokens of a small model, a hundred times as much for a long conversation with a large one.
_MOVE_BOUNDS_S: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1)
_MOVE_KINDS: Final = ("park", "restore", "copy")
_SOURCES: Final = ("slot", "neighbour", "parked", "prefix", "computed")


@dataclass(frozen=True, slots=True)
class EngineMeters:
    """The instruments of one model that each step updates."""

    tokens: Count
    inter_token_s: Distribution
    step_s: Distribution
    batch_turns: Distribution
    decode_s: Count
    prefill_s: Count
    prefill_tokens: Count
    drafted: Count
    accepted: Count
    fetches: Count
    sources: Mapping[str, Count]
    moves: Mapping[str, Distribution]


class EngineMetrics:
    """Metrics with the label ``model``.

    Gauges are read from the engines' statuses when the metrics are scraped.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._declare_state(registry)
        self._declare_steps(registry)
        self._declare_kv(registry)

    def _declare_state(self, registry: CollectorRegistry) -> None:
        self.info = Gauge(
            "inferencecenter_model_info",
            "1 for each model that was loaded, with what it is.",
            ["model", "architecture", "backend", "library"],
            registry=registry,
        )
        self.ready = Gauge(
            "inferencecenter_engine_ready",
            "1 while turns can be run, also by an engine that they wake.",
            ["model"],
            registry=registry,
        )
        self.state = Gauge(
            "inferencecenter_engine_state",
            "1 for the state the engine process is in.",
            ["model", "state"],
            registry=registry,
        )
        self.restarts = Counts(
            "inferencecenter_engine_restarts",
            "Starts of the engine process after a loss.",
            ["model"],
            registry=registry,
        )
        self.gpu_layers = Gauge(
            "inferencecenter_gpu_layers", "Layers of the model that are on GPUs.", ["model"], registry=registry
        )
        self.slots = Gauge(
            "inferencecenter_slots", "Turns that the engine can run at once.", ["model"], registry=registry
        )
        self.running_turns = Gauge(
            "inferencecenter_running_turns", "Turns that hold a slot.", ["model"], registry=registry
        )
        self.waiting_turns = Gauge(
            "inferencecenter_waiting_turns", "Turns that wait for a slot.", ["model"], registry=registry
        )

    def _declare_steps(self, registry: CollectorRegistry) -> None:
        self.tokens = Counts("inferencecenter_generated_tokens", "Tokens generated.", ["model"], registry=registry)
        self.inter_token_s = Histograms(
            "inferencecenter_inter_token_seconds",
            "From one frame with tokens of a turn to its next, its waiting for others included.",
            ["model"],
            bounds=_TOKEN_BOUNDS_S,
            registry=registry,
        )
        self.step_s = Histograms(
            "inferencecenter_step_seconds",
            "Steps in which the engine read or generated.",
            ["model"],
            bounds=_STEP_BOUNDS_S,
            registry=registry,
        )
        self.batch_turns = Histograms(
            "inferencecenter_batch_turns",
            "Turns that generated together in one step.",
            ["model"],
            bounds=_TURN_BOUNDS,
            registry=registry,
        )
        self.decode_s = Counts(
            "inferencecenter_decode_seconds", "Time the engine spent generating.", ["model"], registry=registry
        )
        self.prefill_s = Counts(
            "inferencecenter_prefill_seconds", "Time the engine spent reading prompts.", ["model"], registry=registry
        )
        self.prefill_tokens = Counts(
            "inferencecenter_prefill_tokens",
            "Tokens that the engine read, those of preempted turns each time.",
            ["model"],
            registry=registry,
        )

        self.drafted_tokens = Counts(
            "inferencecenter_drafted_tokens",
            "Tokens that were guessed from what the text said before.",
            ["model"],
            registry=registry,
        )
        self.accepted_tokens = Counts(
            "inferencecenter_accepted_tokens",
            "Of the guessed tokens those that were right; they are among the generated ones.",
            ["model"],
            registry=registry,
        )

    def _declare_kv(self, registry: CollectorRegistry) -> None:
        self.prompt_tokens = Counts(
            "inferencecenter_prompt_tokens",
            "Tokens of turns that began, by where their KV was: in their session's slot, in a neighbour, parked, in a"
            " shared prefix, or nowhere (computed).",
            ["model", "source"],
            registry=registry,
        )
        self.kv_move_s = Histograms(
            "inferencecenter_kv_move_seconds",
            "Sequences of KV that were moved: park, restore or copy.",
            ["model", "kind"],
            bounds=_MOVE_BOUNDS_S,
            registry=registry,
        )
        self.kv_fetches = Counts(
            "inferencecenter_kv_fetches", "Parked sequences that were asked of the disk.", ["model"], registry=registry
        )
        self.parked_sessions = Gauge(
            "inferencecenter_parked_sessions",
            "Sessions whose KV is kept outside the slots.",
            ["model"],
            registry=registry,
        )
        self.parked_bytes = Gauge(
            "inferencecenter_parked_bytes",
            "Bytes of KV kept outside the slots, by tier: ram or disk.",
            ["model", "tier"],
            registry=registry,
        )

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
            prefill_tokens=self.prefill_tokens.labels(model),
            drafted=self.drafted_tokens.labels(model),
            accepted=self.accepted_tokens.labels(model),
            fetches=self.kv_fetches.labels(model),
            sources={source: self.prompt_tokens.labels(model, source) for source in _SOURCES},
            moves={kind: self.kv_move_s.labels(model, kind) for kind in _MOVE_KINDS},
        )

    def clear(self) -> None:
        """Drop the gauges: a model that is gone has no state."""
        for gauge in (
            self.info,
            self.ready,
            self.state,
            self.gpu_layers,
            self.slots,
            self.running_turns,
            self.waiting_turns,
            self.parked_sessions,
            self.parked_bytes,
        ):
            gauge.clear()

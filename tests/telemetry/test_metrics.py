"""Tests of the Prometheus metrics."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from prometheus_client.parser import text_string_to_metric_families

from inferencecenter.telemetry.metrics import Metrics, or_nan


@dataclass(frozen=True)
class Figures:
    """A turn."""

    finish: str = "stop"
    queue_ms: float = 40.0
    ttft_ms: float = 200.0
    total_ms: float = 1200.0
    prompt_tokens: int = 30
    cached_tokens: int = 10
    tokens: int = 11
    preempted: int = 2


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    """Return a sample."""
    return metrics.registry.get_sample_value(f"inferencecenter_{name}", labels)


def test_instances_share_nothing() -> None:
    """Two daemons in one process, or two tests, do not see each other's counts."""
    first, second = Metrics(), Metrics()
    first.frames_in.inc()
    assert value(first, "frames_in_total") == 1
    assert value(second, "frames_in_total") == 0


def test_every_metric_has_a_prefix_and_a_sentence() -> None:
    """Names and help are what the documentation is made of."""
    families = list(text_string_to_metric_families(Metrics().exposition().decode()))
    assert len(families) > 20
    for family in families:
        assert family.name.startswith("inferencecenter_")
        assert family.documentation.endswith(".")
    names = [family.name for family in families]
    assert len(names) == len(set(names))


def test_a_turn_is_counted() -> None:
    """Its tokens, its waiting, its first token and the mean time between the others."""
    metrics = Metrics()
    metrics.turn_ended(Figures())
    assert value(metrics, "turns_total", finish="stop") == 1
    assert value(metrics, "generated_tokens_total") == 11
    assert value(metrics, "preemptions_total") == 2
    assert value(metrics, "prompt_tokens_total") == 30
    assert value(metrics, "cached_prompt_tokens_total") == 10
    assert math.isclose(value(metrics, "queue_wait_seconds_sum") or 0, 0.04)
    assert math.isclose(value(metrics, "time_to_first_token_seconds_sum") or 0, 0.2)
    assert math.isclose(value(metrics, "inter_token_seconds_sum") or 0, 0.1)


def test_a_turn_without_tokens_has_no_token_times() -> None:
    """A failed turn does not pull the histograms to zero, nor does a single token have a distance."""
    metrics = Metrics()
    metrics.turn_ended(replace(Figures(), finish="engine_crashed", tokens=0))
    assert value(metrics, "turns_total", finish="engine_crashed") == 1
    assert value(metrics, "time_to_first_token_seconds_count") == 0
    metrics.turn_ended(replace(Figures(), tokens=1))
    assert value(metrics, "time_to_first_token_seconds_count") == 1
    assert value(metrics, "inter_token_seconds_count") == 0


def test_the_engine_is_in_one_state() -> None:
    """The state of before is put back to 0."""
    metrics = Metrics()
    states = ["ready", "starting"]
    metrics.set_engine_state("starting", states=states)
    metrics.set_engine_state("ready", states=states)
    assert [value(metrics, "engine_state", state=state) for state in states] == [1, 0]


def test_what_cannot_be_read_is_not_a_number() -> None:
    """A missing reading is not zero degrees."""
    assert math.isnan(or_nan(None))
    assert or_nan(0) == 0

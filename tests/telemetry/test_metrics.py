"""The Prometheus metrics."""

from __future__ import annotations

import math

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from inferencecenter.protocol.values import TurnStats
from inferencecenter.sessions.observability import TurnRecord
from inferencecenter.telemetry.metrics import MAX_CLIENTS, DaemonMetrics


def ended(*, client_id: str = "ada", finish: str = "stop", tokens: int = 11) -> TurnRecord:
    """Return a turn that ended."""
    stats = TurnStats(
        queue_ms=40.0,
        ttft_ms=200.0,
        total_ms=300.0,
        prompt_tokens=30,
        cached_tokens=10,
        tokens=tokens,
        tps=1.0,
        preempted=2,
    )
    return TurnRecord(client_id=client_id, session_id="s", turn_id="t", model="demo", finish=finish, stats=stats)


def value(metrics: DaemonMetrics, name: str, **labels: str) -> float | None:
    """Return a sample."""
    return metrics.registry.get_sample_value(f"inferencecenter_{name}", labels)


def test_instances_are_independent() -> None:
    """Two daemons in one process have their own counts."""
    first, second = DaemonMetrics(), DaemonMetrics()
    first.frames_in.inc()
    assert value(first, "frames_in_total") == 1
    assert value(second, "frames_in_total") == 0


def test_metric_names_and_help() -> None:
    """The documentation is generated from them."""
    families = list(text_string_to_metric_families(generate_latest(DaemonMetrics().registry).decode()))
    assert len(families) > 40
    for family in families:
        assert family.name.startswith("inferencecenter_")
        assert family.documentation.endswith(".")
    names = [family.name for family in families]
    assert len(names) == len(set(names))


def test_turn_metrics() -> None:
    """End, preemptions, queueing and first token are counted by model, turns and tokens by client."""
    metrics = DaemonMetrics()
    metrics.turn_ended(ended())
    assert value(metrics, "turns_total", model="demo", finish="stop") == 1
    assert value(metrics, "preemptions_total", model="demo") == 2
    assert math.isclose(value(metrics, "queue_wait_seconds_sum", model="demo") or 0, 0.04)
    assert math.isclose(value(metrics, "time_to_first_token_seconds_sum", model="demo") or 0, 0.2)
    assert value(metrics, "client_turns_total", client="ada") == 1
    kinds = ("prompt", "cached", "generated")
    assert [value(metrics, "client_tokens_total", client="ada", kind=kind) for kind in kinds] == [30, 10, 11]


def test_turn_without_tokens_has_no_first_token_time() -> None:
    """A failed turn adds no zero to the histogram."""
    metrics = DaemonMetrics()
    metrics.turn_ended(ended(finish="engine_crashed", tokens=0))
    assert value(metrics, "turns_total", model="demo", finish="engine_crashed") == 1
    assert value(metrics, "time_to_first_token_seconds_count", model="demo") == 0
    metrics.turn_ended(ended(tokens=1))
    assert value(metrics, "time_to_first_token_seconds_count", model="demo") == 1


@pytest.mark.parametrize("name", ["client-{}", 'x"}} {}\n# EOF\n', "{}\udcff"])
def test_number_of_client_series_is_bounded(name: str) -> None:
    """Of ten thousand clients fifty have their own series; the rest is summed."""
    metrics = DaemonMetrics()
    for number in range(10_000):
        metrics.turn_ended(ended(client_id=name.format(number), tokens=1))
    families = text_string_to_metric_families(generate_latest(metrics.registry).decode())
    turns = {
        sample.labels["client"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == "inferencecenter_client_turns_total"
    }
    assert len(turns) == MAX_CLIENTS + 1
    assert sum(turns.values()) == 10_000
    assert turns["other"] == 10_000 - MAX_CLIENTS
    assert value(metrics, "client_tokens_total", client="other", kind="generated") == 10_000 - MAX_CLIENTS


def test_one_state_is_set() -> None:
    """The previous one returns to 0; unknown memory has no value."""
    metrics = DaemonMetrics()
    states = ["cool", "hot"]
    metrics.set_thermal("hot", states=states)
    metrics.set_thermal("cool", states=states)
    assert [value(metrics, "thermal_state", state=state) for state in states] == [1, 0]
    metrics.set_memory("easy", used_bytes=7, limit_bytes=None, states=["easy", "full"])
    assert value(metrics, "memory_pressure", state="easy") == 1
    assert value(metrics, "memory_used_bytes") == 7
    assert math.isnan(value(metrics, "memory_limit_bytes") or 0)

"""Counters and histograms for one thread."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from inferencecenter.telemetry.instruments import Counts, Distribution, Histograms

BOUNDS = (0.5, 1, 2.5)


def samples(registry: CollectorRegistry) -> dict[str, float]:
    """Return all samples by name and labels, without creation times."""
    lines = (line.rsplit(" ", 1) for line in generate_latest(registry).decode().splitlines() if line[0] != "#")
    return {name: float(value) for name, value in lines if "_created" not in name}


@given(st.lists(st.one_of(st.floats(0, 4), st.sampled_from(BOUNDS)), max_size=30))
def test_histogram_equals_prometheus_clients(values: list[float]) -> None:
    """A value on a bound belongs to the bucket below it."""
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    histogram = Histograms("wait_seconds", "Waits.", ["model"], bounds=BOUNDS, registry=ours).labels("demo")
    expected = Histogram("wait_seconds", "Waits.", ["model"], buckets=BOUNDS, registry=theirs).labels("demo")
    for value in values:
        histogram.observe(value)
        expected.observe(value)
    assert samples(ours) == pytest.approx(samples(theirs))
    assert histogram.count == len(values)


def test_counters_count_by_their_labels() -> None:
    """Each set of label values has its own number, always the same object."""
    registry = CollectorRegistry()
    counts = Counts("errors", "Errors.", ["code", "kind"], registry=registry)
    counts.labels("a", "x").inc()
    counts.labels("a", "y").inc(2.5)
    counts.labels("a", "x").value += 1
    assert samples(registry) == {'errors_total{code="a",kind="x"}': 2, 'errors_total{code="a",kind="y"}': 2.5}
    counts.clear()
    assert samples(registry) == {}


def test_counter_without_labels_starts_at_zero() -> None:
    """A first increase is then visible."""
    registry = CollectorRegistry()
    Counts("frames", "Frames.", registry=registry)
    Histograms("wait_seconds", "Waits.", bounds=(1,), registry=registry)
    assert samples(registry) == {
        "frames_total": 0,
        'wait_seconds_bucket{le="1.0"}': 0,
        'wait_seconds_bucket{le="+Inf"}': 0,
        "wait_seconds_count": 0,
        "wait_seconds_sum": 0,
    }


@pytest.mark.parametrize("values", [(), ("a",), ("a", "b", "c")])
def test_number_of_label_values_is_checked(values: tuple[str, ...]) -> None:
    """A wrong number would break the whole page."""
    with pytest.raises(ValueError, match="has the labels"):
        Counts("errors", "Errors.", ["code", "kind"], registry=CollectorRegistry()).labels(*values)


def test_duplicate_name_is_refused() -> None:
    """The registry refuses it."""
    registry = CollectorRegistry()
    Counts("frames", "Frames.", registry=registry)
    with pytest.raises(ValueError, match="Duplicated"):
        Counts("frames", "More frames.", registry=registry)


def test_observe_with_a_count() -> None:
    """Equals that many observations, and none for zero."""
    distribution = Distribution((1, 2))
    distribution.observe(1.5, 3)
    distribution.observe(1.5, 0)
    assert (distribution.counts, distribution.sum, distribution.count) == ([0, 3, 0], 4.5, 3)


def test_values_above_all_bounds_are_counted() -> None:
    """They are in the infinite bucket."""
    distribution = Distribution((1, 2))
    for value in (3, math.inf):
        distribution.observe(value)
    assert distribution.counts == [0, 0, 2]

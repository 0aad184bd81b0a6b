"""Tests of the counters and histograms for one thread."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from inferencecenter.telemetry.instruments import Counts, Distribution, Histograms

BOUNDS = (0.5, 1, 2.5)


def samples(registry: CollectorRegistry) -> dict[str, float]:
    """Return all samples by name and labels, without the times at which prometheus_client's own were made."""
    lines = (line.rsplit(" ", 1) for line in generate_latest(registry).decode().splitlines() if line[0] != "#")
    return {name: float(value) for name, value in lines if "_created" not in name}


@given(st.lists(st.one_of(st.floats(0, 4), st.sampled_from(BOUNDS)), max_size=30))
def test_a_histogram_is_exposed_as_prometheus_clients_own(values: list[float]) -> None:
    """Same samples for the same values: a value on a bound belongs to the bucket below it."""
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    histogram = Histograms("wait_seconds", "Waits.", ["model"], bounds=BOUNDS, registry=ours).labels("demo")
    expected = Histogram("wait_seconds", "Waits.", ["model"], buckets=BOUNDS, registry=theirs).labels("demo")
    for value in values:
        histogram.observe(value)
        expected.observe(value)
    assert samples(ours) == pytest.approx(samples(theirs))
    assert histogram.count == len(values)


def test_counters_count_by_their_labels() -> None:
    """Each set of label values has its own number, which stays the same object."""
    registry = CollectorRegistry()
    counts = Counts("errors", "Errors.", ["code", "kind"], registry=registry)
    counts.labels("a", "x").inc()
    counts.labels("a", "y").inc(2.5)
    counts.labels("a", "x").value += 1
    assert samples(registry) == {'errors_total{code="a",kind="x"}': 2, 'errors_total{code="a",kind="y"}': 2.5}
    counts.clear()
    assert samples(registry) == {}


def test_without_labels_there_is_a_zero_from_the_beginning() -> None:
    """So that a first increase is seen as one."""
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
def test_as_many_values_as_labels(values: tuple[str, ...]) -> None:
    """A wrong number of label values would break the whole page."""
    with pytest.raises(ValueError, match="has the labels"):
        Counts("errors", "Errors.", ["code", "kind"], registry=CollectorRegistry()).labels(*values)


def test_a_name_is_declared_once() -> None:
    """The registry refuses a second metric of the same name."""
    registry = CollectorRegistry()
    Counts("frames", "Frames.", registry=registry)
    with pytest.raises(ValueError, match="Duplicated"):
        Counts("frames", "More frames.", registry=registry)


def test_a_value_may_come_several_times() -> None:
    """At once, as if it had come one after the other, and never."""
    distribution = Distribution((1, 2))
    distribution.observe(1.5, 3)
    distribution.observe(1.5, 0)
    assert (distribution.counts, distribution.sum, distribution.count) == ([0, 3, 0], 4.5, 3)


def test_what_is_above_all_bounds_is_counted() -> None:
    """In the bucket without one."""
    distribution = Distribution((1, 2))
    for value in (3, math.inf):
        distribution.observe(value)
    assert distribution.counts == [0, 0, 2]

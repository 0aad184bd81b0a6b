"""Tests of label values that come from outside."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families

from inferencecenter.telemetry.instruments import OTHER, BoundedLabel, Counts, label_text

HOSTILE = 'ada"} 1\n# HELP x y\n\\'


def test_names_are_shown_as_they_are() -> None:
    """Also those that are not English."""
    assert [label_text(name) for name in ("ada", "Küche 2", "北")] == ["ada", "Küche 2", "北"]


def test_a_name_is_cut() -> None:
    """A label is no place for a megabyte."""
    assert label_text("x" * 1000) == "x" * 64


@given(st.text(st.characters(), max_size=80))
@example(HOSTILE)
@example("\udcff\ud800")
@example("\x00\x85\u2028\u202e")
def test_no_name_breaks_the_page(name: str) -> None:
    """Whatever a client is called, both formats are parsed, and it has one series with one value."""
    registry = CollectorRegistry()
    counts = Counts("turns", "Turns.", ["client"], registry=registry)
    counts.labels(label_text(name)).inc(3)
    (family,) = text_string_to_metric_families(generate_latest(registry).decode())
    assert [(sample.name, sample.value) for sample in family.samples] == [("turns_total", 3)]
    page: str = openmetrics.generate_latest(registry).decode()  # type: ignore[no-untyped-call]
    (family,) = openmetrics_parser.text_string_to_metric_families(page)  # type: ignore[no-untyped-call]
    assert [sample.labels for sample in family.samples] == [{"client": label_text(name)}]


def test_who_comes_late_is_other() -> None:
    """As many names as allowed keep their value; more change nothing."""
    label = BoundedLabel(2)
    assert [label.of(name) for name in ("ada", "bob", "eve", "ada", "mallory")] == ["ada", "bob", OTHER, "ada", OTHER]


@given(st.lists(st.text(max_size=8)))
def test_there_are_never_more_values_than_allowed(names: list[str]) -> None:
    """Whatever names come, in whatever order, and each keeps its value."""
    label = BoundedLabel(3)
    first = {name: label.of(name) for name in names}
    assert len(set(first.values())) <= 4
    assert all(label.of(name) == value for name, value in first.items())

"""Label values from outside."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families

from inferencecenter.telemetry.instruments import OTHER, BoundedLabel, Counts, label_text

HOSTILE = 'ada"} 1\n# HELP x y\n\\'


def test_names_are_kept() -> None:
    """Names in any language are unchanged."""
    assert [label_text(name) for name in ("ada", "Küche 2", "北")] == ["ada", "Küche 2", "北"]


def test_long_name_is_shortened() -> None:
    """A label value is bounded."""
    assert label_text("x" * 1000) == "x" * 64


@given(st.text(st.characters(), max_size=80))
@example(HOSTILE)
@example("\udcff\ud800")
@example("\x00\x85\u2028\u202e")
def test_any_name_is_escaped(name: str) -> None:
    """Both formats can be parsed, and have one series with one value."""
    registry = CollectorRegistry()
    counts = Counts("turns", "Turns.", ["client"], registry=registry)
    counts.labels(label_text(name)).inc(3)
    (family,) = text_string_to_metric_families(generate_latest(registry).decode())
    assert [(sample.name, sample.value) for sample in family.samples] == [("turns_total", 3)]
    page: str = openmetrics.generate_latest(registry).decode()  # type: ignore[no-untyped-call]
    (family,) = openmetrics_parser.text_string_to_metric_families(page)  # type: ignore[no-untyped-call]
    assert [sample.labels for sample in family.samples] == [{"client": label_text(name)}]


def test_excess_names_become_other() -> None:
    """The first names, up to the limit, keep their series."""
    label = BoundedLabel(2)
    assert [label.of(name) for name in ("ada", "bob", "eve", "ada", "mallory")] == ["ada", "bob", OTHER, "ada", OTHER]


@given(st.lists(st.text(max_size=8)))
def test_number_of_values_is_bounded(names: list[str]) -> None:
    """This holds for any names in any order, and each keeps its value."""
    label = BoundedLabel(3)
    first = {name: label.of(name) for name in names}
    assert len(set(first.values())) <= 4
    assert all(label.of(name) == value for name, value in first.items())

"""From repetitions to the table, the record and the plot."""

from __future__ import annotations

import json
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest
from rich.console import Console

from benchmarks import plot, record, table
from benchmarks.compare import Comparison
from benchmarks.options import Options, Peer
from benchmarks.results import Metric, Parameter, Point, Report, Side, percentile_metrics, rows
from benchmarks.stats import Ratio, Spread
from tests.benchmarks.test_compare import EQUAL, OURS

FAIR = Comparison(refusals=(), assumed=())
UNFAIR = Comparison(refusals=("the slots differs: 8 here, 4 at peer",), assumed=())


def rates(*values: float) -> tuple[tuple[Metric, ...], ...]:
    """Return repetitions of a rate, and of a count without a better direction."""
    return tuple((Metric("generation", "tok/s", value, "higher"), Metric("turns", "", 3)) for value in values)


def report(comparison: Comparison) -> Report:
    """Return a report of two sides at 1 and 8 clients."""
    points = (
        Point((Parameter("clients", 1),), (rates(50, 52, 54), rates(50, 50, 50))),
        Point((Parameter("clients", 8),), (rates(90, 100, 120), rates(100, 100, 100))),
    )
    return Report("throughput", (Side(OURS, None), Side(EQUAL, comparison)), points)


def rendered(found: Report) -> str:
    """Return a terminal's output."""
    console = Console(width=160)
    with console.capture() as captured:
        console.print(table.render(found))
    return captured.get()


def test_rows_have_spreads_and_ratios() -> None:
    """A metric without a better direction has no ratio."""
    one, turns, eight, _ = rows(report(FAIR))

    assert one.spreads == (Spread(52, 50, 54), Spread(50, 50, 50))
    assert one.ratios == (Ratio(1.04, 1.0, 1.08, 0.75),)
    assert turns.ratios == (None,)
    assert eight.ratios == (Ratio(1.0, 0.9, 1.2, 0.75),)


def test_unequal_sides_have_no_ratio() -> None:
    """Neither the rows nor the terminal has one; the terminal shows the reason."""
    assert all(row.ratios == (None,) for row in rows(report(UNFAIR)))
    text = rendered(report(UNFAIR))
    assert "ours / peer" not in text
    assert "No ratio to peer, because" in text
    assert UNFAIR.refusals[0] in text


def test_each_point_is_compared_by_its_own_servers() -> None:
    """A point whose servers differ has no ratio, the others have; all numbers of slots are listed."""
    sides = (Side(OURS, None), Side(EQUAL, FAIR))
    other = (Side(replace(OURS, slots=1), None), Side(EQUAL, UNFAIR))
    found = report(FAIR)
    found = replace(found, points=(replace(found.points[0], sides=other), replace(found.points[1], sides=sides)))

    one, _, eight, _ = rows(found)
    assert one.ratios == (None,)
    assert eight.ratios == (Ratio(1.0, 0.9, 1.2, 0.75),)
    text = rendered(found)
    assert "ours / peer" in text
    assert UNFAIR.refusals[0] in text
    assert f"1, {OURS.slots}" in text


def test_ratios_and_assumptions_are_shown() -> None:
    """Ratios have an interval and its confidence."""
    text = rendered(report(Comparison((), ("threads",))))

    assert "ours / peer" in text
    assert "1.040 [1.000, 1.080]" in text
    assert "probability of 75.0%" in text
    assert "Assumed, not known, to be the same at peer: threads" in text


def test_missing_metric_of_the_peer_is_empty() -> None:
    """Our processes' CPU time has no counterpart."""
    ours = ((Metric("CPU front", "s", 1.0, "lower"),),)
    found = replace(report(FAIR), points=(Point((), (ours, ((),))),))

    (row,) = rows(found)
    assert row.spreads == (Spread(1, 1, 1), None)
    assert row.ratios == (None,)
    assert "CPU front" in rendered(found)


def test_metric_of_a_later_repetition_is_shown() -> None:
    """An example is an error that the first repetition did not have."""
    first, second = rates(50, 60)
    found = replace(report(FAIR), points=(Point((), ((first, (*second, Metric("errors", "", 2))), ())),))

    assert [row.name for row in rows(found)] == ["generation", "turns", "errors"]
    assert rows(found)[2].spreads == (Spread(2, 2, 2), None)


def test_percentiles_of_no_values_are_absent() -> None:
    """A turn of one token has no gaps."""
    assert percentile_metrics("ITL", "ms", ()) == ()
    assert [metric.name for metric in percentile_metrics("ITL", "ms", (1.0,))] == [
        "ITL p50",
        "ITL p95",
        "ITL p99",
        "ITL worst",
    ]


def test_record_round_trips_without_tokens() -> None:
    """The JSON has options, machine, versions, both sides and every repetition, and no token."""
    options = Options(repeat=3, token="SECRET", peers=(Peer(name="peer", url="http://h", token="SECRET"),))
    found = record.record(report(FAIR), options, machine=record.this_machine(None), date="2000-01-01T00:00:00+00:00")
    text = record.as_text(found)

    read = json.loads(text)
    assert "SECRET" not in text
    assert read["options"]["repeat"] == 3
    assert read["machine"]["usable_cores"] >= 1
    assert "inferencecenter" in read["versions"]
    assert [side["facts"]["name"] for side in read["sides"]] == ["ours", "peer"]
    assert [run[0]["value"] for run in read["points"][1]["repetitions"][0]] == [90, 100, 120]
    assert read["rows"][0]["ratios"][0]["median"] == pytest.approx(1.04)


def test_plot_draws_each_side() -> None:
    """There is one line for each side, and a circle for each of its numbers of clients."""
    drawn = ET.fromstring(plot.svg(report(FAIR)))
    tag = "{http://www.w3.org/2000/svg}"

    assert len(drawn.findall(f"{tag}polyline")) == 2
    assert len(drawn.findall(f"{tag}circle")) == 4
    texts = [element.text for element in drawn.findall(f"{tag}text")]
    assert {"ours", "peer", "tok/s", "1", "8"} <= set(texts)

"""Results of a scenario: metrics of repetitions, side by side, and the ratios between the sides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from benchmarks.stats import paired_ratio, percentiles, spread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.compare import Comparison
    from benchmarks.stats import Ratio, Spread
    from benchmarks.target import TargetFacts

Better: TypeAlias = Literal["higher", "lower"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One number; ``better`` is unset if neither direction is better, and then there is no ratio."""

    name: str
    unit: str
    value: float
    better: Better | None = None


class Result(Protocol):
    """One repetition of a scenario at one point."""

    def metrics(self) -> tuple[Metric, ...]:
        """Return its numbers in the order in which they are shown."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """What distinguishes one point of a scenario from the others, as 8 clients."""

    name: str
    value: int


@dataclass(frozen=True, slots=True)
class Side:
    """One server: its facts, and whether it may be compared with ours; our own side has no comparison."""

    facts: TargetFacts
    comparison: Comparison | None


@dataclass(frozen=True, slots=True)
class Point:
    """The repetitions of every side at one setting, in the order of the report's sides.

    A side that did not take part has none. Repetition i of one side ran next to repetition i of the others. ``sides``
    is set where servers were started for this point alone.
    """

    parameters: tuple[Parameter, ...]
    repetitions: tuple[tuple[tuple[Metric, ...], ...], ...]
    sides: tuple[Side, ...] | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """All results of one scenario; ``markdown`` is to be copied into a page."""

    scenario: str
    sides: tuple[Side, ...]
    points: tuple[Point, ...]
    markdown: str = ""

    def sides_of(self, point: Point) -> tuple[Side, ...]:
        """Return the sides of a point."""
        return point.sides or self.sides


@dataclass(frozen=True, slots=True)
class Row:
    """One metric at one point: the spread of each side, and our ratio to each other side where it may be printed."""

    parameters: tuple[Parameter, ...]
    name: str
    unit: str
    better: Better | None
    spreads: tuple[Spread | None, ...]
    ratios: tuple[Ratio | None, ...]


def rows(report: Report) -> tuple[Row, ...]:
    """Return the lines of a report's table."""
    return tuple(row for point in report.points for row in _rows_of(point, report.sides_of(point)))


def percentile_metrics(name: str, unit: str, values: Sequence[float]) -> tuple[Metric, ...]:
    """Return the four percentiles of delays as metrics; none when nothing was measured."""
    if not values:
        return ()
    found = percentiles(values)
    shown = (("p50", found.p50), ("p95", found.p95), ("p99", found.p99), ("worst", found.worst))
    return tuple(Metric(f"{name} {which}", unit, value, "lower") for which, value in shown)


def metrics_if_known(name: str, unit: str, value: float | None, better: Better | None = None) -> tuple[Metric, ...]:
    """Return one metric; none for ``None``."""
    return () if value is None else (Metric(name, unit, value, better),)


def _rows_of(point: Point, sides: Sequence[Side]) -> list[Row]:
    # By name, each once: a repetition may have numbers that the first one has not, as an error that it did not meet.
    ours = {metric.name: metric for metrics in point.repetitions[0] for metric in metrics}
    return [
        Row(
            parameters=point.parameters,
            name=metric.name,
            unit=metric.unit,
            better=metric.better,
            spreads=tuple(spread(values) if values else None for values in columns),
            ratios=tuple(
                _ratio(metric, columns[0], values, side.comparison)
                for values, side in zip(columns[1:], sides[1:], strict=True)
            ),
        )
        for metric in ours.values()
        for columns in [[_column(repetitions, metric.name) for repetitions in point.repetitions]]
    ]


def _column(repetitions: Sequence[Sequence[Metric]], name: str) -> list[float]:
    return [metric.value for metrics in repetitions for metric in metrics if metric.name == name]


def _ratio(
    metric: Metric, ours: Sequence[float], theirs: Sequence[float], comparison: Comparison | None
) -> Ratio | None:
    fair = comparison is not None and comparison.fair
    if metric.better is None or not fair or len(ours) != len(theirs) or min(theirs) <= 0:
        return None
    return paired_ratio(ours, theirs)

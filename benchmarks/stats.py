"""Statistics: percentiles, medians with their range, ratios of paired repetitions."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

_WANTED_COVERAGE: Final = 0.9


@dataclass(frozen=True, slots=True)
class Percentiles:
    """The usual percentiles of a sample, in its unit."""

    p50: float
    p95: float
    p99: float
    worst: float


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of repetitions, and the least and greatest of them."""

    median: float
    least: float
    greatest: float


@dataclass(frozen=True, slots=True)
class Difference:
    """The median of paired differences, and an interval that holds the true median with probability ``coverage``."""

    median: float
    low: float
    high: float
    coverage: float


@dataclass(frozen=True, slots=True)
class Ratio:
    """The median of paired ratios, and an interval that holds the true median with probability ``coverage``."""

    median: float
    low: float
    high: float
    coverage: float


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the least value that at least ``percent`` percent of the values do not exceed (nearest rank).

    Raises:
        ValueError: There are no values, or ``percent`` is not above 0 and at most 100.
    """
    if not values or not 0 < percent <= 100:
        raise ValueError(f"no percentile {percent} of {len(values)} values")
    return sorted(values)[math.ceil(len(values) * percent / 100) - 1]


def percentiles(values: Sequence[float]) -> Percentiles:
    """Return the median, the 95th and 99th percentile and the greatest value.

    Raises:
        ValueError: There are no values.
    """
    return Percentiles(
        p50=percentile(values, 50), p95=percentile(values, 95), p99=percentile(values, 99), worst=max(values)
    )


def spread(values: Sequence[float]) -> Spread:
    """Return the median with the least and greatest value.

    Raises:
        ValueError: There are no values.
    """
    if not values:
        raise ValueError("no values")
    return Spread(median=statistics.median(values), least=min(values), greatest=max(values))


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Return the ratio of two sides whose repetitions alternated, each repetition divided by its neighbor.

    Raises:
        ValueError: There are no pairs, the sides differ in length, or a divisor is not positive.
    """
    if not ours or len(ours) != len(theirs) or min(theirs) <= 0:
        raise ValueError("paired ratios need as many repetitions on both sides, and positive divisors")
    return Ratio(*_median_interval([our / their for our, their in zip(ours, theirs, strict=True)]))


def paired_difference(ours: Sequence[float], theirs: Sequence[float]) -> Difference:
    """Return the difference of two sides whose repetitions alternated, each repetition less its neighbor.

    Raises:
        ValueError: There are no pairs, or the sides differ in length.
    """
    if not ours or len(ours) != len(theirs):
        raise ValueError("paired differences need as many repetitions on both sides")
    return Difference(*_median_interval([our - their for our, their in zip(ours, theirs, strict=True)]))


def _median_interval(values: list[float]) -> tuple[float, float, float, float]:
    """Return the median, an interval for it, low and high, and its coverage.

    The interval lies between two of the sorted values: of n independent pairs, the true median is outside the k-th
    least and k-th greatest with probability 2·P(binomial(n, 1/2) < k), whatever the distribution. The largest k that
    keeps the coverage at 90 % is taken; fewer than five pairs reach less, and their least and greatest are returned.
    """
    values = sorted(values)
    rank = max((k for k in range(2, len(values) // 2 + 1) if _coverage(len(values), k) >= _WANTED_COVERAGE), default=1)
    return statistics.median(values), values[rank - 1], values[-rank], _coverage(len(values), rank)


def _coverage(pairs: int, rank: int) -> float:
    below = sum(math.comb(pairs, fewer) for fewer in range(rank))
    return 1.0 - math.ldexp(below, 1 - pairs)

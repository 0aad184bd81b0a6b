"""Statistics, compared with hand-computed values."""

from __future__ import annotations

import pytest

from benchmarks.stats import (
    Difference,
    Percentiles,
    Ratio,
    Spread,
    paired_difference,
    paired_ratio,
    percentile,
    percentiles,
    spread,
)


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([7.0], 50, 7.0),
        ([1.0, 2.0], 50, 1.0),
        ([3.0, 1.0, 2.0], 50, 2.0),
        ([float(n) for n in range(1, 101)], 95, 95.0),
        ([float(n) for n in range(1, 101)], 99, 99.0),
        ([float(n) for n in range(1, 101)], 99.5, 100.0),
        ([float(n) for n in range(1, 11)], 95, 10.0),
        ([float(n) for n in range(1, 11)], 100, 10.0),
    ],
)
def test_percentile_is_a_sample_value(values: list[float], percent: float, expected: float) -> None:
    """It is the smallest value that the given share of the sample does not exceed."""
    assert percentile(values, percent) == expected


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], 0), ([1.0], 101)])
def test_invalid_percentiles_are_refused(values: list[float], percent: float) -> None:
    """The sample is empty, or the percentile is out of range."""
    with pytest.raises(ValueError, match="no percentile"):
        percentile(values, percent)


def test_usual_percentiles() -> None:
    """They do not depend on the order of the values."""
    assert percentiles([float(n) for n in range(200, 0, -1)]) == Percentiles(p50=100, p95=190, p99=198, worst=200)


def test_spread_of_repetitions() -> None:
    """It has median, minimum and maximum; an even number of values has the mean of the middle two as its median."""
    assert spread([3.0, 1.0, 2.0, 10.0]) == Spread(median=2.5, least=1.0, greatest=10.0)
    with pytest.raises(ValueError, match="no values"):
        spread([])


def test_ratios_use_neighboring_repetitions() -> None:
    """A machine that slows down between repetitions does not change the ratio."""
    assert paired_ratio([10.0, 5.0, 8.0], [5.0, 2.5, 4.0]) == Ratio(median=2.0, low=2.0, high=2.0, coverage=0.75)


def test_five_pairs_give_their_whole_range() -> None:
    """The true median is outside it only if all fall on one side: 2/32."""
    found = paired_ratio([5.0, 1.0, 4.0, 2.0, 3.0], [1.0] * 5)

    assert found == Ratio(median=3.0, low=1.0, high=5.0, coverage=1 - 2 / 32)


def test_more_pairs_exclude_the_extremes() -> None:
    """With eight pairs the interval is from the second smallest to the second largest ratio."""
    found = paired_ratio([float(n) for n in range(1, 9)], [1.0] * 8)

    assert found == Ratio(median=4.5, low=2.0, high=7.0, coverage=1 - 18 / 256)


@pytest.mark.parametrize(("ours", "theirs"), [([], []), ([1.0], [1.0, 2.0]), ([1.0], [0.0])])
def test_invalid_ratios_are_refused(ours: list[float], theirs: list[float]) -> None:
    """No pairs, unequal numbers of values, and a division by zero are refused."""
    with pytest.raises(ValueError, match="paired ratios"):
        paired_ratio(ours, theirs)


def test_paired_difference_has_the_interval_of_the_ratio() -> None:
    """Each repetition less its neighbor; differences may be negative, and unequal sides are refused."""
    assert paired_difference([3.0, 1.0, 2.0], [1.0, 2.0, 2.0]) == Difference(0.0, -1.0, 2.0, 0.75)
    ratio, difference = paired_ratio(range(1, 21), [1.0] * 20), paired_difference(range(1, 21), [0.0] * 20)
    assert (difference.low, difference.high, difference.coverage) == (ratio.low, ratio.high, ratio.coverage)
    with pytest.raises(ValueError, match="on both sides"):
        paired_difference([1.0], [])

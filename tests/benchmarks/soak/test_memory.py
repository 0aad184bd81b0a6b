"""Tests of ``bench.soak.memory``, against trends worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.soak.memory import Sample, growth

MIB = 2**20


def life(pid: int, start_s: float, *mib: float) -> list[Sample]:
    """A process whose memory was read once a second."""
    return [Sample(start_s + second, pid, round(held * MIB)) for second, held in enumerate(mib)]


def test_a_trend_is_the_line_through_the_samples() -> None:
    """One MiB a second is 60 a minute; the most above the first counts from after the warm-up."""
    found = growth(life(1, 100, 50, 80, 10, 11, 12, 13), warm_up_s=2)

    assert found is not None
    assert found.mib_per_min == pytest.approx(60)
    assert found.most_mib == pytest.approx(3)


@given(st.lists(st.floats(1, 1000), min_size=2, max_size=20))
def test_memory_that_stays_has_no_trend(mib: list[float]) -> None:
    """Whatever it did before the warm-up was over."""
    found = growth(life(1, 0, *mib, *[200.0] * 10), warm_up_s=len(mib))

    assert found is not None
    assert found.mib_per_min == pytest.approx(0, abs=1e-6)
    assert found.most_mib == 0


def test_a_peak_that_is_given_back_is_seen() -> None:
    """The trend does not show it, the most above the first does."""
    found = growth(life(1, 0, 10, 10, 40, 10, 10), warm_up_s=0)

    assert found is not None
    assert found.mib_per_min == pytest.approx(0)
    assert found.most_mib == pytest.approx(30)


def test_each_process_warms_up_and_the_worst_counts() -> None:
    """The second engine begins with less memory than the first had, and that is no fall."""
    first, second = life(1, 0, 90, 100, 101), life(2, 60, 30, 50, 54, 58)

    found = growth([*first, *second], warm_up_s=1)
    assert found is not None
    assert found.mib_per_min == pytest.approx(240)
    assert found.most_mib == pytest.approx(8)


def test_what_was_not_seen_twice_after_the_warm_up_has_no_growth() -> None:
    """No samples, or too few."""
    assert growth([], warm_up_s=0) is None
    assert growth(life(1, 0, 1, 2, 3), warm_up_s=2) is None

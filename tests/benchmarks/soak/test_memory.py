"""Memory trends of the soak test, compared with hand-computed values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.soak.memory import Sample, growth

MIB = 2**20


def life(pid: int, start_s: float, *mib: float) -> list[Sample]:
    """Return a process with a memory sample each second."""
    return [Sample(start_s + second, pid, round(held * MIB)) for second, held in enumerate(mib)]


def test_trend_is_the_fitted_line() -> None:
    """One MiB a second is 60 a minute; the peak above the first sample counts after the warm-up."""
    found = growth(life(1, 100, 50, 80, 10, 11, 12, 13), warm_up_s=2)

    assert found is not None
    assert found.mib_per_min == pytest.approx(60)
    assert found.most_mib == pytest.approx(3)


@given(st.lists(st.floats(1, 1000), min_size=2, max_size=20))
def test_constant_memory_has_no_trend(mib: list[float]) -> None:
    """The warm-up does not count."""
    found = growth(life(1, 0, *mib, *[200.0] * 10), warm_up_s=len(mib))

    assert found is not None
    assert found.mib_per_min == pytest.approx(0, abs=1e-6)
    assert found.most_mib == 0


def test_released_peak_is_reported() -> None:
    """The trend does not show it, the peak does."""
    found = growth(life(1, 0, 10, 10, 40, 10, 10), warm_up_s=0)

    assert found is not None
    assert found.mib_per_min == pytest.approx(0)
    assert found.most_mib == pytest.approx(30)


def test_warm_up_applies_to_each_process_and_the_worst_counts() -> None:
    """A second engine that starts with less memory is no decrease."""
    first, second = life(1, 0, 90, 100, 101), life(2, 60, 30, 50, 54, 58)

    found = growth([*first, *second], warm_up_s=1)
    assert found is not None
    assert found.mib_per_min == pytest.approx(240)
    assert found.most_mib == pytest.approx(8)


def test_growth_requires_two_samples_after_the_warm_up() -> None:
    """Otherwise it is unknown."""
    assert growth([], warm_up_s=0) is None
    assert growth(life(1, 0, 1, 2, 3), warm_up_s=2) is None

"""Counting tokens."""

from __future__ import annotations

from inferencecenter.sessions.totals import TokenMeter


def test_the_rate_is_of_the_last_ten_seconds() -> None:
    """What was generated earlier counts in the sum only."""
    meter = TokenMeter()
    meter.add(50, now=100.2)
    meter.add(50, now=100.7)
    meter.add(20, now=108.0)
    assert meter.per_s(now=109.0) == 12
    assert meter.per_s(now=115.0) == 2
    assert meter.per_s(now=130.0) == 0
    assert meter.total == 120


def test_the_window_holds_no_more_than_its_seconds() -> None:
    """A long run leaves only the last seconds behind."""
    meter = TokenMeter()
    for second in range(1000):
        meter.add(1, now=float(second))
    assert meter.per_s(now=999.0) == 1
    assert meter.total == 1000

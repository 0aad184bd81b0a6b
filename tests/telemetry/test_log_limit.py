"""Tests of the limit on lines that others cause."""

from __future__ import annotations

from inferencecenter.telemetry.log_limit import LogLimit


def test_one_line_stands_for_all_of_an_interval() -> None:
    """The first is admitted at once; the next one after the interval says how many were held back."""
    now_s = 0.0
    limit = LogLimit(60, clock=lambda: now_s)
    assert [limit.admit() for _ in range(4)] == [0, None, None, None]
    now_s = 59.9
    assert limit.admit() is None
    now_s = 60.0
    assert limit.admit() == 4
    assert limit.admit() is None
    now_s = 1000.0
    assert limit.admit() == 1

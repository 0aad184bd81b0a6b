"""The rate limit of log lines that clients cause."""

from __future__ import annotations

from inferencecenter.telemetry.logs import LogLimit


def test_one_line_per_interval() -> None:
    """The first is logged at once; the next, after the interval, has the number suppressed."""
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

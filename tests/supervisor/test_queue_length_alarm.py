"""The alarm for a long queue."""

from __future__ import annotations

import pytest

from inferencecenter.supervisor.request_queue import QueueLengthAlarm


def test_long_queue_is_logged_once() -> None:
    """Until it has been half as long, changes around the threshold are not logged."""
    watch = QueueLengthAlarm(10)
    lengths = [9, 10, 11, 9, 10, 5, 10, 4, 9, 10, 10]
    assert [length for length, warns in ((n, watch.should_warn(n)) for n in lengths) if warns] == [10, 10]
    assert [watch.should_warn(n) for n in (5, 10, 4, 10)] == [False, False, False, True]


def test_threshold_of_one() -> None:
    """An empty queue is less than half of one turn."""
    watch = QueueLengthAlarm(1)
    assert [watch.should_warn(n) for n in (0, 1, 2, 0, 1)] == [False, True, False, False, True]


@pytest.mark.parametrize("waiting", [0, 1, 10_000])
def test_threshold_of_zero_disables_the_alarm(waiting: int) -> None:
    """The length of the queue does not matter."""
    assert not QueueLengthAlarm(0).should_warn(waiting)

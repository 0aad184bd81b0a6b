"""Deadlines of turns."""

from __future__ import annotations

import math

from inferencecenter.engine.loop import Deadlines


def test_deadlines_pass_in_their_order() -> None:
    """Each is reported once, at its second or later, whatever the order in which they were added."""
    deadlines = Deadlines(lambda _turn_id: True)
    deadlines.add("late", (3.0, 9.0))
    deadlines.add("early", (1.0,))
    assert deadlines.passed(0.5) == ()
    assert deadlines.passed(3.0) == ("early", "late")
    assert deadlines.passed(8.9) == ()
    assert deadlines.passed(9.0) == ("late",)


def test_wait_ends_at_the_next_deadline() -> None:
    """It is never negative; without deadlines it is unlimited."""
    deadlines = Deadlines(lambda _turn_id: True)
    assert deadlines.wait_s(0.0) is None
    deadlines.add("t", (5.0, math.inf))
    assert deadlines.wait_s(2.0) == 3.0
    assert deadlines.wait_s(7.0) == 0.0
    deadlines.clear()
    assert deadlines.wait_s(2.0) is None


def test_infinite_deadlines_are_not_stored() -> None:
    """Turns without limits leave no entries."""
    deadlines = Deadlines(lambda _turn_id: True)
    deadlines.add("t", (math.inf, math.inf))
    assert deadlines.wait_s(0.0) is None


def test_deadlines_of_ended_turns_are_dropped() -> None:
    """Memory stays bounded, and the deadlines of running turns still pass in order."""
    living = {f"old{number}" for number in range(10)}
    deadlines = Deadlines(living.__contains__)
    for number, turn_id in enumerate(sorted(living)):
        deadlines.add(turn_id, (10.0 + number,))
    for number in range(100_000):
        turn_id = f"t{number}"
        living.add(turn_id)
        deadlines.add(turn_id, (1e9,))
        living.discard(turn_id)
    assert len(deadlines) <= 1100
    assert deadlines.passed(1000.0) == tuple(f"old{number}" for number in range(10))

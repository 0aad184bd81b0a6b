"""When the loop looks at turns again."""

from __future__ import annotations

import math

from inferencecenter.engine.deadlines import Deadlines


def test_deadlines_pass_in_their_order() -> None:
    """Each is told once, at its second or later, whatever the order in which they were added."""
    deadlines = Deadlines()
    deadlines.add("late", (3.0, 9.0))
    deadlines.add("early", (1.0,))
    assert deadlines.passed(0.5) == ()
    assert deadlines.passed(3.0) == ("early", "late")
    assert deadlines.passed(8.9) == ()
    assert deadlines.passed(9.0) == ("late",)


def test_the_wait_ends_with_the_next_one() -> None:
    """Never less than nothing; without deadlines it has no end."""
    deadlines = Deadlines()
    assert deadlines.wait_s(0.0) is None
    deadlines.add("t", (5.0, math.inf))
    assert deadlines.wait_s(2.0) == 3.0
    assert deadlines.wait_s(7.0) == 0.0
    deadlines.clear()
    assert deadlines.wait_s(2.0) is None


def test_what_never_comes_is_not_kept() -> None:
    """Turns without limits leave nothing behind."""
    deadlines = Deadlines()
    deadlines.add("t", (math.inf, math.inf))
    assert deadlines.wait_s(0.0) is None

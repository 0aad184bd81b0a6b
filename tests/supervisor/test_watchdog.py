"""The watchdog detects an engine without progress."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.supervisor.lifecycle import POLLS, Watchdog
from tests.supervisor.timers import Timers


@dataclass
class Clock(Timers):
    """A watchdog whose timers fire on request."""

    beats: int = 0
    hangs: int = 0

    def __post_init__(self) -> None:
        self.watch = Watchdog(60.0, ticks=lambda: self.beats, on_hang=self._hang, call_later=self.call_later)

    def _hang(self) -> None:
        self.hangs += 1


def test_no_progress_for_the_timeout_is_a_hang() -> None:
    """It is reported once, after all checks of the timeout, and the watchdog stops."""
    clock = Clock()
    clock.watch.keep(watching=True)
    for _ in range(POLLS):
        assert clock.hangs == 0
        assert [call.delay_s for call in clock.pending] == [60.0 / POLLS]
        clock.fire()
    assert (clock.hangs, clock.pending) == (1, [])


def test_stopped_watchdog_has_no_timer() -> None:
    """It has none before its start, either; a second stop has no effect."""
    clock = Clock()
    assert clock.pending == []
    clock.watch.keep(watching=True)
    clock.watch.keep(watching=True)
    assert len(clock.pending) == 1
    clock.watch.keep(watching=False)
    clock.watch.keep(watching=False)
    assert clock.pending == []


def test_time_without_work_does_not_count() -> None:
    """Each watch starts over, even if the counter is unchanged."""
    clock = Clock()
    for _ in range(3):
        clock.watch.keep(watching=True)
        for _ in range(POLLS - 1):
            clock.fire()
        clock.watch.keep(watching=False)
    assert clock.hangs == 0


@given(progress=st.lists(st.integers(0, 3)))
def test_hang_is_a_run_of_checks_without_progress(progress: list[int]) -> None:
    """A hang is reported exactly when the counter stayed the same for the last checks."""
    clock = Clock()
    clock.watch.keep(watching=True)
    row = 0
    for step in progress:
        clock.beats += step
        clock.fire()
        row = 0 if step else row + 1
        assert clock.hangs == (row == POLLS)
        if clock.hangs:
            break

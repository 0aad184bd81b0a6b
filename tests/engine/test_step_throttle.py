"""Pauses after steps, on a clock that the test advances."""

from __future__ import annotations

from inferencecenter.engine.inbox import Command, Inbox, KvFetched, StepThrottle


class Clocked(Inbox):
    """An inbox with its own clock: waiting advances it, and ``arrivals`` are delivered at their times."""

    def __init__(self, *arrivals_s: float) -> None:
        super().__init__()
        self.now = 0.0
        self.arrivals_s = list(arrivals_s)

    def get(self, *, timeout_s: float | None) -> Command | None:
        """Wait on the clock."""
        assert timeout_s is not None
        until = self.now + timeout_s
        if self.arrivals_s and self.arrivals_s[0] < until:
            self.now = self.arrivals_s.pop(0)
            return KvFetched()
        self.now = until
        return None


def paused(inbox: Clocked, length_s: float) -> StepThrottle:
    """Return a pause that has just started."""
    pause = StepThrottle(inbox, clock=lambda: inbox.now)
    pause.change(length_s)
    pause.begin()
    return pause


def test_throttle_without_a_length_is_off() -> None:
    """It does not wait, and does not read the clock."""
    inbox = Clocked(0.1)
    pause = StepThrottle(inbox, clock=lambda: 1 / 0)
    pause.begin()
    assert pause.command() is None
    assert inbox.now == 0.0


def test_throttle_lasts_its_length() -> None:
    """Commands are handled as they arrive, and the rest of the pause follows."""
    inbox = Clocked(0.1, 0.15)
    pause = paused(inbox, 0.2)
    heard = []
    while (command := pause.command()) is not None:
        heard.append((command, inbox.now))
    assert heard == [(KvFetched(), 0.1), (KvFetched(), 0.15)]
    assert inbox.now == 0.2
    assert pause.command() is None
    assert inbox.now == 0.2


def test_new_throttle_length_ends_the_current_pause() -> None:
    """A length sent during a pause applies at once."""
    inbox = Clocked(0.1)
    pause = paused(inbox, 0.2)
    assert pause.command() is not None
    pause.change(0.0)
    assert pause.command() is None
    assert inbox.now == 0.1


def test_pause_lasts_at_least_as_long_as_the_step_requests() -> None:
    """This holds without a configured length; otherwise the longer one counts."""
    inbox = Clocked()
    pause = StepThrottle(inbox, clock=lambda: inbox.now)
    for length_s, least_s in ((0.0, 0.25), (0.25, 0.125)):
        pause.change(length_s)
        begun = inbox.now
        pause.begin(least_s=least_s)
        assert pause.command() is None
        assert inbox.now - begun == 0.25

"""Pauses after steps, on a clock that the test moves."""

from __future__ import annotations

from inferencecenter.engine.loop import Command, Inbox, KvFetched, StepThrottle


class Clocked(Inbox):
    """An inbox on a clock of its own: waiting lets time go by, and ``arrivals`` come in when theirs has come."""

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
    """Return a pause that has just begun."""
    pause = StepThrottle(inbox, clock=lambda: inbox.now)
    pause.change(length_s)
    pause.begin()
    return pause


def test_throttle_without_a_length_is_off() -> None:
    """Nothing is waited for, and the clock is not even looked at."""
    inbox = Clocked(0.1)
    pause = StepThrottle(inbox, clock=lambda: 1 / 0)
    pause.begin()
    assert pause.command() is None
    assert inbox.now == 0.0


def test_throttle_lasts_its_length() -> None:
    """Commands are handed over when they come, and the rest of the pause follows."""
    inbox = Clocked(0.1, 0.15)
    pause = paused(inbox, 0.2)
    heard = []
    while (command := pause.command()) is not None:
        heard.append((command, inbox.now))
    assert heard == [(KvFetched(), 0.1), (KvFetched(), 0.15)]
    assert inbox.now == 0.2
    assert pause.command() is None
    assert inbox.now == 0.2


def test_a_new_length_ends_it() -> None:
    """What is told in a pause holds from then on."""
    inbox = Clocked(0.1)
    pause = paused(inbox, 0.2)
    assert pause.command() is not None
    pause.change(0.0)
    assert pause.command() is None
    assert inbox.now == 0.1

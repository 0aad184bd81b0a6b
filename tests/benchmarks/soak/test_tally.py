"""The tally of the soak test."""

from __future__ import annotations

from benchmarks.observed_turn import ObservedTurn
from benchmarks.soak.actions import Kind
from benchmarks.soak.tally import Tally, Timed, thirds


def observed_turn(text: str, *finishes: str, times_s: tuple[float, ...] = (2.0, 3.0, 5.0)) -> ObservedTurn:
    """Return a turn that began at 1."""
    return ObservedTurn(1.0, times_s=list(times_s), text=text, finishes=list(finishes), ended_s=5.0)


def test_successful_turn_records_only_delays() -> None:
    """They are from its request to its first text, and between its texts."""
    tally = Tally()
    tally.turn(Kind.TALK, observed_turn("abc", "length"), transcript="abc")

    assert tally.ttft == [Timed(1.0, 1000)]
    assert tally.itl == [Timed(2.0, 1000), Timed(3.0, 2000)]
    assert (tally.not_ended_once, tally.unlike_transcript, tally.errors.total()) == (0, 0, 0)


def test_delays_of_inactive_readers_are_separate() -> None:
    """These are slow readers and disconnected clients."""
    tally = Tally()
    for kind in (Kind.DROP, Kind.DAWDLE):
        tally.turn(kind, observed_turn("abc", "length"), transcript="abc")

    assert tally.ttft == tally.itl == []


def test_different_texts_are_counted() -> None:
    """Lost and repeated characters are counted separately."""
    tally = Tally()
    tally.turn(Kind.DROP, observed_turn("one three", "stop"), transcript="one two three")
    tally.turn(Kind.DROP, observed_turn("one one ", "stop"), transcript="one ")

    assert (tally.lost_chars, tally.extra_chars, tally.unlike_transcript) == (4, 4, 2)


def test_turn_must_end_exactly_once() -> None:
    """No end and a second end are errors."""
    tally = Tally()
    for finishes in (("length",), ("length", "length"), ()):
        tally.turn(Kind.TALK, observed_turn("a", *finishes), transcript="a")

    assert tally.not_ended_once == 2


def test_expected_errors_are_separate() -> None:
    """Only an abort explains an aborted turn or ``nothing_to_abort``."""
    tally = Tally()
    tally.turn(Kind.ABORT, observed_turn("a", "aborted"), transcript="a")
    tally.error(Kind.ABORT, "nothing_to_abort")
    tally.error(Kind.DAWDLE, "daemon_unreachable")
    assert not tally.unexplained()

    tally.turn(Kind.TALK, observed_turn("a", "aborted"), transcript="a")
    tally.turn(Kind.ABORT, observed_turn("a", "engine_crashed"), transcript="a")
    tally.error(Kind.DROP, "daemon_unreachable")
    assert tally.unexplained() == {
        (Kind.TALK, "aborted"): 1,
        (Kind.ABORT, "engine_crashed"): 1,
        (Kind.DROP, "daemon_unreachable"): 1,
    }


def test_delays_are_grouped_by_their_start() -> None:
    """The middle third belongs to neither group."""
    delays = [Timed(at_s, at_s * 10) for at_s in (10, 19, 20, 29, 30, 39)]

    assert thirds(delays, start_s=10, end_s=40) == ([100, 190], [300, 390])

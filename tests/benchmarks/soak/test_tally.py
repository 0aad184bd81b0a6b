"""Tests of ``bench.soak.tally``."""

from __future__ import annotations

from benchmarks.shown import Shown
from benchmarks.soak.acts import Kind
from benchmarks.soak.tally import Tally, Timed, thirds


def shown(text: str, *finishes: str, times_s: tuple[float, ...] = (2.0, 3.0, 5.0)) -> Shown:
    """A turn that began at 1."""
    return Shown(1.0, times_s=list(times_s), text=text, finishes=list(finishes), ended_s=5.0)


def test_a_turn_that_went_well_leaves_delays_only() -> None:
    """From its request to its first text, and between its texts."""
    tally = Tally()
    tally.turn(Kind.TALK, shown("abc", "length"), transcript="abc")

    assert tally.ttft == [Timed(1.0, 1000)]
    assert tally.itl == [Timed(2.0, 1000), Timed(3.0, 2000)]
    assert (tally.not_ended_once, tally.unlike_transcript, tally.errors.total()) == (0, 0, 0)


def test_delays_of_clients_that_did_not_read_are_their_own() -> None:
    """Slow readers and those that had no connection for a while."""
    tally = Tally()
    for kind in (Kind.DROP, Kind.DAWDLE):
        tally.turn(kind, shown("abc", "length"), transcript="abc")

    assert tally.ttft == tally.itl == []


def test_texts_that_differ_are_counted() -> None:
    """With what is lost and what is there twice; also text that was shown and taken back."""
    tally = Tally()
    tally.turn(Kind.DROP, shown("one three", "stop"), transcript="one two three")
    tally.turn(Kind.DROP, shown("one one ", "stop"), transcript="one ")
    taken_back = shown("one", "stop")
    taken_back.unsaid = 1
    tally.turn(Kind.DROP, taken_back, transcript="one")

    assert (tally.lost_chars, tally.extra_chars, tally.unlike_transcript) == (4, 4, 3)


def test_a_turn_ends_once() -> None:
    """Not twice, and not never."""
    tally = Tally()
    for finishes in (("length",), ("length", "length"), ()):
        tally.turn(Kind.TALK, shown("a", *finishes), transcript="a")

    assert tally.not_ended_once == 2


def test_errors_are_explained_by_what_the_client_did() -> None:
    """Only an abort explains an aborted turn, and that there is nothing to abort."""
    tally = Tally()
    tally.turn(Kind.ABORT, shown("a", "aborted"), transcript="a")
    tally.error(Kind.ABORT, "nothing_to_abort")
    tally.error(Kind.DAWDLE, "daemon_unreachable")
    assert not tally.unexplained()

    tally.turn(Kind.TALK, shown("a", "aborted"), transcript="a")
    tally.turn(Kind.ABORT, shown("a", "engine_crashed"), transcript="a")
    tally.error(Kind.DROP, "daemon_unreachable")
    assert tally.unexplained() == {
        (Kind.TALK, "aborted"): 1,
        (Kind.ABORT, "engine_crashed"): 1,
        (Kind.DROP, "daemon_unreachable"): 1,
    }


def test_delays_are_parted_by_when_they_began() -> None:
    """The middle third belongs to neither."""
    delays = [Timed(at_s, at_s * 10) for at_s in (10, 19, 20, 29, 30, 39)]

    assert thirds(delays, start_s=10, end_s=40) == ([100, 190], [300, 390])

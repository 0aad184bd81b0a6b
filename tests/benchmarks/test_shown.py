"""Tests of ``bench.shown``: what was lost, what was said twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.peers.line import Frame, TurnUsage
from benchmarks.shown import Difference, Shown, difference

TEXTS = st.text("abc ", max_size=40)


@given(TEXTS)
def test_equal_texts_do_not_differ(text: str) -> None:
    """Nothing lost, nothing extra, no place."""
    assert difference(text, text) == Difference(0, 0, None)


@given(TEXTS, TEXTS)
def test_differences_account_for_the_lengths(said: str, shown: str) -> None:
    """What is lost and what is extra make up the difference in length; texts part where their beginnings end."""
    found = difference(said, shown)

    assert len(said) - found.lost_chars + found.extra_chars == len(shown)
    assert (found.first is None) == (said == shown)
    if found.first is not None:
        assert said[: found.first] == shown[: found.first]
        assert said[found.first : found.first + 1] != shown[found.first : found.first + 1]


@given(TEXTS, st.data())
def test_what_is_cut_out_is_lost(said: str, data: st.DataObject) -> None:
    """And nothing is extra."""
    start = data.draw(st.integers(0, len(said)))
    end = data.draw(st.integers(start, len(said)))

    found = difference(said, said[:start] + said[end:])
    assert found.lost_chars - found.extra_chars == end - start


def test_a_piece_that_came_twice_is_extra() -> None:
    """Its characters are counted, and the place is where it came again."""
    assert difference("one two three", "one two two three") == Difference(0, 4, 9)


def test_a_piece_that_did_not_come_is_lost() -> None:
    """As the middle of a sentence."""
    assert difference("one two three", "one three") == Difference(4, 0, 5)


def _token(seq: int, content: str) -> Frame:
    return Frame("token", session_id="s", turn_id="t", seq=seq, content=content)


def _end(seq: int) -> Frame:
    return Frame("end", session_id="s", turn_id="t", seq=seq, finish_reason="length", usage=TurnUsage(10, 4, 2))


def test_a_turn_grows_to_its_end() -> None:
    """Text, times, usage and the one end."""
    shown = Shown(1.0)
    for now_s, frame in (
        (1.5, Frame("queued", seq=7)),
        (2.0, _token(8, "a")),
        (3.0, _token(10, "bc")),
        (3.5, _end(11)),
    ):
        shown.take(frame, now_s=now_s)

    assert (shown.text, shown.times_s, shown.ended_s) == ("abc", [2.0, 3.0], 3.5)
    assert (shown.finishes, shown.usage, shown.seq) == (["length"], TurnUsage(10, 4, 2), 11)
    assert (shown.misnumbered, shown.unsaid) == (0, 0)


def test_a_second_end_is_seen() -> None:
    """It does not move the time of the first."""
    shown = Shown(1.0)
    shown.take(_end(1), now_s=2.0)
    shown.take(Frame("error", turn_id="t", seq=2, code="engine_crashed"), now_s=3.0)

    assert shown.finishes == ["length", "engine_crashed"]
    assert shown.ended_s == 2.0


def test_numbers_that_do_not_rise_are_counted() -> None:
    """An event that came before comes again, also one of the events known from an earlier connection."""
    shown = Shown(1.0)
    shown.begin_at(4)
    for seq in (4, 5, 5, 7):
        shown.take(_token(seq, "x"), now_s=2.0)

    assert shown.misnumbered == 2


def test_starting_over_must_contain_what_was_shown() -> None:
    """Text that was shown and is not part of the answer any more is noted."""
    shown = Shown(1.0)
    shown.take(_token(3, "one "), now_s=2.0)
    shown.start_over("one two ", seq=5)
    assert (shown.text, shown.seq, shown.unsaid) == ("one two ", 5, 0)

    shown.start_over("other", seq=9)
    assert shown.unsaid == 1

"""Comparison of the shown text with the answer: lost and repeated characters."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.observed_turn import Difference, ObservedTurn, difference
from benchmarks.peers.line import Frame, TurnUsage

TEXTS = st.text("abc ", max_size=40)


@given(TEXTS)
def test_equal_texts_have_no_difference(text: str) -> None:
    """No text is lost or extra, and there is no position."""
    assert difference(text, text) == Difference(0, 0, None)


@given(TEXTS, TEXTS)
def test_differences_account_for_the_lengths(expected: str, shown: str) -> None:
    """Lost and extra characters make up the difference in length; the position is the end of the common prefix."""
    found = difference(expected, shown)

    assert len(expected) - found.lost_chars + found.extra_chars == len(shown)
    assert (found.first is None) == (expected == shown)
    if found.first is not None:
        assert expected[: found.first] == shown[: found.first]
        assert expected[found.first : found.first + 1] != shown[found.first : found.first + 1]


@given(TEXTS, st.data())
def test_removed_text_is_lost(expected: str, data: st.DataObject) -> None:
    """No text is extra."""
    start = data.draw(st.integers(0, len(expected)))
    end = data.draw(st.integers(start, len(expected)))

    found = difference(expected, expected[:start] + expected[end:])
    assert found.lost_chars - found.extra_chars == end - start


def test_repeated_piece_is_extra() -> None:
    """Its characters are counted, at the position of the repetition."""
    assert difference("one two three", "one two two three") == Difference(0, 4, 9)


def test_missing_piece_is_lost() -> None:
    """The piece is within a sentence."""
    assert difference("one two three", "one three") == Difference(4, 0, 5)


def _token(seq: int, content: str) -> Frame:
    return Frame("token", session_id="s", turn_id="t", seq=seq, content=content)


def _end(seq: int) -> Frame:
    return Frame("end", session_id="s", turn_id="t", seq=seq, finish_reason="length", usage=TurnUsage(10, 4, 2))


def test_turn_accumulates_to_its_end() -> None:
    """It has the text, the time of each piece, the usage, the last number and one end."""
    shown = ObservedTurn(1.0)
    for now_s, frame in (
        (1.5, Frame("queued", seq=7)),
        (2.0, _token(8, "a")),
        (3.0, _token(10, "bc")),
        (3.5, _end(11)),
    ):
        shown.take(frame, now_s=now_s)

    assert (shown.text, shown.times_s, shown.ended_s) == ("abc", [2.0, 3.0], 3.5)
    assert (shown.finishes, shown.usage, shown.seq) == (["length"], TurnUsage(10, 4, 2), 11)
    assert shown.misnumbered == 0


def test_second_end_is_recorded() -> None:
    """The time of the first end stays."""
    shown = ObservedTurn(1.0)
    shown.take(_end(1), now_s=2.0)
    shown.take(Frame("error", turn_id="t", seq=2, code="engine_crashed"), now_s=3.0)

    assert shown.finishes == ["length", "engine_crashed"]
    assert shown.ended_s == 2.0


def test_non_increasing_numbers_are_counted() -> None:
    """An event whose number is not above that of the one before is counted."""
    shown = ObservedTurn(1.0)
    shown.begin_at(4)
    for seq in (4, 5, 5, 7):
        shown.take(_token(seq, "x"), now_s=2.0)

    assert shown.misnumbered == 2

"""Timelines, compared with hand-computed times."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import timeline
from benchmarks.target import TurnTrace
from benchmarks.timeline import Window


def turn(started_s: float, *token_times_s: float, tokens: int | None = None, cached: int | None = None) -> TurnTrace:
    """Return a turn that ends with its last piece of text."""
    return TurnTrace(
        started_s=started_s,
        token_times_s=token_times_s,
        ended_s=token_times_s[-1],
        prompt_tokens=100,
        tokens=len(token_times_s) if tokens is None else tokens,
        cached_tokens=cached,
    )


def test_busy_window_excludes_warm_up_and_tail() -> None:
    """It is from the last client's first counted turn to the first client's last one."""
    early = [turn(0, 1), turn(1, 2), turn(2, 9)]
    late = [turn(0, 4), turn(4, 8), turn(8, 12)]

    assert timeline.busy_window([early, late], warm_up_turns=1) == Window(4, 9)


def test_decode_window_contains_only_decode() -> None:
    """It is from the last first text to the first last text."""
    window = timeline.decode_window([turn(0, 2, 3, 10), turn(0, 4, 5, 8)])

    assert window == Window(4, 8)
    assert window.length_s == 4


def test_tokens_are_counted_inside_the_window() -> None:
    """Its first instant is excluded, its last is included."""
    assert timeline.tokens_in([turn(0, 1, 2, 3, 4), turn(0, 3.5, 9)], Window(2, 4)) == 3
    assert timeline.pieces_in([turn(0, 1, 2, 3, 4), turn(0, 3.5, 9)], Window(2, 4)) == 3


def test_piece_counts_its_tokens() -> None:
    """A turn of eight tokens in four pieces: two pieces are four tokens."""
    assert timeline.tokens_in([turn(0, 1, 2, 3, 4, tokens=8)], Window(2, 4)) == 4


def test_turn_without_text_is_one_piece_at_its_end() -> None:
    """Its token was a control token or part of a character."""
    silent = TurnTrace(started_s=0, token_times_s=(), ended_s=2, prompt_tokens=5, tokens=1)

    assert timeline.tokens_in([silent], Window(0, 2)) == 1
    assert timeline.ttft_ms([silent]) == [2000]
    assert timeline.itl_ms([silent]) == []
    assert timeline.prefill_tok_s([silent]) == 2.5
    assert timeline.decode_window([silent]) == Window(2, 2)


def test_delays() -> None:
    """Delays are from the request to the first text, and between pieces of one turn, never across turns."""
    turns = [turn(1, 1.5, 1.75), turn(2, 4, 4.5, 5.5)]

    assert timeline.ttft_ms(turns) == [500, 2000]
    assert timeline.itl_ms(turns) == [250, 500, 1000]


def test_gaps_inside_a_window_have_both_ends_in_it() -> None:
    """The edges belong to the window; partly overlapping gaps are excluded."""
    turns = [turn(0, 1, 2, 4, 7), turn(0, 1.5, 3.5, 5)]

    assert timeline.itl_inside_ms(turns, Window(2, 5)) == [2000, 1500]
    assert timeline.itl_inside_ms(turns, Window(1, 2)) == [1000]


def test_overlapping_gaps_count_whole() -> None:
    """A pause across the window has its full length; one that only touches its edge is excluded."""
    turns = [turn(0, 1, 2, 9), turn(0, 3, 4, 6, 7)]

    assert timeline.itl_touching_ms(turns, Window(4, 6)) == [7000, 2000]
    assert timeline.itl_touching_ms(turns, Window(1, 3.5)) == [1000, 7000, 1000]


def test_span_is_from_first_request_to_last_end() -> None:
    """It covers all turns."""
    assert timeline.span([turn(1, 2, 3), turn(0.5, 2.5), turn(2, 9)]) == Window(0.5, 9)


def test_sequential_turns_are_one_answer_apart() -> None:
    """The second has nothing until the first is done: two tokens apart before the first one's third and last."""
    assert timeline.spread_tokens([turn(0, 1, 2, 3), turn(0, 4, 5, 6)]) == 2


def test_alternating_turns_are_one_quantum_apart() -> None:
    """Two tokens each in turn: 2-0, 2-2, 4-2, 4-4, then the first is done with its sixth."""
    first, second = turn(0, 1, 2, 5, 6, 9, 10), turn(0, 3, 4, 7, 8, 11, 12)

    assert timeline.spread_tokens([first, second]) == 2


def test_spread_covers_running_turns() -> None:
    """Turns before their start or after their end do not count; a piece counts as its tokens."""
    assert timeline.spread_tokens([turn(0, 1, 2, 3)]) == 0
    assert timeline.spread_tokens([turn(0, 1, 2, 3), turn(4, 5, 6)]) == 0
    # At 1.5 the second arrives, at 2 the first has 6 of 9 tokens.
    assert timeline.spread_tokens([turn(0, 1, 2, 3, tokens=9), turn(1.5, 4)]) == 6
    # At 4 the second has 3 tokens and the third none yet.
    assert timeline.spread_tokens([turn(0, 1, 6), turn(0, 2, 3, 4, 7), turn(0, 5, 8)]) == 3


@given(st.lists(st.lists(st.floats(0.001, 10), min_size=1, max_size=20), min_size=1, max_size=6))
def test_spread_is_bounded_by_the_longest_answer(gaps_s: list[list[float]]) -> None:
    """It is non-negative and below the answer's length, whatever the times."""
    turns = [turn(0, *itertools.accumulate(each)) for each in gaps_s]

    assert 0 <= timeline.spread_tokens(turns) <= max(each.tokens for each in turns) - 1


def test_prefilled_tokens() -> None:
    """Cached tokens do not count, and the sum is unknown if one turn's cached tokens are."""
    assert timeline.tokens_read([turn(0, 1, cached=0), turn(0, 1, cached=70)]) == 130
    assert timeline.tokens_read([turn(0, 1, cached=0), turn(0, 1)]) is None


def test_prefill_rate_ends_with_the_last_first_text() -> None:
    """150 of 200 prompt tokens are prefilled in the three seconds up to the last first text."""
    assert timeline.prefill_tok_s([turn(1, 2), turn(1, 4, cached=50)]) == pytest.approx(50)

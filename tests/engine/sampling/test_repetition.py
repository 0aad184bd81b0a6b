"""Loop detection."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.engine.sampling.text import RepetitionDetector


def first_alarm(repeats: int, tokens: list[int]) -> int | None:
    """Return the number of tokens after which a loop was detected."""
    detector = RepetitionDetector(repeats)
    return next((count for count, token in enumerate(tokens, start=1) if detector.push(token)), None)


@pytest.mark.parametrize("repeats", [2, 3, 7])
@pytest.mark.parametrize("length", [2, 3, 10, 63, 64])
def test_loop_is_detected_at_its_last_token(repeats: int, length: int) -> None:
    """The token that completes the last repetition triggers it, whatever came before."""
    before = [1000, 1001, 1002]
    assert first_alarm(repeats, before + list(range(length)) * 10) == len(before) + length * repeats


def test_runs_above_the_window_are_not_detected() -> None:
    """Runs of 65 tokens exceed the window."""
    assert first_alarm(2, list(range(65)) * 5) is None


@pytest.mark.parametrize("repeats", [2, 3, 7])
def test_single_token_must_repeat_four_times_as_often(repeats: int) -> None:
    """A ruler of dashes is not a loop yet."""
    assert first_alarm(repeats, [5] * 100) == repeats * 4
    assert first_alarm(repeats, [*range(10), *[5] * (repeats * 4 - 1), *range(10, 20)]) is None


@given(st.lists(st.integers(0, 2), max_size=60), st.integers(2, 4))
def test_detection_equals_a_comparison_of_slices(tokens: list[int], repeats: int) -> None:
    """Each detection equals a plain comparison of the last runs."""
    detector = RepetitionDetector(repeats)
    for end in range(1, len(tokens) + 1):
        expected = False
        for length in range(1, 65):
            needed = length * repeats if length > 1 else 4 * repeats
            tail = tokens[max(0, end - needed) : end]
            if len(tail) < needed or (length > 1 and len(set(tail)) == 1):
                continue
            expected = expected or tail == tail[:length] * (needed // length)
        assert detector.push(tokens[end - 1]) == expected

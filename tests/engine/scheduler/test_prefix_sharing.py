"""The longest common prefix."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.engine.scheduler.placement import common_prefix_tokens

tokens = st.lists(st.integers(0, 2), max_size=40)


@given(tokens, tokens, tokens)
def test_prefix_match_equals_counting(shared: list[int], a: list[int], b: list[int]) -> None:
    """It equals a comparison token by token."""
    left, right = shared + a, shared + b
    same = [x == y for x, y in zip(left, right, strict=False)]
    expected = same.index(False) if False in same else len(same)
    assert common_prefix_tokens(left, right) == expected == common_prefix_tokens(right, left)


def test_long_histories_that_differ_at_one_place() -> None:
    """A difference deep in a long history is found exactly."""
    held = list(range(100_000))
    for place in (0, 1, 49_999, 99_999):
        changed = held.copy()
        changed[place] = -1
        assert common_prefix_tokens(held, changed) == place

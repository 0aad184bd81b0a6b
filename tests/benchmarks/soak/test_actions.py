"""Tests of ``benchmarks.soak.actions``."""

from __future__ import annotations

import random
from collections import Counter
from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.soak.actions import Bounds, Kind, actions

BOUNDS = Bounds(least_prompt_tokens=2, prompt_tokens=256, max_tokens=128, pause_s=3.0)


def test_seed_determines_the_acts() -> None:
    """Another seed gives other actions."""
    first, again, other = (list(islice(actions(random.Random(seed), BOUNDS), 50)) for seed in (1, 1, 2))

    assert first == again != other


@given(
    st.integers(0, 2**32),
    st.builds(
        lambda least, more, answer, pause_s: Bounds(
            least_prompt_tokens=least, prompt_tokens=least + more, max_tokens=answer, pause_s=pause_s
        ),
        st.integers(1, 10),
        st.integers(0, 500),
        st.integers(1, 500),
        st.floats(0.001, 10),
    ),
)
def test_actions_stay_within_their_bounds(seed: int, bounds: Bounds) -> None:
    """Prompt, answer and pause are within the bounds, and a turn's action comes before the end of the answer."""
    for action in islice(actions(random.Random(seed), bounds), 30):
        assert bounds.least_prompt_tokens <= action.prompt_tokens <= bounds.prompt_tokens
        assert 1 <= action.after_pieces <= action.max_tokens <= bounds.max_tokens
        assert 0 < action.pause_s <= bounds.pause_s
        assert 0 <= action.choice < 1


def test_all_acts_occur_and_lengths_are_log_uniform() -> None:
    """Conversations are the most frequent, and half of the answers are below the middle order of magnitude."""
    drawn = list(islice(actions(random.Random(3), BOUNDS), 4000))
    kinds = Counter(action.kind for action in drawn)

    assert set(kinds) == set(Kind)
    assert kinds.most_common(1)[0][0] is Kind.TALK
    short = sum(action.max_tokens < 11 for action in drawn)
    assert 0.4 < short / len(drawn) < 0.6

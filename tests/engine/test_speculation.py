"""Guessing what a turn says next."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.engine.backend import DraftRequest
from inferencecenter.engine.echo import EchoBackend
from inferencecenter.engine.loop import draft_tokens
from inferencecenter.engine.speculation import (
    ROW_COST,
    Drafter,
    ModelOdds,
    TokenIndex,
    allot,
    continuation,
    most_drafts,
)
from inferencecenter.ipc.engine_options import EngineOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

few_tokens = st.lists(st.integers(0, 3), max_size=200)
any_tokens = st.lists(st.integers(0, 2**31 - 1), max_size=60)


def index_of(tokens: list[int], *sizes: int, n_tokens: int = 4096) -> TokenIndex:
    """Return an index that has taken in all these tokens."""
    index = TokenIndex(sizes, n_tokens)
    while not index.catch_up(tokens):
        pass
    return index


@given(few_tokens | any_tokens)
def test_draft_continues_an_earlier_occurrence(tokens: list[int]) -> None:
    """It is the latest place before the end where the same tokens stood."""
    size, position = index_of(tokens, 2, 4).find(tokens)
    ends = tokens[len(tokens) - size :]
    places = [at for at in range(size, len(tokens)) if tokens[at - size : at] == ends]
    assert (size, position) == (0, 0) or position == max(places)


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ([], (0, 0)),
        ([1, 2], (0, 0)),
        ([1, 2, 3], (0, 0)),
        ([7, 7, 7], (2, 2)),
        ([1, 2, 9, 1, 2], (2, 2)),
        ([1, 2, 3, 4, 9, 5, 2, 3, 4], (2, 4)),
        ([1, 2, 3, 4, 9, 1, 2, 3, 4], (4, 4)),
        ([1, 2, 3, 4, 8, 3, 4, 9, 1, 2, 3, 4], (4, 4)),
        ([1, 2, 5, 1, 2, 6, 1, 2], (2, 5)),
    ],
)
def test_the_most_tokens_are_found_where_they_stood_last(tokens: list[int], found: tuple[int, int]) -> None:
    """Four rather than two, and of several places the latest."""
    assert index_of(tokens, 2, 4).find(tokens) == found


@given(few_tokens, st.lists(st.integers(1, 9), max_size=30))
def test_index_does_not_depend_on_growth(tokens: list[int], portions: list[int]) -> None:
    """Taken in token by token or at once, the same is found."""
    index = TokenIndex((1, 3), 4096)
    end = 0
    for portion in portions:
        end = min(end + portion, len(tokens))
        assert index.catch_up(tokens[:end])
    index.catch_up(tokens)
    assert index.find(tokens) == index_of(tokens, 1, 3).find(tokens)


def test_long_prompt_is_indexed_over_several_steps() -> None:
    """No step waits for more than a thousand tokens of it."""
    tokens = [1, 2, 3, *range(10, 2500), 1200, 1201]
    index = TokenIndex((2,), 4096)
    assert [index.catch_up(tokens) for _ in range(3)] == [False, False, True]
    assert index.find(tokens) == (2, tokens.index(1202))


def test_memory_is_bounded() -> None:
    """A context of a million tokens takes two tables of 256 KiB, in which older places give way to later ones."""
    tokens = [*range(200_000), 199_000, 199_001]
    index = index_of(tokens, 2, 4, n_tokens=2**20)
    assert sum(sys.getsizeof(table) for _, table in index._tables) < 2**20
    assert index.find(tokens) == (2, 199_002)


@given(few_tokens.filter(bool), st.data(), st.integers(0, 20))
def test_resumed_drafting_equals_uninterrupted(tokens: list[int], data: st.DataObject, n_tokens: int) -> None:
    """Each token is the one that stood as far behind the place; near the end the place is repeated."""
    position = data.draw(st.integers(0, len(tokens) - 1))
    drafts = continuation(tokens, position, n_tokens)
    assert len(drafts) == n_tokens
    whole = tokens + drafts
    assert all(whole[len(tokens) + at] == whole[position + at] for at in range(n_tokens))


def say(drafter: Drafter, tokens: list[int], answer: list[int], *, most: int = 8) -> tuple[int, int, int]:
    """Let a lone turn say ``answer``; return its steps, its drafts, and those that were right."""
    steps = drafted = right = 0
    left = list(answer)
    while left:
        (n_drafts,) = allot([drafter.look(tokens)], each=most, together=most)
        drafts = drafter.draft(tokens, n_drafts) if n_drafts else []
        accepted = 0
        while accepted < min(n_drafts, len(left) - 1) and drafts[accepted] == left[accepted]:
            accepted += 1
        tokens += left[: accepted + 1]
        del left[: accepted + 1]
        drafter.observe(accepted, n_tokens=len(tokens))
        steps, drafted, right = steps + 1, drafted + n_drafts, right + accepted
    return steps, drafted, right


def test_text_that_repeats_itself_takes_few_steps() -> None:
    """A line said over and over is drafted whole before long."""
    steps, drafted, right = say(Drafter(4096), [1, 2], [5, 6, 7, 8, 9, 10] * 50)
    assert steps < 50
    assert right / drafted > 0.9


def test_text_that_never_repeats_itself_is_not_drafted() -> None:
    """Nothing is found, so nothing is tried."""
    assert say(Drafter(4096), [1, 2], list(range(10, 510))) == (500, 0, 0)


def test_drafts_that_are_wrong_are_given_up() -> None:
    """Where the same two tokens go on differently each time, a draft is tried ever more seldom."""
    answer = [token for n in range(400) for token in (1, 2, 10 + n)]
    steps, drafted, right = say(Drafter(4096), [], answer)
    assert (steps, right) == (len(answer), 0)
    assert 0 < drafted * ROW_COST < 0.01 * steps


def test_drafting_resumes_after_a_pause() -> None:
    """After a long stretch of bad guesses a repeated passage is noticed."""
    drafter = Drafter(8192)
    tokens: list[int] = []
    noise = [token for n in range(300) for token in (1, 2, 100 + n)]
    say(drafter, tokens, noise)
    steps, _, _ = say(drafter, tokens, list(range(3, 20)) * 30)
    assert steps < 0.6 * 17 * 30


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=12),
    st.integers(1, 16),
    st.integers(-3, 40),
)
def test_draft_lengths_are_equal_and_fit(chances: list[float], each: int, together: int) -> None:
    """No turn exceeds its limit or the common one, those without a chance draft nothing, the others alike."""
    lengths = allot(chances, each=each, together=together)
    assert len(lengths) == len(chances)
    assert sum(lengths) <= max(0, together)
    assert all(0 <= length <= each for length in lengths)
    assert all(length == 0 for length, chance in zip(lengths, chances, strict=True) if chance <= ROW_COST)
    assert len({length for length in lengths if length}) <= 1


@pytest.mark.parametrize(
    ("chances", "lengths"),
    [
        ([0.0], [0]),
        ([ROW_COST], [0]),
        ([0.3], [1]),
        ([0.5], [1]),
        ([0.95], [8]),
        ([0.95, 0.95], [6, 6]),
        ([0.95, 0.0], [8, 0]),
        ([0.6, 0.0, 0.0, 0.0], [0, 0, 0, 0]),
        ([0.95] * 8, [2] * 8),
        ([0.99, 0.0] * 4, [0] * 8),
    ],
)
def test_draft_length_maximises_throughput(chances: list[float], lengths: list[int]) -> None:
    """The likelier, the longer; among many who do not draft it is not worth a computation of its own."""
    assert allot(chances, each=8, together=most_drafts(8)) == lengths


@pytest.mark.parametrize(
    ("chances", "by_model", "draft_cost", "lengths"),
    [
        ([0.95], [0], 0.1, [7]),
        ([0.95], [0], 0.5, [3]),
        ([0.7], [0], 0.2, [1]),
        ([0.95] * 4, range(4), 0.1, [3] * 4),
        ([0.8] * 8, range(8), 0.1, [0] * 8),
        ([0.95, 0.5], [1], 0.5, [8, 0]),
        ([0.95, 0.95], [1], 0.05, [6, 6]),
    ],
)
def test_drafts_of_a_model_cost_its_decodes(
    chances: list[float], by_model: Sequence[int], draft_cost: float, lengths: list[int]
) -> None:
    """They are fewer the more it costs, and turns that need no model draft without those that do."""
    assert allot(chances, each=8, together=most_drafts(8), by_model=by_model, draft_cost=draft_cost) == lengths


def ask_model(odds: ModelOdds, *, n_tokens: int, hits: Callable[[int], bool]) -> tuple[int, int]:
    """Let a lone turn say ``n_tokens`` with a draft model that is right where ``hits``; return its steps and drafts."""
    drafter = Drafter(4096, lookup=False, odds=odds)
    tokens = [0]
    steps = drafted = 0
    while len(tokens) <= n_tokens:
        chances = [drafter.look(tokens)]
        (n_drafts,) = allot(chances, each=8, together=16, by_model=[0], draft_cost=odds.draft_cost)
        accepted = 0
        if n_drafts:
            assert drafter.by_model
            assert drafter.request(tokens, n_drafts, slot=3, client_id="c") == DraftRequest(3, tokens, n_drafts, "c")
            while accepted < n_drafts and hits(len(tokens) + accepted):
                accepted += 1
        tokens = [*tokens, *[0] * (accepted + 1)]
        drafter.observe(accepted, n_tokens=len(tokens))
        steps, drafted = steps + 1, drafted + n_drafts
    return steps, drafted


def test_a_draft_model_that_is_right_saves_most_steps() -> None:
    """After a few drafts as many as may be are made."""
    steps, drafted = ask_model(ModelOdds(0.1), n_tokens=300, hits=lambda _: True)
    assert steps < 300 / 6
    assert drafted <= 300 + 8


def test_a_draft_model_that_is_wrong_is_given_up() -> None:
    """Within a few drafts, and by the next turn from the start: all its drafts cost next to nothing."""
    odds = ModelOdds(0.1)
    steps, drafted = ask_model(odds, n_tokens=1000, hits=lambda _: False)
    assert steps == 1000
    assert 0 < drafted * (ROW_COST + odds.draft_cost) < 0.01 * steps
    assert ask_model(odds, n_tokens=16, hits=lambda _: False) == (16, 0)


def test_a_draft_model_that_is_right_again_is_asked_again() -> None:
    """A new turn tries it after a pause, and then drafts as before."""
    odds = ModelOdds(0.1)
    ask_model(odds, n_tokens=300, hits=lambda _: False)
    steps, _ = ask_model(odds, n_tokens=300, hits=lambda _: True)
    assert steps < 300 / 3


def test_a_draft_model_that_costs_what_it_brings_is_seldom_asked() -> None:
    """It is right three times in four, which is less than a draft of it costs."""
    _, drafted = ask_model(ModelOdds(0.7), n_tokens=400, hits=lambda n: n % 4 > 0)
    assert drafted < 400 / 8


def test_drafts_come_from_the_text_where_it_is_likelier() -> None:
    """And from the model where the text does not repeat itself."""
    drafter = Drafter(4096, odds=ModelOdds(0.1))
    assert drafter.look([1, 2, 3]) > 0
    assert drafter.by_model
    repeated = [1, 2, 3, 4, 5, 6] * 3
    assert drafter.look(repeated) > 0
    assert not drafter.by_model
    assert drafter.draft(repeated, 3) == [1, 2, 3]


class Forgetful(EchoBackend):
    """A backend that cannot go back."""

    @property
    def can_truncate(self) -> bool:
        """Never."""
        return False


def test_drafts_need_a_memory_that_can_be_cut() -> None:
    """Elsewhere there are none, and the log says why; without the setting there are none, and nothing is said."""
    log: list[str] = []
    off = EngineOptions(backend="echo", parent_pid=0, slots=1)
    lookup = EngineOptions(backend="echo", parent_pid=0, slots=1, speculative="lookup", draft_tokens=5)

    def drafts(options: EngineOptions, backend: EchoBackend) -> int:
        return draft_tokens(options, backend, on_log=lambda level, text: log.append(f"{level}: {text}"))

    assert drafts(lookup, EchoBackend(lookup)) == 5
    assert drafts(off, Forgetful(off)) == 0
    assert log == []
    assert drafts(lookup, Forgetful(lookup)) == 0
    assert log == [
        "warning: speculative decoding is disabled: this model's KV cache cannot be truncated after a rejected draft"
    ]

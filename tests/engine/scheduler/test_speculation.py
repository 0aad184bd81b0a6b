"""Drafting from a turn's text, and with a draft model."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.engine.backend import DraftRequest
from inferencecenter.engine.echo import EchoBackend
from inferencecenter.engine.loop import draft_tokens
from inferencecenter.engine.scheduler.speculation import (
    ROW_COST,
    DecodeCosts,
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
    """Return an index of these tokens."""
    index = TokenIndex(sizes, n_tokens)
    while not index.catch_up(tokens):
        pass
    return index


@given(few_tokens | any_tokens)
def test_draft_continues_an_earlier_occurrence(tokens: list[int]) -> None:
    """It is the latest earlier position of the same tokens."""
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
def test_longest_latest_match_is_found(tokens: list[int], found: tuple[int, int]) -> None:
    """A match of four tokens is preferred to one of two, and of several positions the latest one."""
    assert index_of(tokens, 2, 4).find(tokens) == found


@given(few_tokens, st.lists(st.integers(1, 9), max_size=30))
def test_index_does_not_depend_on_growth(tokens: list[int], portions: list[int]) -> None:
    """Added token by token or at once, the same match is found."""
    index = TokenIndex((1, 3), 4096)
    end = 0
    for portion in portions:
        end = min(end + portion, len(tokens))
        assert index.catch_up(tokens[:end])
    index.catch_up(tokens)
    assert index.find(tokens) == index_of(tokens, 1, 3).find(tokens)


def test_long_prompt_is_indexed_over_several_steps() -> None:
    """A step indexes at most a thousand tokens of it."""
    tokens = [1, 2, 3, *range(10, 2500), 1200, 1201]
    index = TokenIndex((2,), 4096)
    assert [index.catch_up(tokens) for _ in range(3)] == [False, False, True]
    assert index.find(tokens) == (2, tokens.index(1202))


def test_index_memory_is_bounded() -> None:
    """A context of a million tokens has two tables of 256 KiB, in which new positions replace older ones."""
    tokens = [*range(200_000), 199_000, 199_001]
    index = index_of(tokens, 2, 4, n_tokens=2**20)
    assert sum(sys.getsizeof(table) for _, table in index._tables) < 2**20
    assert index.find(tokens) == (2, 199_002)


@given(few_tokens.filter(bool), st.data(), st.integers(0, 20))
def test_draft_repeats_at_a_fixed_distance(tokens: list[int], data: st.DataObject, n_tokens: int) -> None:
    """Each token is the one at the same distance before; near the end the draft repeats itself."""
    position = data.draw(st.integers(0, len(tokens) - 1))
    drafts = continuation(tokens, position, n_tokens)
    assert len(drafts) == n_tokens
    whole = tokens + drafts
    assert all(whole[len(tokens) + at] == whole[position + at] for at in range(n_tokens))


def say(drafter: Drafter, tokens: list[int], answer: list[int], *, most: int = 8) -> tuple[int, int, int]:
    """Run a single turn with this answer; return its steps, its drafts, and the accepted ones."""
    steps = drafted = right = 0
    left = list(answer)
    while left:
        (n_drafts,) = allot([drafter.look(tokens, n_turns=1)], each=most, together=most, costs=DecodeCosts())
        drafts = drafter.draft(tokens, n_drafts) if n_drafts else []
        accepted = 0
        while accepted < min(n_drafts, len(left) - 1) and drafts[accepted] == left[accepted]:
            accepted += 1
        tokens += left[: accepted + 1]
        del left[: accepted + 1]
        drafter.observe(accepted, n_tokens=len(tokens))
        steps, drafted, right = steps + 1, drafted + n_drafts, right + accepted
    return steps, drafted, right


def test_repetitive_text_takes_few_steps() -> None:
    """A repeated line is soon drafted whole."""
    steps, drafted, right = say(Drafter(4096, costs=DecodeCosts()), [1, 2], [5, 6, 7, 8, 9, 10] * 50)
    assert steps < 50
    assert right / drafted > 0.9


def test_text_that_never_repeats_itself_is_not_drafted() -> None:
    """Without a match no draft is made."""
    assert say(Drafter(4096, costs=DecodeCosts()), [1, 2], list(range(10, 510))) == (500, 0, 0)


def test_rejected_drafts_become_rare() -> None:
    """If the same two tokens continue differently each time, drafts are tried ever more seldom."""
    answer = [token for n in range(400) for token in (1, 2, 10 + n)]
    steps, drafted, right = say(Drafter(4096, costs=DecodeCosts()), [], answer)
    assert (steps, right) == (len(answer), 0)
    assert 0 < drafted * ROW_COST < 0.01 * steps


def test_drafting_resumes_after_a_pause() -> None:
    """After many rejected drafts a repeated passage is found."""
    drafter = Drafter(8192, costs=DecodeCosts())
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
    """No turn exceeds its own or the common limit, those without a chance draft nothing, the others the same length."""
    lengths = allot(chances, each=each, together=together, costs=DecodeCosts())
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
    """Likelier drafts are longer; a single drafting turn among many is not worth an extra decode."""
    assert allot(chances, each=8, together=most_drafts(8), costs=DecodeCosts()) == lengths


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
    """They are shorter the more it costs, and turns with their own drafts are not limited by it."""
    costs = DecodeCosts(draft_cost)
    assert allot(chances, each=8, together=most_drafts(8), by_model=by_model, costs=costs) == lengths


def ask_model(costs: DecodeCosts, odds: ModelOdds, *, n_tokens: int, hits: Callable[[int], bool]) -> tuple[int, int]:
    """Run a single turn of ``n_tokens`` with a draft model that is right where ``hits``; return steps and drafts."""
    drafter = Drafter(4096, costs=costs, lookup=False, odds=odds)
    tokens = [0]
    steps = drafted = 0
    while len(tokens) <= n_tokens:
        chances = [drafter.look(tokens, n_turns=1)]
        (n_drafts,) = allot(chances, each=8, together=16, by_model=[0], costs=costs)
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


def test_good_draft_model_saves_most_steps() -> None:
    """After a few drafts they have the maximal length."""
    steps, drafted = ask_model(DecodeCosts(0.1), ModelOdds(), n_tokens=300, hits=lambda _: True)
    assert steps < 300 / 6
    assert drafted <= 300 + 8


def test_bad_draft_model_is_disabled() -> None:
    """It is disabled after a few drafts, and for the next turn from the start; all its drafts cost very little."""
    costs, odds = DecodeCosts(0.1), ModelOdds()
    steps, drafted = ask_model(costs, odds, n_tokens=1000, hits=lambda _: False)
    assert steps == 1000
    assert 0 < drafted * (ROW_COST + costs.draft) < 0.01 * steps
    assert ask_model(costs, odds, n_tokens=16, hits=lambda _: False) == (16, 0)


def test_draft_model_is_tried_again_after_a_pause() -> None:
    """A new turn tries it, and then drafts as before."""
    costs, odds = DecodeCosts(0.1), ModelOdds()
    ask_model(costs, odds, n_tokens=300, hits=lambda _: False)
    steps, _ = ask_model(costs, odds, n_tokens=300, hits=lambda _: True)
    assert steps < 300 / 3


def test_draft_model_without_a_gain_is_seldom_used() -> None:
    """It is right three times in four, which is less than its drafts cost."""
    _, drafted = ask_model(DecodeCosts(0.7), ModelOdds(), n_tokens=400, hits=lambda n: n % 4 > 0)
    assert drafted < 400 / 8


def test_likelier_source_of_drafts_is_used() -> None:
    """The model drafts if the text does not repeat itself."""
    drafter = Drafter(4096, costs=DecodeCosts(0.1), odds=ModelOdds())
    assert drafter.look([1, 2, 3], n_turns=1) > 0
    assert drafter.by_model
    repeated = [1, 2, 3, 4, 5, 6] * 3
    assert drafter.look(repeated, n_turns=1) > 0
    assert not drafter.by_model
    assert drafter.draft(repeated, 3) == [1, 2, 3]


def test_measured_costs_replace_the_assumed_ones() -> None:
    """A step with four drafts takes 50 % longer, and each draft a fifth of a step."""
    costs = DecodeCosts(0.5)
    costs.observe(n_drafts=0, decode_s=0.010, draft_s=0.0)
    for _ in range(40):
        costs.observe(n_drafts=4, decode_s=0.015 + 0.008, draft_s=0.008)
    assert costs.row == pytest.approx(0.125, abs=0.01)
    assert costs.draft == pytest.approx(0.2, abs=0.01)
    assert costs.row_of(1) == costs.row
    assert costs.row_of(2) == ROW_COST


def test_costs_are_not_learned_without_a_step_to_compare_with() -> None:
    """The duration of a decode of one row must be known first."""
    costs = DecodeCosts(0.1)
    costs.observe(n_drafts=4, decode_s=1.0, draft_s=0.5)
    assert (costs.row, costs.draft) == (ROW_COST, 0.1)


@pytest.mark.parametrize("n_before", [0, 1, 2, 9])
def test_slow_steps_do_not_change_costs(n_before: int) -> None:
    """Two of five steps may be interrupted by another program, with drafts or without."""
    costs = DecodeCosts(0.1)
    for _ in range(3):
        costs.observe(n_drafts=0, decode_s=0.010, draft_s=0.0)
    for slow_s in (0.050, 0.080):
        costs.observe(n_drafts=0, decode_s=slow_s, draft_s=0.0)
    for _ in range(n_before):
        costs.observe(n_drafts=1, decode_s=0.012 + 0.001, draft_s=0.001)
    for slow_s in (0.050, 0.080):
        costs.observe(n_drafts=1, decode_s=2 * slow_s, draft_s=slow_s)
    assert costs.row <= ROW_COST
    assert costs.draft == pytest.approx(0.1)


def test_high_draft_cost_decays_without_drafts() -> None:
    """Drafts that were too expensive are tried again; a lower cost is kept."""
    costs = DecodeCosts(0.1)
    costs.observe(n_drafts=0, decode_s=0.010, draft_s=0.0)
    for _ in range(40):
        costs.observe(n_drafts=1, decode_s=0.040, draft_s=0.0)
    assert costs.row == pytest.approx(3.0, abs=0.1)
    for _ in range(2000):
        costs.observe(n_drafts=0, decode_s=0.010, draft_s=0.0)
    assert costs.row == pytest.approx(ROW_COST, abs=0.01)
    for _ in range(40):
        costs.observe(n_drafts=1, decode_s=0.011, draft_s=0.0)
    costs.observe(n_drafts=0, decode_s=0.010, draft_s=0.0)
    assert costs.row == pytest.approx(0.1, abs=0.01)


@pytest.mark.parametrize(("row_s", "draft_s"), [(0.030, 0.0), (0.001, 0.030)])
def test_drafts_that_cost_more_than_they_bring_are_seldom_made(row_s: float, draft_s: float) -> None:
    """All are right, but a row, or a draft, takes three times as long as a token without."""
    costs, odds = DecodeCosts(0.1), ModelOdds()
    drafter = Drafter(4096, costs=costs, lookup=False, odds=odds)
    n_tokens = drafted = 0
    costs.observe(n_drafts=0, decode_s=0.010, draft_s=0.0)
    while n_tokens < 1000:
        tokens = [0] * (n_tokens + 1)
        (n,) = allot([drafter.look(tokens, n_turns=1)], each=8, together=16, by_model=[0], costs=costs)
        if n:
            drafter.request(tokens, n, slot=0, client_id="c")
        n_tokens += 1 + n
        drafter.observe(n, n_tokens=n_tokens)
        costs.observe(n_drafts=n, decode_s=0.010 + n * (row_s + draft_s), draft_s=n * draft_s)
        drafted += n
    assert 0 < drafted < 60


class Forgetful(EchoBackend):
    """A backend without truncation."""

    @property
    def can_truncate(self) -> bool:
        """Return false."""
        return False


def test_drafts_need_truncatable_memory() -> None:
    """Otherwise there are none, and the log has the reason; without the setting nothing is logged."""
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

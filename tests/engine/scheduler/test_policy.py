"""The scheduling policy."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.engine.scheduler.plan import DecodePass
from inferencecenter.engine.scheduler.policy import (
    PrefillBudget,
    SlotUse,
    choose_slot,
    compaction,
    decode_pass,
    prefill_passes,
)
from inferencecenter.engine.scheduler.state import EngineRequest, SlotTable
from inferencecenter.engine.speculation import Drafts


def table_of(*slots: str) -> SlotTable:
    """Return a table; ``a*`` is session a running, ``b`` session b idle, ``-`` empty; used in this order."""
    table = SlotTable(len(slots))
    for slot, text in zip(table, slots, strict=True):
        if text != "-":
            table.assign(slot, new_request(slot.index, session=text.rstrip("*")), keep_tokens=0)
            slot.tokens.append(1)
            if not text.endswith("*"):
                table.free(slot, now=float(slot.index))
    return table


@pytest.mark.parametrize(
    ("slots", "chosen"),
    [
        (("-", "a", "-"), (1, "holds its session")),
        (("b", "c", "-"), (2, "empty")),
        (("-", "-", "b*", "-"), (1, "empty")),
        (("b*", "c", "d"), (1, "least recently used")),
        (("b*", "waits", "d"), (2, "least recently used")),
        (("b*", "waits", "c*"), (1, "least recently used")),
        (("b*", "c*"), None),
        (("a*", "-"), None),
    ],
)
def test_slot_selection(slots: tuple[str, ...], chosen: tuple[int, str] | None) -> None:
    """The own slot, else an empty one beside the busy ones, else the oldest idle one, sparing sessions about to run."""
    choice = choose_slot(table_of(*slots), "a", waiting={"a", "waits"})
    assert (choice and (choice[0].index, choice[1])) == chosen


def runs_of(uses: list[SlotUse], *wanted: SlotUse) -> int:
    """Return the number of runs of slots with these uses."""
    return sum(1 for is_wanted, _ in groupby(uses, key=lambda use: use in wanted) if is_wanted)


@given(st.lists(st.sampled_from(SlotUse), min_size=1, max_size=10))
def test_swaps_make_busy_and_decoding_slots_consecutive(uses: list[SlotUse]) -> None:
    """Both are one run after a preemption, idle slots move no more than needed, and the pairs are ordered."""
    after = uses.copy()
    to_idle = 0
    for a, b in compaction(tuple(uses)):
        assert after[a] > after[b]
        to_idle += after[b] is SlotUse.IDLE
        after[a], after[b] = after[b], after[a]
    assert sorted(after) == sorted(uses)
    assert runs_of(after, SlotUse.PREFILL, SlotUse.DECODE) <= 1
    assert runs_of(after, SlotUse.DECODE) <= 1
    busy = [use > SlotUse.IDLE for use in uses]
    width = sum(busy)
    assert to_idle == min(width - sum(busy[start : start + width]) for start in range(len(busy) - width + 1))


@pytest.mark.parametrize(
    ("uses", "preemption"),
    [
        ("g-g--", ((2, 1),)),
        ("-gg", ()),
        ("grg", ((2, 1),)),
        ("rgg", ()),
        ("ggrgg", ((4, 2),)),
        ("rgrg", ((3, 0),)),
        ("g-rg", ((3, 1),)),
        ("grg-g", ((4, 3), (3, 1))),
    ],
)
def test_swap_cases(uses: str, preemption: tuple[tuple[int, int], ...]) -> None:
    """The lowest of equal runs is filled; slots in prefill go to the edges of those that decode."""
    assert (
        compaction(tuple({"-": SlotUse.IDLE, "r": SlotUse.PREFILL, "g": SlotUse.DECODE}[use] for use in uses))
        == preemption
    )


requests_to_read = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 39), st.integers(0, 2)), min_size=1, max_size=6
).map(
    lambda rows: [
        EngineRequest(
            turn_id=f"t{slot}",
            session_id=f"s{slot}",
            client_id="c",
            submitted_s=0.0,
            priority=priority,
            arrival=slot,
            tokens=list(range(length)),
            kv_tokens=min(done, length - 1),
            slot=slot,
        )
        for slot, (length, done, priority) in enumerate(rows)
    ]
)


def passes_of(requests: list[EngineRequest], *, budget_tokens: int, pass_tokens: int = 64) -> tuple[DecodePass, ...]:
    """Plan one step on a grid of 8."""
    return prefill_passes(requests, grid_tokens=8, budget_tokens=budget_tokens, pass_tokens=pass_tokens)


@given(requests_to_read, st.integers(0, 200), st.integers(8, 40))
def test_prefill_passes_are_well_formed(requests: list[EngineRequest], budget_tokens: int, pass_tokens: int) -> None:
    """Each pass has equal chunks in ascending slots, cut at the grid, and each prompt is prefilled without a gap."""
    at = {request.turn_id: request.kv_tokens for request in requests}
    lengths = {request.turn_id: request.prompt_tokens for request in requests}
    read = 0
    passes = passes_of(requests, budget_tokens=budget_tokens, pass_tokens=pass_tokens)
    assert passes
    for each in passes:
        chunks = [row.chunk for row in each.rows]
        slots = [chunk.slot for chunk in chunks]
        assert slots == sorted(set(slots))
        assert len({len(chunk.tokens) for chunk in chunks}) == 1
        assert len(chunks) == 1 or sum(len(chunk.tokens) for chunk in chunks) <= pass_tokens
        for row in each.rows:
            end = row.chunk.start + len(row.chunk.tokens)
            assert row.chunk.start == at[row.turn_id]
            assert end == min(lengths[row.turn_id], (row.chunk.start + 4) // 8 * 8 + 8)
            assert row.chunk.sample == (end == lengths[row.turn_id])
            at[row.turn_id] = end
            read += len(row.chunk.tokens)
    single = sum(len(each.rows) for each in passes) == 1
    assert read <= budget_tokens or single


def new_request(slot: int, *, length: int = 80, priority: int = 0, due: int = 0, session: str = "") -> EngineRequest:
    """Return a request before its prefill."""
    return EngineRequest(
        turn_id=f"t{slot}",
        session_id=session or f"s{slot}",
        client_id="c",
        submitted_s=0.0,
        priority=priority,
        arrival=slot,
        tokens=[0] * length,
        slot=slot,
        due=due,
    )


def test_prompts_are_prefilled_sequentially() -> None:
    """The first one due takes the budget, the next one the rest, and none overtakes."""
    requests = [
        new_request(slot, length=length, due=due) for slot, (length, due) in enumerate([(8, 9), (24, 3), (4, 30)])
    ]
    passes = passes_of(requests, budget_tokens=32)
    assert [[row.chunk.slot for row in each.rows] for each in passes] == [[0, 1], [1], [1]]
    passes = passes_of(requests, budget_tokens=31)
    assert [[row.chunk.slot for row in each.rows] for each in passes] == [[1], [1], [1]]


def test_higher_class_is_prefilled_first() -> None:
    """A batch prompt is not prefilled while an interactive one has more to prefill."""
    requests = [new_request(0, priority=2), new_request(1, priority=0)]
    slots = [[row.chunk.slot for row in each.rows] for each in passes_of(requests, budget_tokens=24)]
    assert slots == [[1], [1], [1]]


def test_chunk_boundaries_do_not_depend_on_the_step() -> None:
    """A prompt has the same chunks in one step and in many."""
    at_once = [row.chunk for each in passes_of([new_request(0, length=30)], budget_tokens=999) for row in each.rows]
    request, in_steps = new_request(0, length=30), []
    while request.kv_tokens < 30:
        chunks = [row.chunk for each in passes_of([request], budget_tokens=1) for row in each.rows]
        in_steps += chunks
        request.kv_tokens += sum(len(chunk.tokens) for chunk in chunks)
    assert in_steps == at_once


def test_generating_turns_get_one_row_each() -> None:
    """The decode pass holds each turn's last token, in ascending slots."""
    requests = [new_request(slot, length=4) for slot in (2, 0, 1)]
    for request in requests:
        request.kv_tokens = 3
    each = decode_pass(requests, Drafts())
    assert [(row.chunk.slot, row.chunk.start, len(row.chunk.tokens), row.chunk.sample) for row in each.rows] == [
        (0, 3, 1, True),
        (1, 3, 1, True),
        (2, 3, 1, True),
    ]


def test_prefill_budget_keeps_the_target_step_time() -> None:
    """Prefill at 1,000 tokens/s with 20 ms of decode leaves 130 tokens of 150 ms, and 150 alone."""
    budget = PrefillBudget(target_step_s=0.15, floor_tokens=64)
    assert budget.tokens(n_prefilling=1, n_decoding=1) == 64
    budget.observe(prefill_tokens=100, prefill_s=0.1, decode_s=0.02, alone=True)
    assert budget.tokens(n_prefilling=1, n_decoding=1) == pytest.approx(130, abs=1)
    assert budget.tokens(n_prefilling=1, n_decoding=0) == pytest.approx(150, abs=1)


def test_slow_decode_extends_the_prefill_budget() -> None:
    """If decode alone exceeds the target, new prompts are not prefilled one chunk at a time."""
    budget = PrefillBudget(target_step_s=0.15, floor_tokens=64)
    budget.observe(prefill_tokens=100, prefill_s=0.1, decode_s=0.2, alone=True)
    assert budget.tokens(n_prefilling=1, n_decoding=1) == pytest.approx(1200, abs=1)
    assert budget.tokens(n_prefilling=1, n_decoding=0) == pytest.approx(150, abs=1)


def test_long_prompt_is_interrupted_by_few_decodes() -> None:
    """A chunk takes 57 ms and a decode of the others 33 ms: 24 chunks are read in 8 steps, three in each."""
    budget = PrefillBudget(target_step_s=0.15, floor_tokens=64)
    budget.observe(prefill_tokens=64, prefill_s=0.057, decode_s=0.033, alone=True)
    request, steps = new_request(0, length=24 * 64), 0
    while request.kv_tokens < request.prompt_tokens:
        budget_tokens = budget.tokens(n_prefilling=1, n_decoding=4)
        passes = prefill_passes([request], grid_tokens=64, budget_tokens=budget_tokens, pass_tokens=512)
        request.kv_tokens += sum(len(row.chunk.tokens) for each in passes for row in each.rows)
        steps += 1
    assert steps == 8


def test_prefill_budget_grows_with_the_queue() -> None:
    """In a burst a few decoding turns delay many waiting ones; the length of a step is limited."""
    budget = PrefillBudget(target_step_s=0.05, floor_tokens=64)
    budget.observe(prefill_tokens=1000, prefill_s=1.0, decode_s=0.04, alone=False)
    usual = budget.tokens(n_prefilling=4, n_decoding=4)
    assert usual == budget.tokens(n_prefilling=2, n_decoding=6) == pytest.approx(240, abs=1)
    assert budget.tokens(n_prefilling=6, n_decoding=2) == pytest.approx(3 * usual, abs=3)
    assert budget.tokens(n_prefilling=31, n_decoding=1) == pytest.approx(1000, abs=1)


def test_prefill_budget_shrinks_with_slower_steps() -> None:
    """Never below one chunk."""
    budget = PrefillBudget(target_step_s=0.15, floor_tokens=64)
    budget.observe(prefill_tokens=1000, prefill_s=0.1, decode_s=0.0, alone=True)
    before = budget.tokens(n_prefilling=1, n_decoding=0)
    budget.observe(prefill_tokens=100, prefill_s=0.1, decode_s=0.0, alone=True)
    assert 64 < budget.tokens(n_prefilling=1, n_decoding=0) < before
    for _ in range(40):
        budget.observe(prefill_tokens=100, prefill_s=1.0, decode_s=0.0, alone=True)
    assert budget.tokens(n_prefilling=1, n_decoding=0) == 64


def test_mixed_prefill_does_not_update_the_estimate() -> None:
    """A pass of many rows has a higher speed; a single newcomer begins with one chunk."""
    budget = PrefillBudget(target_step_s=0.15, floor_tokens=64)
    budget.observe(prefill_tokens=1000, prefill_s=0.1, decode_s=0.0, alone=False)
    assert budget.tokens(n_prefilling=1, n_decoding=0) == 64
    assert budget.tokens(n_prefilling=2, n_decoding=0) == pytest.approx(1500, abs=1)
    budget.observe(prefill_tokens=2000, prefill_s=0.1, decode_s=0.0, alone=True)
    assert budget.tokens(n_prefilling=2, n_decoding=0) == pytest.approx(3000, abs=1)


def test_short_steps_do_not_update_the_estimate() -> None:
    """A clock that did not advance does not divide by zero."""
    budget = PrefillBudget(target_step_s=0.15, floor_tokens=64)
    budget.observe(prefill_tokens=100, prefill_s=0.0, decode_s=0.0, alone=True)
    assert budget.tokens(n_prefilling=1, n_decoding=0) == 64

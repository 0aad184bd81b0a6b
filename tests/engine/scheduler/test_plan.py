"""Passes: what a step decodes and prefills."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.engine.scheduler.plan import DecodePass, decode_pass, prefill_passes
from inferencecenter.engine.scheduler.speculation import Drafts
from inferencecenter.engine.scheduler.state import EngineRequest
from tests.engine.scheduler.harness import new_request

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

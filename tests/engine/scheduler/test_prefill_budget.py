"""The prefill budget of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from inferencecenter.engine.scheduler.plan import prefill_passes
from inferencecenter.engine.scheduler.scheduler import PrefillBudget
from tests.engine.scheduler.harness import FakeStore, Faults, SchedulerHarness, new_request

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inferencecenter.engine.scheduler.plan import DecodePass


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
    """The budget follows the measured speed and is never less than one chunk."""
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


def test_interrupted_prefill_continues_before_the_next_decode() -> None:
    """Commands end a step after a pass, such as those of other sessions; its budget is used up all the same."""
    world = SchedulerHarness(slots=2, n_ctx=4000, answer_tokens=50, pass_tokens=4, store=FakeStore(limit_tokens=0))
    world.add([1, 2, 3, 4])
    world.run(2)
    world.now += 1
    world.add([*range(100, 3000)])
    planned = _prefilled(world.step(Faults(interrupted_pass=1)).passes)
    assert planned >= 16
    assert _prefilled(world.step(Faults(interrupted_pass=2)).passes) == planned - 4
    assert _prefilled(world.step().passes) == planned - 12
    assert _prefilled(world.step().passes) == 0
    assert _prefilled(world.step().passes) >= 16


def _prefilled(passes: Iterable[DecodePass]) -> int:
    """Return how many tokens are prefilled; 0 for a step that decodes."""
    return sum(len(row.chunk.tokens) for each in passes if each.prefill for row in each.rows)

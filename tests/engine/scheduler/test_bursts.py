"""Bursts: prompts that arrive together get their first tokens before any of the turns decodes."""

from __future__ import annotations

import pytest

from inferencecenter.engine.scheduler.scheduler import PrefillBudget
from inferencecenter.ipc.messages import EngineLimits
from tests.engine.scheduler.harness import FakeStore, SchedulerHarness


def crowd(*, slots: int) -> SchedulerHarness:
    """Return a harness whose steps prefill a chunk of 4 tokens, at 400 tokens/s, unless turns decode or wait."""
    return SchedulerHarness(slots=slots, n_ctx=4000, answer_tokens=50, store=FakeStore(limit_tokens=0))


def prompt(number: int, *, length: int = 4) -> list[int]:
    """Return a prompt that shares no prefix with those of other numbers."""
    return [10_000 * number + n for n in range(length)]


def steps_of(world: SchedulerHarness, count: int) -> list[tuple[bool, int]]:
    """Run steps, and return whether each prefills and how many turns it has."""
    plans = [world.step() for _ in range(count)]
    return [(plan.passes[0].prefill, len({row.turn_id for each in plan.passes for row in each.rows})) for plan in plans]


def test_all_prompts_of_a_burst_are_prefilled_before_a_decode() -> None:
    """The first prompt alone was there when the first step began, the others before its end."""
    world = crowd(slots=8)
    for number in range(8):
        world.add(prompt(number))
    assert steps_of(world, 4) == [(True, 1), (True, 7), (False, 8), (False, 8)]


def test_prompts_of_a_burst_may_take_more_than_a_second() -> None:
    """A turn that came with them waits once for all of them, 1.75 s; each step ends with the token of one."""
    world = crowd(slots=8)
    world.add(prompt(0))
    for number in range(1, 8):
        world.add(prompt(number, length=100))
    world.step()
    assert steps_of(world, 8) == [(True, 1)] * 7 + [(False, 8)]


def test_first_tokens_of_a_burst_do_not_wait_for_all_prompts() -> None:
    """Three prompts fit a pass. Each step ends with a pass, and a turn that has a token waits for the other prompts."""
    world = SchedulerHarness(slots=8, n_ctx=4000, answer_tokens=50, pass_tokens=12, store=FakeStore(limit_tokens=0))
    for number in range(8):
        world.add(prompt(number))
    assert steps_of(world, 5) == [(True, 1), (True, 3), (True, 3), (True, 1), (False, 8)]


def test_last_prompt_of_a_step_may_be_shorter_than_a_cell() -> None:
    """A step that ends with a first token leaves three tokens of its budget, which are prefilled before a decode."""
    world = SchedulerHarness(slots=3, n_ctx=4000, answer_tokens=50, pass_tokens=4, store=FakeStore(limit_tokens=0))
    world.add(prompt(0))
    world.run(2)
    world.now += 1
    world.add(prompt(1, length=307), priority=0)
    last = world.add(prompt(2, length=3))
    assert world.step().reasons[-1] == "2 prompts share 310 tokens"
    assert last.generated_tokens == 0
    world.step()
    assert last.generated_tokens == 1
    assert steps_of(world, 1) == [(False, 3)]


def test_long_prompts_of_a_step_do_not_wait_for_each_other() -> None:
    """The second one is complete when the step has ended that completes the first, and decodes follow."""
    world = SchedulerHarness(slots=3, n_ctx=4000, answer_tokens=50, pass_tokens=4, store=FakeStore(limit_tokens=0))
    world.add(prompt(0))
    world.run(2)
    world.now += 1
    first, second = world.add(prompt(1, length=12)), world.add(prompt(2, length=12))
    world.step()
    assert (first.generated_tokens, second.generated_tokens) == (1, 0)
    world.step()
    assert (first.generated_tokens, second.generated_tokens) == (1, 1)
    assert steps_of(world, 1) == [(False, 3)]


def test_turn_with_a_token_waits_a_second_for_later_prompts() -> None:
    """Three of the same prompts and part of the fourth are prefilled if they arrive after its first token."""
    world = crowd(slots=8)
    world.add(prompt(0))
    world.run(2)
    world.now += 1
    for number in range(1, 8):
        world.add(prompt(number, length=100))
    assert steps_of(world, 5) == [(True, 1)] * 4 + [(False, 4)]


def test_burst_of_long_prompts_pauses_no_turn_for_long() -> None:
    """Prompts that would take longer than the limit alternate with decodes as usual."""
    world = crowd(slots=4)
    first = world.add(prompt(0))
    for number in range(1, 4):
        world.add(prompt(number, length=1000))
    world.step()
    assert steps_of(world, 1) == [(False, 1)]
    assert first.generated_tokens == 2


def test_one_long_prompt_does_not_pause_the_turn_that_came_with_it() -> None:
    """It would wait for longer than twelve decodes take."""
    world = crowd(slots=2)
    first = world.add(prompt(0))
    world.add(prompt(1, length=800))
    world.step()
    assert steps_of(world, 1) == [(False, 1)]
    assert first.generated_tokens == 2


def test_prompts_of_a_burst_that_stay_unread_do_not_stop_decoding() -> None:
    """A turn that is ahead decodes at the latest 4 s after its first token."""
    world = crowd(slots=4)
    for number in range(4):
        world.add(prompt(number))
    world.step()
    scheduler = world.scheduler
    plans = [scheduler.step(world.now + seconds) for seconds in range(6)]
    assert [plan.passes[0].prefill for plan in plans] == [True, True, True, True, False, True]


def test_limited_prefill_share_applies_to_bursts() -> None:
    """On a machine that is too hot decodes and parts of the prompts alternate."""
    world = crowd(slots=8)
    world.add(prompt(0))
    for number in range(1, 8):
        world.add(prompt(number, length=100))
    world.step()
    world.limit(EngineLimits(active_slots=8, prefill_share=0.3))
    assert steps_of(world, 2) == [(False, 1), (True, 1)]


@pytest.mark.parametrize(
    ("n_prefilling", "n_decoding", "paused_s", "most_tokens"),
    [(31, 1, 0.0, 4000), (31, 1, 1.5, 2500), (31, 1, 4.5, 0), (2, 1, 0.0, 960), (4, 4, 0.0, 480), (4, 4, 3.9, 100)],
)
def test_burst_lasts_for_a_limited_time(n_prefilling: int, n_decoding: int, paused_s: float, most_tokens: int) -> None:
    """At 1,000 tokens/s it has 4 s, or twelve decodes of 40 ms for each waiting turn if one is ahead."""
    budget = PrefillBudget(target_step_s=0.15, floor_tokens=64)
    counts = {"n_prefilling": n_prefilling, "n_decoding": n_decoding}
    assert not budget.covers(1, **counts, paused_s=0.0)
    budget.observe(prefill_tokens=1000, prefill_s=1.0, decode_s=0.04, alone=False)
    assert budget.covers(most_tokens - 1, **counts, paused_s=paused_s) is (most_tokens > 0)
    assert not budget.covers(most_tokens + 1, **counts, paused_s=paused_s)

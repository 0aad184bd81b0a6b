"""Limits of the scheduler: what is paused, what continues, and that all turns resume."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.engine.scheduler.plan import ParkSlot, RestoreSlot
from inferencecenter.engine.scheduler.state import RequestState
from inferencecenter.ipc.messages import EngineLimits
from tests.engine.scheduler.harness import GRID_TOKENS, N_CTX, FakeStore, SchedulerHarness

QUANTUM = 4
INTERACTIVE, NORMAL, BATCH = 0, 1, 2


def prompt(number: int, *, length: int = 4) -> list[int]:
    """Return a prompt that shares no prefix with those of other numbers."""
    return [1000 * number + n for n in range(length)]


@pytest.mark.parametrize(
    ("active_slots", "prefill_share", "lowest_class"),
    [(0, 1.0, 2), (-1, 1.0, 2), (1, 0.0, 2), (1, 1.1, 2), (1, 1.0, -1)],
)
def test_limits_that_stop_everything_are_refused(active_slots: int, prefill_share: float, lowest_class: int) -> None:
    """At least one slot, some part of a step and one class must remain, or turns would never end."""
    with pytest.raises(ValueError, match=r"active_slots|prefill_share|lowest_class"):
        EngineLimits(active_slots=active_slots, prefill_share=prefill_share, lowest_class=lowest_class)


def test_turns_above_the_limit_pause_after_their_quantum() -> None:
    """Their KV stays in their slots, and the limit holds from then on."""
    world = SchedulerHarness(slots=4, quantum_tokens=QUANTUM, answer_tokens=40)
    turns = [world.add(prompt(n)) for n in range(4)]
    world.step()
    assert world.scheduler.running == 4
    world.limit(EngineLimits(active_slots=2))
    world.step()
    assert world.scheduler.running == 4
    moves = [move for _ in range(30) for move in world.step().moves]
    assert world.scheduler.running == 2
    assert not any(isinstance(move, ParkSlot | RestoreSlot) for move in moves)
    assert all(turn.generated_tokens > QUANTUM for turn in turns), "they take turns"
    world.run_to_end()
    assert world.terminals == {turn.turn_id: 1 for turn in turns}


def test_paused_turn_resumes() -> None:
    """Once limits are lifted it decodes in the next step and prefills nothing again."""
    world = SchedulerHarness(slots=2, quantum_tokens=QUANTUM, answer_tokens=30)
    turns = [world.add(prompt(n)) for n in range(2)]
    world.run(5)
    world.limit(EngineLimits(active_slots=1))
    world.run(5)
    rested = next(turn for turn in turns if turn.slot is None)
    assert rested.preempted == 1
    world.lift_limits()
    plan = world.step()
    assert rested.state is RequestState.DECODE
    rows = [row for each in plan.passes for row in each.rows if row.turn_id == rested.turn_id]
    assert [len(row.chunk.tokens) for row in rows] == [1]


def test_new_turns_get_no_slot_above_the_limit() -> None:
    """They wait although slots are idle, until a running turn ends or pauses."""
    world = SchedulerHarness(slots=4, quantum_tokens=1000, answer_tokens=6)
    world.limit(EngineLimits(active_slots=1))
    for n in range(3):
        world.add(prompt(n))
    world.step()
    assert (world.scheduler.running, world.scheduler.waiting) == (1, 2)
    world.run_to_end()


def test_session_with_an_idle_slot_waits_too() -> None:
    """It then continues in its own slot, while the turn that yielded pauses in its slot."""
    world = SchedulerHarness(slots=3, quantum_tokens=QUANTUM, answer_tokens=10)
    first = world.add(prompt(1), session="s")
    world.run_to_end()
    world.limit(EngineLimits(active_slots=1))
    other = world.add(prompt(2), session="o")
    world.run(3)
    back = world.add(first.tokens + prompt(3), session="s")
    while back.slot is None:
        plan = world.step()
    assert plan.preemptions == (other.turn_id,)
    assert back.kv_tokens >= len(first.tokens) - 1
    world.run_to_end()


def test_lower_classes_are_paused() -> None:
    """Waiting does not end the pause: the scheduler has work, but plans nothing until the limit is lifted."""
    world = SchedulerHarness(slots=2, quantum_tokens=QUANTUM, answer_tokens=20, ageing_s=2.0)
    batch = world.add(prompt(1), priority=BATCH)
    world.run(2)
    world.limit(EngineLimits(active_slots=2, lowest_class=INTERACTIVE))
    normal = world.add(prompt(2), priority=NORMAL)
    assert not world.scheduler.blocked
    world.run(30)
    assert (batch.slot, normal.slot) == (None, None)
    assert QUANTUM <= batch.generated_tokens <= QUANTUM + 1
    assert normal.generated_tokens == 0
    assert world.scheduler.has_work
    assert world.scheduler.blocked
    urgent = world.add(prompt(3), priority=INTERACTIVE)
    assert not world.scheduler.blocked
    world.run(40, until=lambda: urgent.state is RequestState.DONE)
    assert urgent.state is RequestState.DONE
    world.lift_limits()
    assert not world.scheduler.blocked
    world.run_to_end()


def test_waiting_time_of_a_barred_turn_counts() -> None:
    """It has aged meanwhile and precedes a newer one of a higher class."""
    world = SchedulerHarness(slots=1, quantum_tokens=1000, ageing_s=2.0)
    world.limit(EngineLimits(active_slots=1, lowest_class=INTERACTIVE))
    old = world.add(prompt(1), priority=BATCH, client="a")
    world.run(10)
    world.lift_limits()
    world.add(prompt(2), priority=INTERACTIVE, client="b")
    world.step()
    assert old.slot is not None


def test_barred_turn_can_be_aborted() -> None:
    """It leaves the queue, and does not return when the limit is lifted."""
    world = SchedulerHarness(slots=1)
    world.limit(EngineLimits(active_slots=1, lowest_class=INTERACTIVE))
    turn = world.add(prompt(1), priority=NORMAL)
    world.step()
    world.abort(turn.turn_id)
    assert not world.scheduler.has_work
    world.lift_limits()
    world.scheduler.check_integrity()


@pytest.mark.parametrize("share", [1.0, 0.5, 0.001])
def test_prefill_share_is_limited(share: float) -> None:
    """It is a part of the step's prefill budget, and at least one chunk."""
    budgets = []
    for limits in (EngineLimits(active_slots=1), EngineLimits(active_slots=1, prefill_share=share)):
        world = SchedulerHarness(slots=1, target_step_s=0.05, n_ctx=4000)
        world.add(prompt(1, length=3000))
        world.run(4)
        world.limit(limits)
        budgets.append(prefill_budget_tokens(world))
    whole, part = budgets
    assert whole > 8 * GRID_TOKENS
    assert part == max(GRID_TOKENS, int(whole * share))


def prefill_budget_tokens(world: SchedulerHarness) -> int:
    """Return the prefill budget of the next step."""
    words = world.step().reasons[-1].split()
    assert words[1:3] == ["prompts", "share"]
    return int(words[3])


@given(
    turns=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 20)), min_size=1, max_size=8),
    slots=st.integers(1, 4),
    active_slots=st.integers(1, 4),
    parks=st.booleans(),
    before=st.integers(0, 6),
)
def test_interactive_turns_end_under_any_limit(
    turns: list[tuple[int, int]], slots: int, active_slots: int, parks: bool, before: int
) -> None:
    """Only they get slots; when limits are lifted the others end too, each once."""
    world = SchedulerHarness(
        slots=slots, quantum_tokens=QUANTUM, store=FakeStore(limit_tokens=N_CTX if parks else 0), ageing_s=3.0
    )
    requests = [
        world.add(prompt(n, length=length), priority=priority, client=f"c{n % 3}")
        for n, (priority, length) in enumerate(turns)
    ]
    world.run(before)
    world.limit(EngineLimits(active_slots=active_slots, lowest_class=INTERACTIVE, prefill_share=0.25))
    interactive = [request for request in requests if request.priority == INTERACTIVE]
    world.run(400, until=lambda: all(request.state is RequestState.DONE for request in interactive))
    assert all(request.state is RequestState.DONE for request in interactive)
    world.lift_limits()
    world.run_to_end(most_steps=1000)
    assert world.terminals == {request.turn_id: 1 for request in requests}

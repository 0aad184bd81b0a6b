"""More turns than slots: which turn runs when, which one yields, and that none starves."""

from __future__ import annotations

from itertools import pairwise

import pytest

from inferencecenter.engine.scheduler.plan import ParkSlot, StepPlan, SwapSlots
from inferencecenter.engine.scheduler.state import EngineRequest, RequestState
from tests.engine.scheduler.harness import STEP_S, FakeStore, SchedulerHarness, restore

QUANTUM = 8
ROOMY = 4000


def crowd(
    *, slots: int, quantum_tokens: int = QUANTUM, answer_tokens: int = 200, ageing_s: float = 1e6
) -> SchedulerHarness:
    """Return a harness with long contexts, room for all offloads, and prefill in one step."""
    return SchedulerHarness(
        slots=slots,
        quantum_tokens=quantum_tokens,
        answer_tokens=answer_tokens,
        ageing_s=ageing_s,
        store=FakeStore(limit_tokens=ROOMY),
        n_ctx=ROOMY,
        target_step_s=10.0,
    )


def prompt(number: int, *, length: int = 4) -> list[int]:
    """Return a prompt that shares no prefix with those of other numbers."""
    return [1000 * number + n for n in range(length)]


def kinds(plan: StepPlan) -> list[str]:
    """Return the kinds of a plan's moves, without those for compactness."""
    return [type(move).__name__ for move in plan.moves if not isinstance(move, SwapSlots)]


def test_turn_yields_to_an_equal_one_after_its_quantum() -> None:
    """It is offloaded under its session's key, the other gets the slot, and later it continues exactly."""
    world = crowd(slots=1, quantum_tokens=4)
    first = world.add(prompt(1), turn="a")
    world.add(prompt(2), turn="b")
    world.step()
    plan = world.step()
    assert plan.preemptions == ("a",)
    assert plan.moves[0] == ParkSlot(
        0, "a", "c", len(first.tokens) - 1, tuple(first.tokens[:-1]), durable=True, turn_id="a"
    )
    assert [admission.turn_id for admission in plan.admissions] == ["b"]
    assert (first.preempted, first.slot, first.state) == (1, None, RequestState.WAITING)
    while not (plan := world.step()).preemptions:
        assert first.slot is None
    assert plan.preemptions == ("b",)
    assert plan.moves[-1] == restore(0, "a", first.tokens[:-2], "a")
    assert plan.admissions == ()
    assert first.state is RequestState.DECODE
    assert [row.chunk.tokens for row in plan.passes[0].rows] == [first.tokens[-2:-1]]


def test_new_turn_preempts_after_a_quarter_of_a_quantum() -> None:
    """It gets its first token soon; after that it waits for whole quanta."""
    world = crowd(slots=1, quantum_tokens=40)
    old = world.add(prompt(1))
    world.run(20)
    new = world.add(prompt(2))
    assert world.run(99, until=lambda: new.generated_tokens > 0) <= 2
    assert old.preempted == 1
    assert 38 <= world.run(99, until=lambda: old.slot is not None) <= 41


@pytest.mark.parametrize("same_client", [True, False])
@pytest.mark.parametrize(("users", "slots"), [(2, 1), (5, 4), (9, 4), (16, 3)])
def test_equal_users_stay_within_two_quanta(users: int, slots: int, same_client: bool) -> None:
    """With any number of turns and slots, no lead grows, and no turn runs for less than a quantum."""
    world = crowd(slots=slots)
    turns = [world.add(prompt(n), client="c" if same_client else f"c{n}") for n in range(users)]
    preemptions = 0
    while not world.terminals:
        preemptions += len(world.step().preemptions)
        generated = [turn.generated_tokens for turn in turns]
        assert max(generated) - min(generated) <= 2 * QUANTUM
    # Each new turn may preempt one early.
    assert preemptions <= sum(turn.generated_tokens for turn in turns) / QUANTUM + users
    world.run_to_end()
    assert all(turn.generated_tokens == 200 for turn in turns)


@pytest.mark.parametrize("slots", [1, 2])
def test_ten_turns_get_no_larger_share_than_one(slots: int) -> None:
    """A client with ten turns and one with a single turn share the slots equally."""
    world = crowd(slots=slots, answer_tokens=ROOMY)
    many = [world.add(prompt(n), client="many") for n in range(10)]
    world.run(50)
    before = sum(turn.generated_tokens for turn in many)
    single = world.add(prompt(99), client="single")
    for _ in range(500):
        world.step()
        got = sum(turn.generated_tokens for turn in many) - before
        assert abs(got - single.generated_tokens) <= 2 * QUANTUM + 4


def test_idle_time_earns_no_credit() -> None:
    """A client that returns after a long time shares with the others, and does not preempt them for as long."""
    world = crowd(slots=1, answer_tokens=ROOMY)
    steady = [world.add(prompt(n), client=f"c{n}") for n in range(2)]
    world.add(prompt(7), client="idler", answer_tokens=1)
    world.run(300)
    before = [turn.generated_tokens for turn in steady]
    back = world.add(prompt(8), client="idler")
    world.run(300)
    shares = [back.generated_tokens, *(turn.generated_tokens - had for turn, had in zip(steady, before, strict=True))]
    assert max(shares) - min(shares) <= 2 * QUANTUM


def test_use_without_contention_is_not_charged() -> None:
    """A client that ran alone shares equally with a client that arrives later."""
    world = crowd(slots=1, answer_tokens=ROOMY)
    alone = world.add(prompt(1), client="alone")
    world.run(200)
    had = alone.generated_tokens
    newcomer = world.add(prompt(2), client="new")
    world.run(200)
    assert abs(alone.generated_tokens - had - newcomer.generated_tokens) <= 2 * QUANTUM


def test_higher_class_preempts_a_lower_one() -> None:
    """It does so after a quarter of a quantum; the lower class resumes when the higher one has ended."""
    world = crowd(slots=1, quantum_tokens=40)
    batch = world.add(prompt(1), priority=2)
    world.run(5)
    urgent = world.add(prompt(2), priority=0, answer_tokens=100)
    assert 0 < world.run(99, until=lambda: urgent.slot is not None) <= 10
    world.run(99, until=lambda: urgent.state is RequestState.DONE)
    world.step()
    assert batch.slot is not None
    assert batch.preempted == 1


def test_lower_class_does_not_preempt_a_higher_one() -> None:
    """It waits until the higher one ends, as long as no turn ages."""
    world = crowd(slots=1)
    urgent = world.add(prompt(1), priority=0)
    world.step()
    world.add(prompt(2), priority=1)
    world.run(150)
    assert (urgent.preempted, urgent.slot) == (0, 0)


def test_prefill_yields_only_to_a_shorter_prompt() -> None:
    """Two long prompts that alternate would both be late; a short one need not wait for a long one."""
    world = SchedulerHarness(slots=1, quantum_tokens=1, n_ctx=ROOMY, store=FakeStore(limit_tokens=ROOMY), ageing_s=1e6)
    reader = world.add(prompt(1, length=400))
    world.run(5)
    equal = world.add(prompt(2, length=400))
    world.run(10)
    assert (reader.preempted, equal.slot) == (0, None)
    short = world.add(prompt(3, length=12))
    world.run(2)
    assert (reader.preempted, short.slot) == (1, 0)


def waits(world: SchedulerHarness, request: EngineRequest, *, steps: int) -> list[float]:
    """Run, and return how long the turn waited for each of its tokens."""
    seen, times = request.generated_tokens, [world.now]
    for _ in range(steps):
        newcomer(world)
        world.step()
        if request.generated_tokens > seen:
            seen = request.generated_tokens
            times.append(world.now)
    return [after - before for before, after in pairwise([*times, world.now])]


def newcomer(world: SchedulerHarness) -> None:
    """Add a short turn of the client ``crowd``."""
    world.add(prompt(len(world.requests)), client="crowd", priority=0, answer_tokens=2)


@pytest.mark.parametrize("client", ["crowd", "other"])
@pytest.mark.parametrize("priority", [0, 1, 2])
def test_stream_of_new_turns_starves_no_turn(client: str, priority: int) -> None:
    """Twice the capacity arrives, and yet each wait ends.

    After ``ageing_s`` for each class up to the highest and once more, only older turns of the client come before it,
    and of other clients those that were served less. Here there is none of either, so it has a slot after a quantum.
    """
    ageing_s = 20.0
    world = crowd(slots=1, quantum_tokens=4, ageing_s=ageing_s)
    newcomer(world)
    patient = world.add(prompt(999), client=client, priority=priority)
    bound_s = (priority + 1) * ageing_s + 4 * STEP_S + 5
    assert max(waits(world, patient, steps=400)) <= bound_s
    assert patient.generated_tokens > 4


def test_aged_turn_is_prefilled_before_higher_classes() -> None:
    """A slot alone is no service: a prompt ages until it is prefilled."""
    world = crowd(slots=8, quantum_tokens=64, ageing_s=5.0)
    world.scheduler._budget._target_step_s = 0.0  # one chunk a step
    batch = world.add(prompt(999, length=12), client="batch", priority=2)
    for _ in range(60):
        world.add(prompt(len(world.requests), length=8), client="crowd", priority=0, answer_tokens=1)
        world.step()
    assert batch.generated_tokens > 0


def test_no_preemption_without_offload() -> None:
    """If KV cannot be offloaded, a turn keeps its slot until it ends."""
    world = SchedulerHarness(slots=1, quantum_tokens=1, store=FakeStore(limit_tokens=0), answer_tokens=20)
    first, second = world.add(prompt(1)), world.add(prompt(2))
    world.run(15)
    assert (first.preempted, second.slot) == (0, None)
    world.run_to_end()


def test_turn_too_long_to_offload_is_not_preempted() -> None:
    """It keeps its slot although it used more than the other turn."""
    world = SchedulerHarness(slots=2, quantum_tokens=2, store=FakeStore(limit_tokens=12), answer_tokens=40)
    long, short = world.add(prompt(1, length=12), turn="long"), world.add(prompt(2, length=2), turn="short")
    world.run(6)
    world.add(prompt(3))
    world.run(2)
    assert (long.preempted, short.preempted) == (0, 1)


def test_preempted_turn_with_lost_kv_is_recomputed() -> None:
    """A store that drops every entry costs time only, even at the smallest quantum."""
    world = SchedulerHarness(slots=1, quantum_tokens=1, answer_tokens=10)
    turns = [world.add(prompt(n, length=9)) for n in range(3)]
    while world.scheduler.has_work:
        world.step()
        world.store.entries.clear()
        assert world.now < 400
    assert all(turn.generated_tokens == 10 for turn in turns)
    assert all(turn.preempted for turn in turns)


def test_recomputation_is_not_reported_as_progress() -> None:
    """Progress was already reported for the prompt."""
    world = SchedulerHarness(slots=1, quantum_tokens=2, answer_tokens=12)
    first = world.add(prompt(1, length=20))
    world.run(9)
    world.add(prompt(2), answer_tokens=2)
    world.run(1)
    assert first.preempted == 1
    world.store.entries.clear()
    world.run(99, until=lambda: first.state is RequestState.PREFILL)
    plan = world.scheduler.step(world.now)
    assert plan.passes[0].prefill


def test_preempted_turn_is_aborted_or_released() -> None:
    """In any state it ends once, and its place is free."""
    world = crowd(slots=1, quantum_tokens=2)
    first = world.add(prompt(1), turn="a")
    world.run(4)
    second = world.add(prompt(2), turn="b")
    world.run(1)
    assert first.preempted == 1
    world.abort("a")
    world.run(4)
    assert second.preempted == 0
    third = world.add(prompt(3), turn="d")
    world.run(3)
    assert (second.preempted, third.slot) == (1, 0)
    world.release("b")
    world.release("d")
    assert world.terminals == {"a": 1, "b": 1, "d": 1}
    world.step()
    assert not world.scheduler.has_work


def test_idle_session_is_evicted_before_a_turn() -> None:
    """While an idle session holds a slot, no turn is preempted; idle KV is offloaded and restored."""
    world = crowd(slots=2, quantum_tokens=1, answer_tokens=4)
    world.add(prompt(1), session="idle")
    world.run_to_end()
    runs = world.add(prompt(2), answer_tokens=100)
    world.run(10)
    plan_moves = []
    world.add(prompt(3), answer_tokens=100)
    plan_moves += kinds(world.step())
    assert plan_moves == ["ParkSlot", "TruncateSlot"]
    assert runs.preempted == 0
    assert "idle" in world.store.entries


def test_waiting_prompts_are_matched_a_few_per_step() -> None:
    """A step's cost does not grow with the queue: lookups are limited to the few turns that can get a slot."""
    world = crowd(slots=4)
    for n in range(1000):
        world.add(prompt(n), client=f"c{n % 7}")
    for _ in range(30):
        before = world.store.finds
        world.step()
        assert world.store.finds - before <= 3 * 4

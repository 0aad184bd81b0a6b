"""The scheduler, step by step."""

from __future__ import annotations

import pytest

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.engine.scheduler.plan import Admission, StepOutcome, StepPlan, SwapSlots, TruncateSlot
from inferencecenter.engine.scheduler.scheduler import Scheduler
from inferencecenter.engine.scheduler.state import EngineRequest
from tests.engine.scheduler.harness import FakeStore


def make_scheduler(*, slots: int = 2, n_ctx: int = 64) -> Scheduler:
    """Return a scheduler with a grid of 8 tokens."""
    return Scheduler(
        slots=slots,
        n_ctx=n_ctx,
        grid_tokens=8,
        pass_tokens=64,
        target_step_s=0.1,
        parked=FakeStore(limit_tokens=0),
        can_truncate=True,
        quantum_tokens=0,
        ageing_s=30.0,
    )


class Driver:
    """Adds turns and runs steps as a backend without faults would."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.now = 0.0
        self.arrivals = 0

    def add(self, turn_id: str, tokens: list[int], *, session: str = "", priority: int = 1) -> None:
        """Queue a turn; the session is named like the turn if not given."""
        self.arrivals += 1
        self.scheduler.add(
            EngineRequest(
                turn_id=turn_id,
                session_id=session or turn_id,
                client_id=session or turn_id,
                submitted_s=self.now,
                priority=priority,
                arrival=self.arrivals,
                tokens=list(tokens),
            )
        )

    def step(self, *, end: tuple[str, ...] = (), lost: tuple[str, ...] = (), emptied: tuple[str, ...] = ()) -> StepPlan:
        """Run one step; every row samples token 0, and the named turns end."""
        plan = self.scheduler.step(0.0)
        decoded: dict[str, int] = {}
        sampled: dict[str, int] = {}
        for row in (row for each in plan.passes for row in each.rows if row.turn_id not in lost + emptied):
            decoded[row.turn_id] = decoded.get(row.turn_id, 0) + len(row.chunk.tokens)
            if row.chunk.sample:
                sampled[row.turn_id] = 0
        self.now += 1
        outcome = StepOutcome(
            decoded=decoded,
            sampled=sampled,
            emptied=set(emptied),
            ended=set(end + lost),
            lost=set(lost),
        )
        self.scheduler.completed(outcome, now=self.now)
        self.scheduler.check_integrity()
        return plan

    def run_turn(self, turn_id: str, tokens: list[int], *, session: str = "") -> StepPlan:
        """Run a turn of one generated token from beginning to end and return its first plan."""
        self.add(turn_id, tokens, session=session)
        first = plan = self.step(end=())
        while not plan.passes[-1].rows[-1].chunk.sample:
            plan = self.step()
        self.scheduler.abort(turn_id, now=self.now)
        return first


@pytest.fixture
def driver() -> Driver:
    """Two slots of 64 tokens."""
    return Driver(make_scheduler())


def test_idle_scheduler_plans_nothing(driver: Driver) -> None:
    """Without turns the plan is empty."""
    assert not driver.scheduler.has_work
    assert driver.step() == StepPlan()


def test_prefill_in_chunks_then_one_token_per_step(driver: Driver) -> None:
    """The whole life of a turn: admission, chunks, sampling at the prompt's end, decode rows."""
    driver.add("t", list(range(10)))
    plan = driver.step()
    assert plan.admissions == (Admission("t", tuple(range(10)), 0),)
    assert [len(each.rows[0].chunk.tokens) for each in plan.passes] == [8]
    assert [each.rows[0].chunk.sample for each in driver.step().passes] == [True]
    plan = driver.step()
    chunk = plan.passes[0].rows[0].chunk
    assert (chunk.start, list(chunk.tokens), chunk.sample, plan.passes[0].prefill) == (10, [0], True, False)


def test_prefill_progress_is_reported(driver: Driver) -> None:
    """A prompt that takes several steps reports its progress; a complete one does not."""
    driver.add("t", list(range(10)))
    driver.scheduler.step(0.0)
    (reading,) = driver.scheduler.completed(StepOutcome(decoded={"t": 8}), now=1.0)
    assert (reading.turn_id, reading.done, reading.total) == ("t", 8, 10)
    driver.scheduler.step(0.0)
    assert driver.scheduler.completed(StepOutcome(decoded={"t": 2}, sampled={"t": 5}), now=2.0) == ()


def test_next_turn_keeps_the_common_prefix(driver: Driver) -> None:
    """A session's next prompt is prefilled from where it differs from its slot's tokens."""
    driver.run_turn("t1", [1, 2, 3, 4], session="s")
    driver.add("t2", [1, 2, 9, 9], session="s")
    plan = driver.step()
    assert plan.moves == (TruncateSlot(0, 2, "t2"),)
    assert plan.admissions[0].cached_tokens == 2
    assert plan.passes[0].rows[0].chunk.start == 2
    assert plan.reasons[0] == "turn t2 to slot 0: holds its session, 2 of 4 tokens in KV"


def test_fully_cached_prompt_decodes_its_last_token(driver: Driver) -> None:
    """Its logits need a decode, so the last token is prefilled again."""
    driver.run_turn("t1", [1, 2, 3, 4], session="s")
    driver.add("t2", [1, 2, 3, 4], session="s")
    plan = driver.step()
    assert plan.moves == (TruncateSlot(0, 3, "t2"),)
    assert list(plan.passes[0].rows[0].chunk.tokens) == [4]


def test_continuing_prompt_truncates_nothing(driver: Driver) -> None:
    """The ordinary next turn needs no truncation."""
    driver.run_turn("t1", [1, 2, 3, 4], session="s")
    driver.add("t2", [1, 2, 3, 4, 0, 5], session="s")
    plan = driver.step()
    assert plan.moves == ()
    assert plan.admissions[0].cached_tokens == 4


def test_another_session_never_inherits_kv(driver: Driver) -> None:
    """An equal prompt of another session starts without cached tokens, in an emptied slot."""
    for session in ("a", "b"):
        driver.run_turn(f"t{session}", [1, 2, 3, 4], session=session)
    plan = driver.run_turn("tc", [1, 2, 3, 4], session="c")
    assert plan.moves == (TruncateSlot(0, 0, "tc"),)
    assert plan.admissions[0].cached_tokens == 0


def test_decode_and_prefill_alternate(driver: Driver) -> None:
    """Decode steps of running turns and prefill steps of a new prompt alternate."""
    driver.add("a", [1, 2, 3])
    driver.step()
    driver.add("b", list(range(20)))
    plans = [driver.step() for _ in range(4)]
    assert [[(each.prefill, [row.turn_id for row in each.rows]) for each in plan.passes] for plan in plans] == [
        [(False, ["a"])],
        [(True, ["b"])],
        [(False, ["a"])],
        [(True, ["b"])],
    ]


def test_new_turn_is_prefilled_next(driver: Driver) -> None:
    """The step in which it arrived was a decode of the others."""
    driver.add("a", [1, 2, 3])
    driver.step()
    driver.step()
    driver.add("b", [1, 2])
    assert [row.turn_id for row in driver.step().passes[0].rows] == ["b"]


def test_only_a_higher_class_overtakes(driver: Driver) -> None:
    """The highest class starts first, within a class the oldest turn."""
    for name in ("x", "y"):
        driver.add(name, [1, 2])
    driver.step()
    driver.add("batch", [1], priority=2)
    driver.add("first", [1], priority=0)
    driver.add("second", [1], priority=0)
    started = []
    for ending in (("x",), ("y",), ("first",)):
        driver.step(end=ending)
        started += [admission.turn_id for admission in driver.step().admissions]
    assert started == ["first", "second", "batch"]


def test_two_turns_of_a_session_never_run_at_once(driver: Driver) -> None:
    """The second waits for the first although a slot is free, and does not block other sessions."""
    driver.add("t1", [1, 2], session="s")
    driver.add("t2", [1, 2, 3], session="s")
    driver.add("other", [1, 2])
    assert [admission.turn_id for admission in driver.step().admissions] == ["t1", "other"]
    driver.step(end=("t1",))
    assert [admission.turn_id for admission in driver.step().admissions] == ["t2"]


def test_positions_are_published_on_change(driver: Driver) -> None:
    """A waiting turn gets its position at first, at each change, and 0 when it starts."""
    for name in ("x", "y", "a", "b"):
        driver.add(name, [1, 2])
    driver.step(end=("x",))
    assert driver.scheduler.positions() == (("a", 1), ("b", 2))
    assert driver.scheduler.positions() == ()
    driver.step()
    assert driver.scheduler.positions() == (("a", 0), ("b", 1))


def test_turn_that_never_waited_gets_no_position(driver: Driver) -> None:
    """Neither does one that is aborted in the queue."""
    for name in ("x", "y", "z"):
        driver.add(name, [1, 2])
    driver.step()
    driver.scheduler.positions()
    driver.scheduler.abort("z", now=1.0)
    assert driver.scheduler.positions() == ()


def test_gap_between_busy_slots_is_closed() -> None:
    """When the middle one of three ends, an outer one moves in; the idle session's KV is swapped out whole."""
    driver = Driver(make_scheduler(slots=3))
    for name in ("a", "b", "c"):
        driver.add(name, [1, 2, 3])
    driver.step(end=("b",))
    assert driver.step().moves == (SwapSlots(2, 1, "c", None),)
    assert repr(driver.scheduler.slots) == "SlotTable(a*:4 c*:0 b:3)"
    assert driver.step().moves == ()


def test_release_drops_kv_and_turns() -> None:
    """A closed session's turns end, the next plan empties its slot, and others keep theirs."""
    driver = Driver(make_scheduler(slots=2))
    driver.run_turn("idle", [5, 6], session="other")
    driver.add("t1", [1, 2], session="s")
    driver.add("t2", [1, 2], session="s")
    driver.step()
    assert driver.scheduler.release("s", now=1.0) == ("t1", "t2")
    assert driver.scheduler.has_work
    assert driver.step().moves == (TruncateSlot(1, 0, None),)
    assert repr(driver.scheduler.slots) == "SlotTable(other:2 -:0)"
    assert not driver.scheduler.has_work


def test_release_of_a_session_without_kv_does_nothing(driver: Driver) -> None:
    """The plan stays empty."""
    assert driver.scheduler.release("unknown", now=0.0) == ()
    assert not driver.scheduler.has_work


def test_abort_of_an_unknown_turn_is_reported(driver: Driver) -> None:
    """A turn that has just ended cannot be aborted again."""
    assert not driver.scheduler.abort("gone", now=0.0)


def test_turn_with_lost_kv_starts_over(driver: Driver) -> None:
    """When a truncation emptied the slot, the prompt is prefilled from its first token."""
    driver.run_turn("t1", [1, 2, 3, 4], session="s")
    driver.add("t2", [1, 2, 9, 9], session="s")
    driver.step(emptied=("t2",))
    chunk = driver.step().passes[0].rows[0].chunk
    assert (chunk.start, list(chunk.tokens)) == (0, [1, 2, 9, 9])


def test_turn_of_a_failed_decode_leaves_no_kv(driver: Driver) -> None:
    """Its slot has no owner."""
    driver.add("t", [1, 2, 3])
    driver.step(lost=("t",))
    assert driver.scheduler.slots.of_session("t") is None
    assert not driver.scheduler.has_work


@pytest.mark.parametrize("length", [64, 65, 1000])
def test_prompt_that_fills_the_context_is_refused(driver: Driver, length: int) -> None:
    """The error has both numbers, and nothing is left behind."""
    with pytest.raises(InferenceCenterError, match=rf"{length} tokens, and") as refused:
        driver.add("t", [1] * length)
    assert refused.value.code is ErrorCode.PROMPT_TOO_LONG
    assert refused.value.hint
    assert not driver.scheduler.has_work


def test_longest_possible_prompt_fits(driver: Driver) -> None:
    """One token less than the context leaves room for an answer of one token."""
    driver.add("t", [1] * 63)
    assert driver.step().admissions


def test_empty_prompt_is_refused(driver: Driver) -> None:
    """Without a decode there would be no logits."""
    with pytest.raises(InferenceCenterError) as refused:
        driver.add("t", [])
    assert refused.value.code is ErrorCode.INVALID_REQUEST


def test_duplicate_turn_id_is_refused(driver: Driver) -> None:
    """Turn ids are unique."""
    driver.add("t", [1])
    with pytest.raises(ValueError, match="was added already"):
        driver.add("t", [1])

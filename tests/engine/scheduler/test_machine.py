"""Any sequence of turns, aborts, releases and faults against a KV that is kept apart from the scheduler's books."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from inferencecenter.engine.scheduler.parking import NoParking
from inferencecenter.engine.scheduler.plan import Outcome, Plan, Swap, Truncation
from inferencecenter.engine.scheduler.request import Request
from inferencecenter.engine.scheduler.scheduler import Scheduler

SESSIONS = ("a", "b", "c", "d", "e")
GRID_TOKENS = 4
N_CTX = 40
ANSWER_TOKENS = 5


class SchedulerMachine(RuleBasedStateMachine):
    """Turns come and go; every plan is carried out on lists of tokens, some of it failing."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[str, Request] = {}
        self.terminals: Counter[str] = Counter()
        self.history: dict[str, list[int]] = {session: [] for session in SESSIONS}
        self.now = 0.0

    @initialize(slots=st.integers(1, 4), pass_tokens=st.sampled_from([4, 8, 64]))
    def start(self, slots: int, pass_tokens: int) -> None:
        """Begin with empty slots."""
        self.kv: list[list[int]] = [[] for _ in range(slots)]
        self.scheduler = Scheduler(
            slots=slots,
            n_ctx=N_CTX,
            grid_tokens=GRID_TOKENS,
            pass_tokens=pass_tokens,
            target_step_s=0.1,
            parked=NoParking(),
            can_rewind=True,
            quantum_tokens=0,
            ageing_s=30.0,
        )

    @rule(
        session=st.sampled_from(SESSIONS),
        priority=st.integers(0, 2),
        keep=st.integers(0, 20),
        new=st.lists(st.integers(1, 3), min_size=1, max_size=15),
    )
    def add(self, session: str, priority: int, keep: int, new: list[int]) -> None:
        """Queue a turn that continues some of what its session said before."""
        number = len(self.requests)
        tokens = self.history[session][:keep] + new
        request = Request(
            turn_id=f"t{number}",
            session_id=session,
            client_id=session,
            priority=priority,
            arrival=number,
            submitted_s=self.now,
            tokens=tokens.copy(),
        )
        self.history[session] = tokens
        self.requests[request.turn_id] = request
        self.scheduler.add(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Abort a turn in whatever state it is; one that has ended stays ended."""
        turn_id = data.draw(st.sampled_from(sorted(self.requests)))
        if self.scheduler.abort(turn_id, now=self.now):
            self.terminals[turn_id] += 1

    @rule(session=st.sampled_from(SESSIONS))
    def release(self, session: str) -> None:
        """Close a session."""
        self.terminals.update(self.scheduler.release(session, now=self.now))

    @rule(data=st.data(), step_s=st.sampled_from([0.0, 0.01, 1.0]))
    def step(self, data: st.DataObject, step_s: float) -> None:
        """Run a step in which cutting, swapping or decoding may fail."""
        refuse_cut = data.draw(st.booleans())
        fail_swap = data.draw(st.booleans())
        fail_pass = data.draw(st.integers(-3, 2))
        self.run_step(refuse_cut=refuse_cut, fail_swap=fail_swap, fail_pass=fail_pass, step_s=step_s)

    @invariant()
    def books_agree(self) -> None:
        """Slots are conserved, and no turn ever ended twice."""
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()
            assert all(count == 1 for count in self.terminals.values())
            assert len(self.requests) == len(self.terminals) + self.scheduler.waiting + self.scheduler.running

    def teardown(self) -> None:
        """Without new turns all that are left end, in bounded time."""
        if not hasattr(self, "scheduler"):
            return
        bound = sum(request.prompt_tokens + ANSWER_TOKENS + 2 for request in self.requests.values()) + 1
        for _ in range(bound):
            if not self.scheduler.has_work:
                break
            self.run_step(step_s=0.01)
        assert self.terminals == Counter(dict.fromkeys(self.requests, 1))

    def run_step(
        self, *, step_s: float, refuse_cut: bool = False, fail_swap: bool = False, fail_pass: int = -1
    ) -> None:
        """Carry out one plan, checking each of its promises."""
        self.now += 1
        plan = self.scheduler.step(self.now)
        self.check_admissions(plan)
        emptied = self.cut_kv(plan, refuse_cut=refuse_cut)
        lost, wiped = self.swap_kv(plan, fail=fail_swap)
        decoded: Counter[str] = Counter()
        sampled: dict[str, int] = {}
        stalled = emptied | lost
        for number, each in enumerate(plan.passes):
            slots = [row.chunk.slot for row in each.rows]
            assert slots == sorted(set(slots))
            assert len({len(row.chunk.tokens) for row in each.rows}) == 1
            if not each.prefill:
                assert number == 0
                assert slots == list(range(slots[0], slots[0] + len(slots)))
            rows = [row for row in each.rows if row.turn_id not in stalled]
            if number == fail_pass and rows:
                lost.add(rows[0].turn_id)
                self.kv[rows[0].chunk.slot].clear()
                stalled.update(row.turn_id for row in rows)
                continue
            for row in rows:
                held = self.kv[row.chunk.slot]
                assert row.chunk.start == len(held)
                held += row.chunk.tokens
                decoded[row.turn_id] += len(row.chunk.tokens)
                request = self.requests[row.turn_id]
                assert held == request.tokens[: len(held)]
                assert row.chunk.sample == (held == request.tokens)
                if row.chunk.sample:
                    sampled[row.turn_id] = 7
                else:
                    assert len(held) % GRID_TOKENS == 0
        full = {turn_id for turn_id in sampled if self.requests[turn_id].generated_tokens + 1 >= ANSWER_TOKENS}
        outcome = Outcome(
            decoded=decoded,
            sampled=sampled,
            emptied=frozenset(emptied),
            wiped=frozenset(wiped),
            ended=frozenset(full | lost),
            lost=frozenset(lost),
            prefill_tokens=sum(decoded.values()),
            prefill_s=step_s,
        )
        self.scheduler.completed(outcome, now=self.now)
        self.terminals.update(full | lost)
        assert [slot.tokens for slot in self.scheduler.slots] == self.kv

    def check_admissions(self, plan: Plan) -> None:
        """Nobody waits behind a turn of a lower class, a later one, or a free slot, unless its session runs."""
        busy = {slot.session_id for slot in self.scheduler.slots if slot.busy}
        waiting = [
            request
            for request in self.requests.values()
            if request.state == "waiting" and request.session_id not in busy
        ]
        started = [self.requests[admission.turn_id] for admission in plan.admissions]
        assert not waiting or all(slot.busy for slot in self.scheduler.slots)
        assert all(first.order < other.order for first in started for other in waiting)
        indexes = [slot.index for slot in self.scheduler.slots if slot.busy]
        assert not indexes or indexes == list(range(indexes[0], indexes[0] + len(indexes)))

    def cut_kv(self, plan: Plan, *, refuse_cut: bool) -> set[str]:
        """Truncate; return the turns whose prefix was lost."""
        emptied: set[str] = set()
        for cut in plan.moves:
            if not isinstance(cut, Truncation):
                continue
            assert cut.n_tokens <= len(self.kv[cut.slot])
            if refuse_cut and cut.n_tokens:
                assert cut.turn_id is not None
                emptied.add(cut.turn_id)
                self.kv[cut.slot].clear()
            del self.kv[cut.slot][cut.n_tokens :]
        return emptied

    def swap_kv(self, plan: Plan, *, fail: bool) -> tuple[set[str], set[int]]:
        """Swap; return the turns and the idle slots whose KV was lost by it."""
        swaps = [move for move in plan.moves if isinstance(move, Swap)]
        for swap in swaps:
            self.kv[swap.a], self.kv[swap.b] = self.kv[swap.b], self.kv[swap.a]
            if fail:
                self.kv[swap.a].clear()
                self.kv[swap.b].clear()
        moved = [each for swap in swaps for each in ((swap.turn_a, swap.b), (swap.turn_b, swap.a))] if fail else []
        turns = {turn_id for turn_id, _ in moved if turn_id is not None}
        return turns, {slot for turn_id, slot in moved if turn_id is None}


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)

"""Any sequence of turns, aborts, releases and faults against a KV model independent of the scheduler."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from inferencecenter.ipc.messages import EngineLimits
from tests.engine.scheduler.harness import GRID_TOKENS, N_CTX, FakeStore, Faults, SchedulerHarness

SESSIONS = ("a", "b", "c", "d", "e", "f")
CLIENTS = {"a": "x", "b": "x", "c": "x", "d": "y", "e": "y", "f": "z"}
ANSWER_TOKENS = 7
SYSTEM_PROMPT = [9] * 13 + [8] * 6

booleans = st.booleans()


class SchedulerMachine(RuleBasedStateMachine):
    """Executes every plan on lists of tokens, with faults."""

    def __init__(self) -> None:
        super().__init__()
        self.history: dict[str, list[int]] = {session: [] for session in SESSIONS}

    @initialize(
        slots=st.integers(1, 4),
        quantum_tokens=st.sampled_from([0, 1, 2, 4]),
        can_truncate=booleans,
        pass_tokens=st.sampled_from([4, 8, 64]),
        limit_tokens=st.sampled_from([0, 20, N_CTX]),
        ageing_s=st.sampled_from([0.5, 3.0, 1000.0]),
        target_step_s=st.sampled_from([0.0, 0.05]),
        draft_tokens=st.sampled_from([0, 1, 4]),
        draft_cost=st.sampled_from([None, 0.05]),
    )
    def start(  # noqa: PLR0917 - hypothesis passes them by name
        self,
        slots: int,
        quantum_tokens: int,
        can_truncate: bool,
        pass_tokens: int,
        limit_tokens: int,
        ageing_s: float,
        target_step_s: float,
        draft_tokens: int,
        draft_cost: float | None,
    ) -> None:
        """Begin with empty slots and an empty store."""
        self.world = SchedulerHarness(
            slots=slots,
            quantum_tokens=quantum_tokens,
            store=FakeStore(limit_tokens=limit_tokens),
            can_truncate=can_truncate,
            ageing_s=ageing_s,
            pass_tokens=pass_tokens,
            answer_tokens=ANSWER_TOKENS,
            target_step_s=target_step_s,
            draft_tokens=draft_tokens if can_truncate else 0,
            draft_cost=draft_cost,
        )

    @rule(
        session=st.sampled_from(SESSIONS),
        begins_like=st.sampled_from(SESSIONS),
        priority=st.sampled_from([-3, 0, 1, 1, 2, 10**9]),
        keep=st.integers(0, 40),
        new=st.lists(st.integers(1, 3), min_size=1, max_size=20),
        durable=booleans,
    )
    def add(self, *, session: str, begins_like: str, priority: int, keep: int, new: list[int], durable: bool) -> None:
        """Queue a turn that continues a prefix of its own or another session."""
        self.submit(session, self.history[begins_like][:keep] + new, priority=priority, durable=durable)

    @rule(
        sessions=st.lists(st.sampled_from(SESSIONS), min_size=1, max_size=4, unique=True),
        public=booleans,
        priority=st.integers(0, 2),
    )
    def add_with_system_prompt(self, sessions: list[str], public: bool, priority: int) -> None:
        """Queue several turns with the same system prompt."""
        for number, session in enumerate(sessions):
            tokens = [*SYSTEM_PROMPT, number, number, 1]
            self.submit(session, tokens, priority=priority, prefix_tokens=len(SYSTEM_PROMPT), public=public)

    def submit(
        self,
        session: str,
        tokens: list[int],
        *,
        priority: int,
        durable: bool = True,
        prefix_tokens: int = 0,
        public: bool = False,
    ) -> None:
        """Queue a turn, and record its session's tokens."""
        request = self.world.add(
            tokens,
            session=session,
            client=CLIENTS[session],
            priority=priority,
            prefix_tokens=prefix_tokens,
            public=public,
            durable=durable,
        )
        self.history[session] = request.tokens

    @precondition(lambda self: self.world.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Abort a turn in any state; an ended one stays ended."""
        self.world.abort(data.draw(st.sampled_from(sorted(self.world.requests))))

    @rule(session=st.sampled_from(SESSIONS))
    def release(self, session: str) -> None:
        """Close a session."""
        self.world.release(session)

    @precondition(lambda self: self.world.store.entries)
    @rule(data=st.data())
    def lose_parked(self, data: st.DataObject) -> None:
        """Drop an offloaded entry."""
        del self.world.store.entries[data.draw(st.sampled_from(sorted(self.world.store.entries)))]

    @precondition(lambda self: self.world.store.entries)
    @rule()
    def leave_ram(self) -> None:
        """Leave all entries on disk only."""
        for entry in self.world.store.entries.values():
            entry.ready = False

    @rule()
    def finish_fetches(self) -> None:
        """Complete the fetches."""
        self.world.finish_fetches()

    @rule(
        faults=st.builds(
            Faults,
            cut=booleans,
            swap=booleans,
            park=booleans,
            restore=booleans,
            copy=booleans,
            broken_pass=st.integers(-3, 2),
            interrupted_pass=st.integers(-2, 2),
        )
    )
    def faulty_step(self, faults: Faults) -> None:
        """Run a step in which any move or pass may fail."""
        self.world.step(faults)

    @rule(count=st.integers(1, 4))
    def steps(self, count: int) -> None:
        """Run steps without faults."""
        for _ in range(count):
            self.world.step()

    @precondition(lambda self: not self.world.scheduler.has_work)
    @rule(fails=booleans, room_tokens=st.sampled_from([0, 10, N_CTX]))
    def rest(self, *, fails: bool, room_tokens: int) -> None:
        """Save idle slots, each at most once, as far as there is room."""
        self.world.store.room_tokens = room_tokens
        saved = 0
        while self.world.save(fails=fails) is not None:
            saved += 1
        assert saved <= len(self.world.kv)

    @rule(
        active_slots=st.integers(1, 5),
        lowest_class=st.integers(0, 2),
        prefill_share=st.sampled_from([0.01, 0.5, 1.0]),
    )
    def limit(self, active_slots: int, lowest_class: int, prefill_share: float) -> None:
        """Set or lift limits."""
        self.world.limit(
            EngineLimits(active_slots=active_slots, lowest_class=lowest_class, prefill_share=prefill_share)
        )

    @rule(move_s=st.sampled_from([0.001, 0.5]))
    def slow_moves(self, move_s: float) -> None:
        """Report move times, from which the quantum is learned."""
        self.world.step(move_s=move_s)

    @invariant()
    def books_agree(self) -> None:
        """Slots are conserved, and no turn ever ended twice."""
        if hasattr(self, "world"):
            world = self.world
            world.scheduler.check_integrity()
            assert all(count == 1 for count in world.terminals.values())
            assert len(world.requests) == len(world.terminals) + world.scheduler.waiting + world.scheduler.running

    def teardown(self) -> None:
        """Without new turns and limits all others end, in bounded time."""
        if not hasattr(self, "world"):
            return
        self.world.finish_fetches()
        self.world.lift_limits()
        self.world.run_to_end(most_steps=self.bound_steps())
        assert set(self.world.terminals) == set(self.world.requests)

    def bound_steps(self) -> int:
        """Each assignment of a slot yields at least one token, after at most a full prefill."""
        stays = sum(request.prompt_tokens + ANSWER_TOKENS for request in self.world.requests.values())
        return stays * (N_CTX // GRID_TOKENS + 2) + 100


@pytest.mark.parametrize("n_sequences", [30, pytest.param(150, marks=pytest.mark.slow)])
def test_any_sequence_of_requests(n_sequences: int) -> None:
    """The invariants hold, and all requests end."""
    limits = settings(max_examples=n_sequences, stateful_step_count=40, deadline=None)
    run_state_machine_as_test(SchedulerMachine, settings=limits)

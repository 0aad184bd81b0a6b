"""Any sequence of turns, forks, aborts and faults, on scheduler, executor, store and a backend that checks its KV."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

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

from inferencecenter.engine.executor import Executor
from inferencecenter.engine.scheduler.scheduler import Scheduler
from inferencecenter.engine.scheduler.state import EngineRequest
from inferencecenter.ipc.messages import Finished, Started, TokenDelta, TurnEvent, unpack_tokens
from inferencecenter.protocol.params import Params, encode
from tests.engine.faulty_echo import FaultyEcho
from tests.engine.harness import output_of_turn, submit
from tests.engine.parked import open_store

N_CTX = 200
GRID_TOKENS = 8
SYSTEM = list(b"the shared system prompt\n")
PAGE_BYTES = 4096


@dataclass
class Session:
    """A conversation and the turn that runs in it."""

    session_id: str
    client_id: str
    tokens: list[int] = field(default_factory=list)
    turn_id: str | None = None


class Turns(RuleBasedStateMachine):
    """Sessions of two clients on two slots; RAM for a few entries, and a disk without delay."""

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp())
        self.pool = ThreadPoolExecutor(1)
        self.backend = FaultyEcho(slots=2, n_ctx=N_CTX)
        self.kv = open_store(self.backend, self.path, ram_bytes=4 * PAGE_BYTES, disk_bytes=12 * PAGE_BYTES)
        self.now = 0.0

    @initialize(draft_tokens=st.sampled_from([0, 1, 5]))
    def begin(self, draft_tokens: int) -> None:
        """Open a few sessions; turns may draft from their text."""
        self.scheduler = Scheduler(
            slots=2,
            n_ctx=N_CTX,
            grid_tokens=GRID_TOKENS,
            pass_tokens=32,
            target_step_s=0.001,
            parked=self.kv,
            can_truncate=True,
            quantum_tokens=3,
            ageing_s=50.0,
            draft_tokens=draft_tokens,
        )
        self.executor = Executor(
            self.backend,
            self.kv,
            pool=self.pool,
            workers=1,
            clock=lambda: self.now,
            interrupted=lambda: False,
            progressed=lambda: None,
            on_log=lambda level, text: None,
        )
        self.sessions: list[Session] = []
        self.running: dict[str, tuple[Session, bytes, int]] = {}
        self.events: dict[str, list[TurnEvent]] = {}
        self.n_turns = 0

        for client in ("ada", "bob", "ada", "bob"):
            self.open(client, system=True)

    def teardown(self) -> None:
        """Run everything to its end without faults, and check the result."""
        self.backend.refuse.clear()
        for _ in range(4000):
            if not self.running:
                break
            self.step()
        assert not self.running, f"never ended: {self.scheduler!r}"
        self.check()
        self.executor.close()
        self.kv.close()
        self.pool.shutdown()
        shutil.rmtree(self.path)

    @rule(client=st.sampled_from(["ada", "bob"]), system=st.booleans())
    def open(self, client: str, system: bool) -> None:
        """Open a session, with or without the shared system prompt."""
        self.sessions.append(Session(f"s{len(self.sessions)}", client, list(SYSTEM) if system else []))

    @precondition(lambda self: self.sessions)
    @rule(
        data=st.data(),
        text=st.text("abc", min_size=1, max_size=40),
        max_tokens=st.integers(1, 30),
        priority=st.integers(0, 2),
    )
    def ask(self, data: st.DataObject, text: str, max_tokens: int, priority: int) -> None:
        """Start a turn in an idle session, if it has room."""
        idle = [session for session in self.sessions if session.turn_id is None]
        session = data.draw(st.sampled_from(idle)) if idle else None
        if session is None or len(session.tokens) + len(text) + 10 + max_tokens >= N_CTX:
            return
        self.n_turns += 1
        session.turn_id = turn_id = f"t{self.n_turns}"
        tokens = [*session.tokens, 256, *b"user\n", *text.encode(), 257]
        params = Params(max_tokens=max_tokens, ignore_eos=True)
        turn = submit(turn_id, "", params=encode(params))
        public = session.client_id == "ada"
        self.scheduler.add(
            EngineRequest(
                turn_id=turn_id,
                session_id=session.session_id,
                client_id=session.client_id,
                priority=priority,
                arrival=self.n_turns,
                submitted_s=self.now,
                tokens=tokens,
                prefix_tokens=len(SYSTEM) if session.tokens[: len(SYSTEM)] == SYSTEM else 0,
                public=public,
            )
        )
        output = output_of_turn(turn, self.backend, prompt_tokens=len(tokens), n_ctx=N_CTX, submitted_s=self.now)
        self.executor.add(output)
        self.running[turn_id] = (session, text.encode(), max_tokens)
        self.events[turn_id] = []

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), keep=st.floats(0, 1))
    def fork(self, data: st.DataObject, keep: float) -> None:
        """Open a session with a prefix of another's tokens."""
        parent = data.draw(st.sampled_from(self.sessions))
        shared = parent.tokens[: int(len(parent.tokens) * keep)]
        self.sessions.append(Session(f"s{len(self.sessions)}", parent.client_id, shared))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """End a turn wherever it is."""
        turn_id = data.draw(st.sampled_from(sorted(self.running)))
        assert self.scheduler.abort(turn_id, now=self.now)
        self._tell(self.executor.end(turn_id, "aborted"))

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Close a session, with its turn."""
        session = data.draw(st.sampled_from(self.sessions))
        for turn_id in self.scheduler.release(session.session_id, now=self.now):
            self._tell(self.executor.end(turn_id, "aborted"))
        self.kv.forget_session(session.session_id)
        self.sessions.remove(session)
        self.sessions.append(Session(f"{session.session_id}'", session.client_id))

    @rule(refuse=st.sets(st.sampled_from(["save", "restore", "copy", "truncate"]), min_size=1), n=st.integers(1, 12))
    def work_with_faults(self, refuse: set[str], n: int) -> None:
        """Run the engine while moves fail."""
        self.backend.refuse = refuse
        self.work(n)
        self.backend.refuse = set()

    @rule(n_steps=st.integers(1, 12))
    def work(self, n_steps: int) -> None:
        """Run the engine."""
        for _ in range(n_steps):
            self.step()

    @invariant()
    def check(self) -> None:
        """State and KV agree, and every text is right so far."""
        self.scheduler.check_integrity()
        self.kv.check_integrity()
        for slot in self.scheduler.slots:
            assert list(self.backend.held(slot.index)) == slot.tokens or self.scheduler.has_work
        assert len(self.executor) == len(self.running)

    def step(self) -> None:
        """Plan and execute one step."""
        self.now += 1
        if not self.scheduler.has_work:
            return
        plan = self.scheduler.step(self.now)
        for key in plan.fetches:
            self.kv.fetch(key)
        outcome = self.executor.run(plan)
        self.scheduler.completed(outcome, now=self.now)
        self._tell(outcome.events)

    def _tell(self, events: Iterable[TurnEvent]) -> None:
        for event in events:
            self.events[event.turn_id].append(event)
            if not isinstance(event, Started | TokenDelta):
                self._end(event)

    def _end(self, end: TurnEvent) -> None:
        """Check that a turn ends once, completed or aborted, with a prefix of its answer."""
        assert isinstance(end, Finished), end
        session, text, max_tokens = self.running.pop(end.turn_id)
        events = self.events[end.turn_id]
        kinds = Counter(type(event) for event in events)
        assert kinds[Finished] == 1
        assert kinds[Started] <= 1
        said = [token for event in events if isinstance(event, TokenDelta) for token in unpack_tokens(event.tokens)]
        assert bytes(said) == (text * max_tokens)[: len(said)]
        assert end.reason == "aborted" or len(said) == max_tokens
        session.turn_id = None
        if kinds[Started]:
            session.tokens = [*session.tokens, 256, *b"user\n", *text, 257, *said]


@pytest.mark.parametrize("n_sequences", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_any_sequence_of_turns(n_sequences: int) -> None:
    """Each turn ends once with its own text, whatever else happens."""
    limits = settings(max_examples=n_sequences, stateful_step_count=60, deadline=None)
    run_state_machine_as_test(Turns, settings=limits)

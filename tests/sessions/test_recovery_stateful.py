"""A stateful test: whatever is cut, killed or delayed, the client reads the same text."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from inferencecenter.config.settings import SessionSettings
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.port import EngineState
from inferencecenter.protocol import requests
from inferencecenter.protocol.params import Params
from inferencecenter.sessions.context import Principal
from inferencecenter.sessions.manager import SessionManager
from tests.sessions.conftest import FakeJournal, FakeTimer, InlineTemplates, one_model
from tests.sessions.oracle import Oracle, Reader, kept, script

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from inferencecenter.protocol.base import Event

ADA = Principal("ada", 4, "normal", frozenset({"user"}))


class Socket:
    """A connection that delivers events to a client until it is cut."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.open = True

    def send(self, event: Event) -> None:
        """Deliver the event, or drop it after the cut."""
        if self.open:
            self.reader.take(event)

    def replay(self, missed: Sequence[Event]) -> None:
        """Deliver missed events."""
        for event in missed:
            self.send(event)


class CommittingJournal(FakeJournal):
    """A journal that knows the committed records: those written before a delivered event.

    Records of one engine frame are committed together.
    """

    def __init__(self) -> None:
        super().__init__(holding=True)
        self.safe = 0
        self.frames: list[int] = []

    def release(self, callback: Callable[[], None]) -> None:
        """Hold the call until ``let_go``, which commits what was written before it."""
        n_records = len(self.records)
        self.held.append(lambda: self._run(callback, n_records))

    def end_frame(self) -> None:
        """Start another frame for the following records."""
        self.frames.append(len(self.records))

    def survivors(self, more: int) -> list[int]:
        """The possible numbers of records after a crash, fewest first, within ``more`` further frames."""
        possible = [n for n in [*self.frames, len(self.records)] if n >= self.safe]
        return possible[: more + 1]

    def _run(self, callback: Callable[[], None], n_records: int) -> None:
        frame = min([n for n in self.frames if n >= n_records], default=len(self.records))
        self.safe = max(self.safe, frame)
        callback()


class Survival(RuleBasedStateMachine):
    """One session of a client that sends its next question after each answer."""

    def __init__(self) -> None:
        super().__init__()
        self.oracle = Oracle()
        self.journal = CommittingJournal()
        self.drawn = 0
        self.sessions = self.begin()
        self.reader = Reader("")
        self.socket = Socket(self.reader)
        request = requests.CreateSession(op="create_session")
        created = self.sessions.create(ADA, request, self.socket)
        self.journal.end_frame()
        self.journal.safe = len(self.journal.records)
        self.session_id = created.session_id
        self.reader.epoch = created.epoch
        self.asked = 0
        self.sent = 0
        self.pending: str | None = None

    def begin(self) -> SessionManager:
        """Start the first daemon."""
        return SessionManager(
            engines=one_model(self.oracle),
            renderers=InlineTemplates(),
            config_params=Params(),
            settings=SessionSettings(max_sessions=4, replay_kib=1),
            journal=self.journal,
            clock=lambda: 1000.0,
            monotonic=lambda: 0.0,
            local_time=lambda: datetime.fromtimestamp(1000, tz=UTC),
            random_bytes=self.draw,
            call_later=FakeTimer,
        )

    def draw(self, size: int) -> bytes:
        """Unique bytes."""
        self.drawn += 1
        return self.drawn.to_bytes(size, "little")

    def infer(self) -> None:
        """Send the open question with its key."""
        self.sent += 1
        self.pending = f"i{self.sent}"
        request = requests.Infer(
            op="infer",
            id=self.pending,
            session_id=self.session_id,
            prompt=f"question {self.asked}",
            turn_key=f"k{self.asked}",
        )
        self.sessions.infer(ADA, request, self.socket)
        self.journal.end_frame()

    @property
    def answered(self) -> bool:
        """Whether every question is answered."""
        return len(self.reader.answers) == self.asked

    @precondition(lambda self: self.socket.open and self.answered)
    @rule()
    def ask(self) -> None:
        """Send a new question."""
        self.asked += 1
        self.infer()

    @precondition(lambda self: self.socket.open and not self.answered)
    @rule()
    def ask_again(self) -> None:
        """Repeat the question, which attaches to its turn."""
        self.infer()

    @rule(steps=st.integers(1, 30))
    def generate(self, steps: int) -> None:
        """Run the engine for some steps."""
        for _ in range(steps):
            self.oracle.step()
            self.journal.end_frame()

    @rule(count=st.integers(1, 60))
    def commit(self, count: int) -> None:
        """Release some or all of the journal."""
        self.journal.let_go(count)

    @rule(noticed=st.booleans())
    def cut(self, noticed: bool) -> None:
        """Cut the connection; the daemon may notice later."""
        self.socket.open = False
        if noticed:
            self.sessions.detach(self.socket)

    @rule()
    def come_back(self) -> None:
        """Resume on a new socket, or on the same one if it is open."""
        if not self.socket.open:
            self.socket = Socket(self.reader)
        request = requests.ResumeSession(
            op="resume_session", session_id=self.session_id, epoch=self.reader.epoch, last_seq=self.reader.last_seq
        )
        self.sessions.resume(ADA, request, self.socket)

    @rule()
    def come_back_with_nothing(self) -> None:
        """Resume without a position; the state must suffice."""
        self.socket.open = False
        self.reader = Reader(self.reader.epoch, answers=self.reader.answers)
        self.socket = Socket(self.reader)
        request = requests.ResumeSession(op="resume_session", session_id=self.session_id)
        self.sessions.resume(ADA, request, self.socket)
        self.journal.let_go()

    @rule()
    def lose_engine(self) -> None:
        """Kill the engine."""
        self.oracle.lose()

    @rule()
    def engine_ready(self) -> None:
        """Start an engine."""
        if self.oracle.status.state is not EngineState.READY:
            self.oracle.ready()

    @rule(more=st.integers(0, 5))
    def kill_daemon(self, more: int) -> None:
        """Kill the daemon: delivered events are committed, and possibly a little more."""
        self.restart(self.journal.survivors(more)[-1], clean=False)

    @rule()
    def restart_daemon(self) -> None:
        """Stop and start the daemon."""
        self.journal.let_go()
        self.restart(len(self.journal.records), clean=True)

    def restart(self, n_records: int, *, clean: bool) -> None:
        """Start a daemon with the first ``n`` records, which include all that was delivered."""
        self.socket.open = False
        records = self.journal.records[:n_records]
        (session,) = kept(records)
        ended, pending_turn = {turn.turn_id for turn in session.turns}, session.pending_turn
        assert self.reader.answers.keys() <= ended
        if self.reader.turn_id not in (None, *ended):
            assert pending_turn is not None
            assert pending_turn.spec.turn_id == self.reader.turn_id
            assert pending_turn.text.startswith(self.reader.text)
        self.journal = CommittingJournal()
        self.journal.records = records
        self.journal.safe = n_records
        self.oracle = Oracle(prompts=self.oracle.prompts)
        self.oracle.lose()
        self.sessions = self.begin()
        self.sessions.restore(kept(records), clean=clean)

    @invariant()
    def what_is_shown_is_right(self) -> None:
        """At any moment the client has a prefix of the running answer and all of the ended ones."""
        for turn_id, text in self.reader.answers.items():
            assert text == self.expected(turn_id)
        if self.reader.turn_id is not None:
            assert self.expected(self.reader.turn_id).startswith(self.reader.text)

    def expected(self, turn_id: str) -> str:
        """The text of the turn; none before an engine had it."""
        prompt = self.oracle.prompts.get(turn_id)
        return "" if prompt is None else script(prompt)

    def teardown(self) -> None:
        """After recovery the client gets every answer, and each turn has run once."""
        self.engine_ready()
        for _ in range(3):
            self.come_back()
            self.journal.let_go()
            if not self.answered:
                self.infer()
            self.oracle.run()
            self.journal.let_go()
        self.come_back_with_nothing()
        assert self.answered
        self.what_is_shown_is_right()
        session = self.sessions.get(ADA, requests.GetSession(op="get_session", session_id=self.session_id))
        questions = [message.content for message in session.transcript if message.role == "user"]
        assert questions == [f"question {number + 1}" for number in range(self.asked)]
        answers = [message.content for message in session.transcript if message.role == "assistant"]
        assert answers == list(self.reader.answers.values())


@pytest.mark.parametrize("n_sequences", [15, pytest.param(60, marks=pytest.mark.slow)])
def test_any_sequence_of_losses(n_sequences: int) -> None:
    """The client shows each answer once, whatever is lost."""
    run_state_machine_as_test(Survival, settings=settings(max_examples=n_sequences, stateful_step_count=40))


def test_second_turn_in_a_busy_session_is_refused() -> None:
    """The state machine never sends one, so it is tested here."""
    machine = Survival()
    machine.ask()
    machine.asked += 1
    try:
        machine.infer()
    except InferenceCenterError as error:
        assert error.code is ErrorCode.SESSION_BUSY  # noqa: PT017
    else:
        raise AssertionError("two turns at once")

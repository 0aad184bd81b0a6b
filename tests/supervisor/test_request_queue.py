"""The queue of unfinished turns across any number of engines."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

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
from structlog.testing import capture_logs

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.framing import FramingError
from inferencecenter.ipc.messages import (
    AbortTurn,
    Cancelled,
    ContextFull,
    Embed,
    EmbeddingDelta,
    EmbeddingDone,
    EmbeddingInput,
    Failed,
    Finished,
    Submit,
    ToEngine,
    TokenDelta,
    TurnEvent,
    pack_tokens,
    unpack_tokens,
)
from inferencecenter.supervisor.poison_turns import PROVEN_TOKENS, CrashLimit, PoisonTurnStore, SuspectedTurns
from inferencecenter.supervisor.process import EngineExit
from inferencecenter.supervisor.request_queue import RequestQueue
from tests.supervisor.harness import RecordingTurn, order

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def finished(turn_id: str, reason: str = "stop") -> Finished:
    """Return an end."""
    return Finished(
        turn_id=turn_id,
        reason=reason,
        stop=None,
        kept_tokens=0,
        kept_chars=0,
        end_text="",
        prompt_tokens=0,
        cached_tokens=0,
        generated_tokens=0,
        queue_ms=0,
        ttft_ms=0,
        total_ms=0,
        tokens_per_s=0,
    )


@dataclass
class Engine:
    """The other end: its turns and their numbers of tokens; its events are in ``outbox``."""

    has: dict[str, int] = field(default_factory=dict)
    aborting: list[str] = field(default_factory=list)
    took: list[str] = field(default_factory=list)
    accepted: list[str] = field(default_factory=list)
    has_room: bool = True

    def send(self, message: ToEngine) -> None:
        """Receive a command."""
        match message:
            case Submit(turn_id=turn_id, answer=answer, accepted=accepted):
                assert turn_id not in self.has, "a turn is in one engine once"
                self.has[turn_id] = len(answer) // 4
                self.took.append(turn_id)
                self.accepted += [turn_id] if accepted else []
            case AbortTurn(turn_id=turn_id):
                assert turn_id in self.has or turn_id in self.took
                self.aborting.append(turn_id)

    def says(self, turn_id: str) -> TokenDelta:
        """Generate a token of a turn."""
        self.has[turn_id] += 1
        return TokenDelta(turn_id, pack_tokens([self.has[turn_id] - 1]), "x")

    def ends(self, turn_id: str, reason: str = "stop") -> Finished:
        """End a turn."""
        del self.has[turn_id]
        return finished(turn_id, reason)


@dataclass
class Soon:
    """Calls scheduled for the next loop iteration; with ``at_once`` it runs as soon as there are any."""

    at_once: bool = False
    calls: deque[Callable[[], None]] = field(default_factory=deque)
    turning: bool = False

    def arrange(self, call: Callable[[], None]) -> None:
        """Schedule a call."""
        self.calls.append(call)
        if not self.at_once or self.turning:
            return
        self.turning = True
        while self.turn():
            pass
        self.turning = False

    def turn(self) -> bool:
        """Run the calls of one loop iteration; return whether there were any."""
        calls, self.calls = self.calls, deque()
        for call in calls:
            call()
        return bool(calls)


def make_turns(
    soon: Soon | None = None,
    *,
    max_deaths: int = 0,
    remember: Callable[[SuspectedTurns], None] = lambda _: None,
) -> RequestQueue:
    """Return a queue that submits turns when ``soon`` runs, or at once."""
    return RequestQueue(
        call_soon=(soon or Soon(at_once=True)).arrange,
        changed=lambda: None,
        crash_limit=CrashLimit(max_deaths=max_deaths, window_s=3600.0, monotonic=lambda: 0.0),
        remember=remember,
    )


def suspected_twice(*turns: RecordingTurn) -> tuple[RequestQueue, Engine]:
    """Return a queue whose turns were all named by two dead engines, and its third engine."""
    table = make_turns()
    for turn in turns:
        table.add(turn)
    for _ in range(2):
        table.connect(Engine())
        table.lost(EngineExit("died", tuple(turn.turn_id for turn in turns)))
    engine = Engine()
    table.connect(engine)
    return table, engine


def test_turn_queued_before_the_engine_is_accepted() -> None:
    """No engine may refuse it for lack of room; later turns may be refused, whether they waited or not."""
    table, first, second = make_turns(), Engine(), Engine()
    table.add(RecordingTurn(order("waited")))
    table.connect(first)
    table.add(RecordingTurn(order("new")))
    first.has_room = False
    table.add(RecordingTurn(order("late")))
    first.has_room = True
    table.schedule_step()
    assert (first.took, first.accepted) == (["waited", "new", "late"], ["waited"])
    table.lost()
    table.connect(second)
    assert second.accepted == ["waited", "new", "late"]


def test_turns_are_resubmitted_in_order() -> None:
    """Turns that ran and turns that arrived without an engine keep their positions."""
    table, first, second = make_turns(), Engine(), Engine()
    a, b, c = (RecordingTurn(order(name)) for name in "abc")
    table.connect(first)
    table.add(a)
    table.add(b)
    table.on_engine_event(first.says("a"))
    table.lost()
    assert not table.add(c)
    assert (table.n_waiting, table.engine_is_busy) == (3, False)
    table.connect(second)
    assert (second.took, second.has) == (["a", "b", "c"], {"a": 1, "b": 0, "c": 0})
    assert [turn.interruptions for turn in (a, b, c)] == [1, 1, 0]


class EmbeddingTurn(RecordingTurn):
    """A request for embeddings."""

    def submission(self, then: Callable[[], None]) -> Embed:  # type: ignore[override]
        """Return the request."""
        return Embed(turn_id=self.turn_id, client_id=self.client_id, priority=1, inputs=(EmbeddingInput("text"),))


def test_request_for_embeddings_ends_with_its_last_event() -> None:
    """It outlives its engine, gets its vectors, and its success clears its client of the engine's death."""
    table, turn = make_turns(max_deaths=2), EmbeddingTurn(order("e"))
    table.connect(Engine())
    table.add(turn)
    table.lost(EngineExit("died", ("e",)))
    table.connect(Engine())
    delta, done = EmbeddingDelta("e", b"", 1, 1), EmbeddingDone("e", 0, 0)
    table.on_engine_event(delta)
    table.on_engine_event(done)
    assert turn.events == [delta, done]
    assert (turn.interruptions, len(table)) == (1, 0)
    table.add(another := EmbeddingTurn(order("another")))
    table.lost(EngineExit("died", ("another",)))
    assert another.events == []


def test_one_turn_is_submitted_per_loop_iteration() -> None:
    """They are in order; rendering alternates with other work, and a turn that arrived late may be among them."""
    soon, engine = Soon(), Engine()
    table = make_turns(soon)
    turns = [RecordingTurn(order(f"t{number}")) for number in range(50)]
    for turn in turns:
        table.add(turn)
    table.connect(engine)
    submitted = 0
    while soon.turn():
        assert sum(turn.submissions for turn in turns) - submitted <= 1
        submitted = sum(turn.submissions for turn in turns)
    assert engine.took == [turn.turn_id for turn in turns]
    assert (table.n_waiting, len(soon.calls)) == (0, 0)


def test_send_window_holds_back_submissions() -> None:
    """They wait, whether queued or new, until the engine has read what it was sent."""
    table, engine = make_turns(), Engine(has_room=False)
    early, late = RecordingTurn(order("early")), RecordingTurn(order("late"))
    table.add(early)
    table.connect(engine)
    assert not table.add(late)
    assert (engine.took, table.n_waiting) == ([], 2)
    engine.has_room = True
    table.schedule_step()
    assert (engine.took, table.n_waiting) == (["early", "late"], 0)


def test_engine_lost_during_submission_loses_no_turn() -> None:
    """The rest was not submitted, and the next engine gets all turns."""
    soon, first, second = Soon(), Engine(), Engine()
    table = make_turns(soon)
    turns = [RecordingTurn(order(name)) for name in "abc"]
    for turn in turns:
        table.add(turn)
    table.connect(first)
    soon.turn()
    table.lost()
    assert not soon.turn() or first.took == ["a"]
    table.connect(second)
    while soon.turn():
        pass
    assert (first.took, second.took) == (["a"], ["a", "b", "c"])
    assert [turn.submissions for turn in turns] == [2, 1, 1]


def test_turns_that_cannot_be_submitted_end() -> None:
    """Each gets one end with its own reason, and the others run."""

    class Refusing(RecordingTurn):
        def submission(self, then: Callable[[], None]) -> Submit:
            raise self.error

        error: Exception = InferenceCenterError(ErrorCode.MODEL_NOT_FOUND, "another model")

    class Broken(Refusing):
        error = RuntimeError("a defect")

    table, engine = make_turns(), Engine()
    failing = [(Broken if number % 2 else Refusing)(order(f"bad{number}")) for number in range(5000)]
    fine = [RecordingTurn(order(f"fine{number}")) for number in range(3)]
    for turn in (fine[0], *failing[:2500], fine[1], *failing[2500:], fine[2]):
        table.add(turn)
    with capture_logs():
        table.connect(engine)
    assert [len(turn.terminal) for turn in failing] == [1] * len(failing)
    assert engine.took == [turn.turn_id for turn in fine]
    assert len(table) == len(fine)


@pytest.mark.parametrize("begun", [True, False])
def test_given_up_engine_fails_turns(*, begun: bool) -> None:
    """All turns fail, or only those without output, since the others may resume on a later engine."""
    table, engine = make_turns(), Engine()
    said, silent = RecordingTurn(order("said")), RecordingTurn(order("silent"))
    table.connect(engine)
    for turn in (said, silent):
        table.add(turn)
    table.on_engine_event(engine.says("said"))
    table.lost()
    table.fail(InferenceCenterError(ErrorCode.ENGINE_UNAVAILABLE), begun=begun)
    assert ([len(turn.terminal) for turn in (said, silent)], len(table)) == ([int(begun), 1], int(not begun))


@pytest.mark.parametrize("given_up", [False, True])
def test_turns_of_a_lost_engine_are_notified_one_per_iteration(*, given_up: bool) -> None:
    """They are notified in order and once: each waits again, or has ended."""
    soon, engine, told = Soon(), Engine(), list[str]()

    class Noting(RecordingTurn):
        def on_engine_event(self, event: TurnEvent) -> None:
            super().on_engine_event(event)
            told.append(self.turn_id)

        def on_engine_lost(self) -> None:
            super().on_engine_lost()
            told.append(self.turn_id)

    table = make_turns(soon)
    table.connect(engine)
    turns = [Noting(order(f"t{number}")) for number in range(1000)]
    for turn in turns:
        table.add(turn)
    table.lost()
    if given_up:
        table.fail(InferenceCenterError(ErrorCode.ENGINE_UNAVAILABLE), begun=True)
        assert len(table) == 0
    counts = [len(told)]
    while soon.turn():
        counts.append(len(told))
    assert max(after - before for before, after in pairwise(counts)) == 1
    assert told == [turn.turn_id for turn in turns]
    assert {(turn.interruptions, len(turn.terminal)) for turn in turns} == {(0, 1) if given_up else (1, 0)}
    assert not table.notifying


def test_events_before_the_notice_of_a_lost_engine() -> None:
    """An abort ends the turn at once, a recalled turn is resubmitted afterwards, and the next engine waits for both."""
    soon, first, second = Soon(), Engine(), Engine()
    table = make_turns(soon)
    table.connect(first)
    aborted, recalled, stays = (RecordingTurn(order(name)) for name in ("aborted", "recalled", "stays"))
    for turn in (aborted, stays, recalled):
        table.add(turn)
    table.on_engine_event(first.says("aborted"))
    table.on_engine_event(first.says("stays"))
    table.lost()
    table.abort("aborted")
    table.recall(begun=False)
    assert (aborted.terminal, recalled.interruptions, len(table)) == ([Cancelled("aborted")], 0, 1)
    table.connect(second)
    for interruptions, recalls in ((0, 0), (1, 0), (1, 1)):
        assert soon.turn()
        assert (stays.interruptions, recalled.interruptions, recalled.recalls) == (1, interruptions, recalls)
        assert second.took == []
    while soon.turn():
        pass
    assert (second.took, stays.interruptions, aborted.interruptions, recalled.interruptions) == (["stays"], 1, 0, 1)


@pytest.mark.parametrize("what", ["recall", "delay"])
def test_recalled_and_delayed_turns_are_notified_one_per_iteration(what: str) -> None:
    """Each is notified once, and their number does not matter."""
    soon, told = Soon(), list[str]()

    class Noting(RecordingTurn):
        def resubmit(self) -> None:
            told.append(self.turn_id)

        def on_delay(self, seconds: float) -> None:
            told.append(self.turn_id)

    table = make_turns(soon)
    names = [f"t{number}" for number in range(1000)]
    for name in names:
        table.add(Noting(order(name)))
    if what == "recall":
        table.recall(begun=False)
    else:
        table.delay(1.0)
        table.delay(2.0)
    assert (told, len(table)) == ([], 0 if what == "recall" else 1000)
    counts = [0]
    while soon.turn():
        counts.append(len(told))
    assert told == names
    assert max(after - before for before, after in pairwise(counts)) == 1


def test_turn_that_left_the_queue_gets_no_delay() -> None:
    """It was aborted, or an engine took it."""
    soon = Soon()
    table = make_turns(soon)
    gone, stays = RecordingTurn(order("gone")), RecordingTurn(order("stays"))
    table.add(gone)
    table.add(stays)
    table.delay(1.0)
    table.abort("gone")
    soon.turn()
    table.delay(2.0)
    table.connect(Engine())
    while soon.turn():
        pass
    assert (gone.delays_s, stays.delays_s) == ([], [1.0])


def test_recalled_turn_can_be_aborted() -> None:
    """It can be until it is resubmitted; the end of the daemon leaves it to the next one."""
    soon = Soon()
    table = make_turns(soon)
    aborted, left = RecordingTurn(order("aborted")), RecordingTurn(order("left"))
    table.add(aborted)
    table.add(left)
    table.recall(begun=False)
    assert table.notifying
    table.abort("aborted")
    table.forget_recalled()
    while soon.turn():
        pass
    assert not table.notifying
    assert (aborted.terminal, left.terminal) == ([Cancelled("aborted")], [])
    assert (aborted.recalls, left.recalls) == (0, 0)


def test_turn_with_a_pending_end_gets_no_other_event() -> None:
    """It gets neither an abort nor a new engine; a new turn runs."""
    soon, engine = Soon(), Engine()
    table = make_turns(soon)
    failed, late = RecordingTurn(order("failed")), RecordingTurn(order("late"))
    table.add(failed)
    table.fail(InferenceCenterError(ErrorCode.ENGINE_UNAVAILABLE), begun=True)
    assert (failed.terminal, len(table), table.notifying) == ([], 0, True)
    table.abort("failed")
    table.connect(engine)
    assert table.add(late)
    while soon.turn():
        pass
    assert [type(end) for end in failed.terminal] == [Failed]
    assert engine.took == ["late"]


class Slow(RecordingTurn):
    """A turn whose prompt is ready when a test says so."""

    ready = False
    asked = 0
    then: Callable[[], None] = staticmethod(lambda: None)

    def submission(self, then: Callable[[], None]) -> Submit | None:
        """Record the waiting callback."""
        self.asked += 1
        self.then = then
        return super().submission(then) if self.ready else None

    def rendered(self) -> None:
        """Complete the prompt."""
        self.ready = True
        self.then()


def test_turn_without_a_prompt_blocks_no_other() -> None:
    """It is submitted when its prompt is ready, before or after the engine."""
    table, engine = make_turns(), Engine()
    before, after, quick = Slow(order("before")), Slow(order("after")), RecordingTurn(order("quick"))
    table.add(before)
    table.add(quick)
    table.connect(engine)
    assert table.add(after), "it waits for no slot"
    assert (engine.took, table.n_waiting) == (["quick"], 2)
    after.rendered()
    before.rendered()
    assert engine.took == ["quick", "after", "before"]
    assert (before.asked, after.asked) == (2, 2)


def test_turns_in_rendering_count_as_being_submitted() -> None:
    """An engine to be evicted knows that it has not yet received them."""
    soon = Soon()
    table, engine, turn = make_turns(soon), Engine(), Slow(order("a"))
    table.add(turn)
    assert not table.handing_over
    table.connect(engine)
    assert table.handing_over
    soon.turn()
    assert table.handing_over, "it is rendered"
    turn.rendered()
    while soon.turn():
        pass
    assert (table.handing_over, engine.took) == (False, ["a"])


def test_turn_without_a_prompt_is_not_interrupted() -> None:
    """Its prompt may become ready without an engine; the next engine gets the turn."""
    table, first, second = make_turns(), Engine(), Engine()
    turn = Slow(order("a"))
    table.connect(first)
    table.add(turn)
    table.lost()
    turn.rendered()
    assert first.took == []
    table.connect(second)
    assert (second.took, turn.interruptions) == (["a"], 0)


def test_turn_aborted_during_rendering_is_not_submitted() -> None:
    """Its prompt is dropped when it becomes ready."""
    table, engine = make_turns(), Engine()
    turn = Slow(order("a"))
    table.connect(engine)
    table.add(turn)
    table.abort("a")
    turn.rendered()
    assert (engine.took, len(table), len(turn.terminal)) == ([], 0, 1)


class Life:
    """Consecutive daemons on one state directory, each with the unfinished turns."""

    def __init__(self, file: Path, turns: list[RecordingTurn]) -> None:
        self.file = file
        self.turns = turns

    def begin(self, *, after_crash: bool) -> tuple[RequestQueue, Engine]:
        """Start a daemon, which resumes the unfinished turns; return its queue and its first engine."""
        kept = PoisonTurnStore(self.file)
        table, engine = make_turns(remember=partial(kept.put, "model")), Engine()
        for turn in self.turns:
            if not turn.terminal:
                table.add(turn)
        table.resume(kept.of("model"), after_crash=after_crash)
        table.connect(engine)
        return table, engine


def test_turn_that_kills_daemons_is_quarantined_by_the_fifth(tmp_path: Path) -> None:
    """Daemon and engine die together each time: two deaths isolate it, two more quarantine it."""
    poison, fine = RecordingTurn(order("poison")), RecordingTurn(order("fine"))
    life = Life(tmp_path / "suspects.json", [poison, fine])
    assert life.begin(after_crash=False)[1].took == ["poison", "fine"]
    assert life.begin(after_crash=True)[1].took == ["poison", "fine"]
    for _ in range(2):
        assert life.begin(after_crash=True)[1].took == ["poison"]
    table, engine = life.begin(after_crash=True)
    assert [end.code for end in poison.terminal if isinstance(end, Failed)] == [ErrorCode.ENGINE_CRASHED]
    assert engine.took == ["fine"]
    table.on_engine_event(engine.ends("fine"))
    assert PoisonTurnStore(life.file).of("model") == SuspectedTurns()


def test_turns_with_progress_survive_any_number_of_daemons(tmp_path: Path) -> None:
    """Turns with progress between two deaths are never isolated."""
    turns = [RecordingTurn(order(name)) for name in "abc"]
    life = Life(tmp_path / "suspects.json", turns)
    for number in range(10):
        table, engine = life.begin(after_crash=number > 0)
        assert engine.took == ["a", "b", "c"]
        for turn in turns:
            for _ in range(PROVEN_TOKENS):
                table.on_engine_event(engine.says(turn.turn_id))
        assert PoisonTurnStore(life.file).of("model") == SuspectedTurns()


def test_turn_with_progress_in_each_daemon_is_not_suspected(tmp_path: Path) -> None:
    """One token between two deaths is enough: it would complete if it were left running."""
    slow = RecordingTurn(order("slow"))
    life = Life(tmp_path / "suspects.json", [slow])
    for number in range(10):
        table, engine = life.begin(after_crash=number > 0)
        assert engine.took == ["slow"]
        table.on_engine_event(engine.says("slow"))
    assert (slow.terminal, slow.n_tokens) == ([], 10)


def test_suspicion_survives_a_clean_stop(tmp_path: Path) -> None:
    """A daemon that gives its engine up leaves the search to the next; a clean stop suspects no turn."""
    poison, fine = RecordingTurn(order("poison")), RecordingTurn(order("fine"))
    life = Life(tmp_path / "suspects.json", [poison, fine])
    for expected in (["poison", "fine"], ["poison", "fine"], ["poison"]):
        table, engine = life.begin(after_crash=False)
        assert engine.took == expected
        assert table.lost(EngineExit("died", ("poison",))) == (expected == ["poison"])
    assert [end.code for end in poison.terminal if isinstance(end, Failed)] == [ErrorCode.ENGINE_CRASHED]
    life.begin(after_crash=False)[0].lost()
    assert life.begin(after_crash=False)[1].took == ["fine"]


@pytest.mark.parametrize("content", [b"", b"{", b'{"model": 7}', b"\xff" * 100])
def test_damaged_file_of_suspects_is_replaced(tmp_path: Path, content: bytes) -> None:
    """It is named in the log and written again."""
    path = tmp_path / "suspects.json"
    path.write_bytes(content)
    with capture_logs() as logs:
        kept = PoisonTurnStore(path)
    assert [line["event"] for line in logs] == ["suspects_unreadable"]
    kept.put("model", SuspectedTurns({"t": 1}))
    assert PoisonTurnStore(path).of("model") == SuspectedTurns({"t": 1})


def test_events_of_a_lost_engine_are_ignored() -> None:
    """So are events of an unknown turn."""
    table, engine = make_turns(), Engine()
    turn = RecordingTurn(order("a"))
    table.connect(engine)
    table.add(turn)
    table.lost()
    table.on_engine_event(engine.says("a"))
    table.on_engine_event(finished("a"))
    table.on_engine_event(finished("unknown"))
    assert turn.events == []


def test_suspects_run_alone() -> None:
    """When one is cleared, the next one is isolated: it leaves without an event, and its text is generated again."""
    a, b, c = (RecordingTurn(order(name)) for name in "abc")
    table, engine = suspected_twice(a, b)
    assert not table.add(c)
    assert engine.took == ["a"]
    for _ in range(PROVEN_TOKENS):
        table.on_engine_event(engine.says("a"))
    assert engine.aborting == ["a"]
    assert (engine.took, a.interruptions) == (["a"], 3)
    table.on_engine_event(engine.says("a"))
    assert a.n_tokens == PROVEN_TOKENS
    table.on_engine_event(engine.ends("a", "aborted"))
    assert (engine.took, a.terminal) == (["a", "b"], [])
    for _ in range(PROVEN_TOKENS):
        table.on_engine_event(engine.says("b"))
    assert engine.took == ["a", "b", "a", "c"]
    assert engine.has == {"b": PROVEN_TOKENS, "a": PROVEN_TOKENS, "c": 0}
    assert b.interruptions == 2


def test_turn_that_kills_the_engine_alone_is_quarantined() -> None:
    """It gets the reason; the others, suspects too, continue."""
    a, b = RecordingTurn(order("a")), RecordingTurn(order("b"))
    table, _ = suspected_twice(a, b)
    with capture_logs() as logs:
        assert table.lost(EngineExit("killed by SIGSEGV", ("a",)))
    (end,) = a.terminal
    assert isinstance(end, Failed)
    assert (end.code, "SIGSEGV" in end.message, bool(end.hint)) == (ErrorCode.ENGINE_CRASHED, True, True)
    assert [line["turn"] for line in logs if line["event"] == "turn_quarantined"] == ["a"]
    engine = Engine()
    table.connect(engine)
    assert engine.took == ["b"]
    assert len(table) == 1


def test_isolation_ends_with_its_turn() -> None:
    """The next suspect runs when the isolated turn has finished, overflowed or been aborted."""
    a, b, c = (RecordingTurn(order(name)) for name in "abc")
    table, engine = suspected_twice(a, b, c)
    table.on_engine_event(engine.ends("a"))
    assert engine.took == ["a", "b"]
    table.on_engine_event(ContextFull(turn_id="b", n_tokens=1))
    assert engine.took == ["a", "b", "c"]
    table.abort("c")
    table.on_engine_event(engine.ends("c", "aborted"))
    assert len(table) == 0


def test_shifted_turn_stays_isolated() -> None:
    """It is resubmitted during its own event, and still runs alone."""
    table = make_turns()

    class Shifting(RecordingTurn):
        def on_engine_event(self, event: TurnEvent) -> None:
            if isinstance(event, ContextFull):
                assert table.add(self)
            else:
                super().on_engine_event(event)

    a, b = Shifting(order("a")), RecordingTurn(order("b"))
    table.add(a)
    table.add(b)
    for _ in range(2):
        table.connect(Engine())
        table.lost(EngineExit("died", ("a",)))
    engine = Engine()
    table.connect(engine)
    engine.has.clear()
    table.on_engine_event(ContextFull(turn_id="a", n_tokens=1))
    assert engine.took == ["a", "a"]
    assert table.lost(EngineExit("died", ("a",)))


def test_abort_while_a_turn_is_withdrawn_ends_it_at_once() -> None:
    """Later events of the engine are dropped."""
    a, b = RecordingTurn(order("a")), RecordingTurn(order("b"))
    table, engine = suspected_twice(a, b)
    for _ in range(PROVEN_TOKENS):
        table.on_engine_event(engine.says("a"))
    table.abort("a")
    assert a.terminal == [Cancelled("a")]
    assert engine.took == ["a"]
    table.on_engine_event(engine.ends("a", "aborted"))
    assert engine.took == ["a", "b"]
    assert a.terminal == [Cancelled("a")]


def test_turn_being_aborted_is_not_recalled() -> None:
    """Its end is on its way, and the next isolation waits for it."""
    a, b = RecordingTurn(order("a")), RecordingTurn(order("b"))
    table, engine = suspected_twice(a, b)
    table.abort("a")
    for _ in range(PROVEN_TOKENS):
        table.on_engine_event(engine.says("a"))
    assert (engine.aborting, engine.took) == (["a"], ["a"])
    table.on_engine_event(engine.ends("a", "aborted"))
    assert [end.reason for end in a.terminal if isinstance(end, Finished)] == ["aborted"]
    assert engine.took == ["a", "b"]


def test_oversized_submission_is_refused() -> None:
    """The error is that of the submission, or the end of a turn that waited."""

    class Narrow(Engine):
        def send(self, message: ToEngine) -> None:
            raise FramingError("too large")

    table = make_turns()
    waiting, direct = RecordingTurn(order("waiting")), RecordingTurn(order("direct"))
    table.add(waiting)
    table.connect(Narrow())
    assert [end.code for end in waiting.terminal if isinstance(end, Failed)] == [ErrorCode.PROMPT_TOO_LONG]
    with pytest.raises(InferenceCenterError) as caught:
        table.add(direct)
    assert caught.value.code is ErrorCode.PROMPT_TOO_LONG
    assert (len(table), direct.events) == (0, [])


def test_failing_listener_does_not_affect_other_turns() -> None:
    """It fails at an interruption or at an end."""

    class Broken(RecordingTurn):
        def on_engine_lost(self) -> None:
            raise RuntimeError

        def on_engine_event(self, event: TurnEvent) -> None:
            raise RuntimeError

    table, engine = make_turns(), Engine()
    broken, fine = Broken(order("broken")), RecordingTurn(order("fine"))
    table.connect(engine)
    table.add(broken)
    table.add(fine)
    with capture_logs() as logs:
        table.lost()
        table.fail(InferenceCenterError(ErrorCode.ENGINE_UNAVAILABLE, "given up", hint="h"), begun=True)
    assert fine.terminal == [Failed(turn_id="fine", code="engine_unavailable", message="given up", hint="h")]
    assert [line["event"] for line in logs] == ["turn_listener_failed"] * 2
    assert repr(table) == "RequestQueue(0, in_flight=0, PoisonTurnDetector({}, isolated=None))"


class TurnsMachine(RuleBasedStateMachine):
    """Turns start, generate, end, are aborted, and lose engines at any time; a poison turn kills its engine."""

    def __init__(self) -> None:
        super().__init__()
        self.table = make_turns()
        self.engine: Engine | None = None
        self.turns: dict[str, RecordingTurn] = {}
        self.aborted: set[str] = set()
        self.accused: dict[str, int] = {}
        self.may_be_quarantined: set[str] = set()

    @initialize(poisons=st.sets(st.integers(0, 9), max_size=3))
    def begin(self, poisons: set[int]) -> None:
        """Choose which future turns kill engines."""
        self.poisons = {f"t{n}" for n in poisons}

    @rule()
    def submit(self) -> None:
        """Submit a turn."""
        turn = RecordingTurn(order(f"t{len(self.turns)}"))
        self.turns[turn.turn_id] = turn
        given = self.table.add(turn)
        assert given == (self.engine is not None and turn.turn_id in self.engine.has)

    @precondition(lambda self: self.engine is None)
    @rule()
    def connect(self) -> None:
        """Connect an engine; it gets turns in the order of their submission."""
        self.engine = Engine()
        self.table.connect(self.engine)
        places = [list(self.turns).index(turn_id) for turn_id in self.engine.took]
        assert places == sorted(places)

    @precondition(lambda self: self.engine is not None)
    @rule()
    def stall(self) -> None:
        """Stop the engine from reading, or let it read all messages."""
        assert self.engine is not None
        self.engine.has_room = not self.engine.has_room
        if self.engine.has_room:
            self.table.schedule_step()

    @precondition(lambda self: self.engine is not None and self.engine.has)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Run a step of some turns, unless one of them kills the engine."""
        assert self.engine is not None
        chosen = data.draw(st.sets(st.sampled_from(sorted(self.engine.has)), min_size=1))
        if chosen & self.poisons:
            self._die(chosen)
            return
        for turn_id in sorted(chosen):
            event = self.engine.says(turn_id)
            self.table.on_engine_event(event)

    @precondition(lambda self: self.engine is not None and self.engine.has)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """End a turn."""
        assert self.engine is not None
        turn_id = data.draw(st.sampled_from(sorted(self.engine.has)))
        self.table.on_engine_event(self.engine.ends(turn_id))

    @precondition(lambda self: self.engine is not None and self.engine.aborting)
    @rule()
    def answer_abort(self) -> None:
        """Answer an abort, if the engine still has the turn."""
        self._answer_abort()

    @precondition(lambda self: self.turns)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Abort a turn, which may have ended."""
        turn_id = data.draw(st.sampled_from(sorted(self.turns)))
        self.aborted.add(turn_id)
        self.table.abort(turn_id)

    @precondition(lambda self: self.engine is not None)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        """Kill the engine for another reason, in a step or between two."""
        assert self.engine is not None
        self._die(data.draw(st.sets(st.sampled_from(sorted(self.engine.has)))) if self.engine.has else set())

    @invariant()
    def each_turn_has_said_each_word_once(self) -> None:
        """Each turn has generated each word once, has ended at most once, and is kept until then."""
        for turn in self.turns.values():
            assert unpack_tokens(turn.tokens) == list(range(turn.n_tokens))
            assert len(turn.terminal) <= 1
        assert len(self.table) == sum(not turn.terminal for turn in self.turns.values())

    @invariant()
    def only_who_was_alone_is_quarantined(self) -> None:
        """Only isolated turns are quarantined, and only aborted turns end as aborted."""
        for turn in self.turns.values():
            for end in turn.terminal:
                if isinstance(end, Failed):
                    assert turn.turn_id in self.may_be_quarantined
                if isinstance(end, Cancelled):
                    assert turn.turn_id in self.aborted

    @invariant()
    def the_engine_has_what_it_may_have(self) -> None:
        """An engine that reads has all turns, or an isolated one, or is being emptied for it."""
        if self.engine is None:
            assert not self.table.engine_is_busy
        elif not self.engine.has_room:
            assert self.table.n_waiting <= len(self.table)
        elif self.table.n_waiting:
            isolated = self.table._detector.isolated
            leaving = set(self.engine.aborting) & set(self.engine.has)
            assert isolated is not None or leaving
            assert leaving or set(self.engine.has) == {isolated}

    def teardown(self) -> None:
        """Without faults every turn ends."""
        for _ in range(100 * (len(self.turns) + 1)):
            if not len(self.table):
                break
            if self.engine is None:
                self.connect()
            assert self.engine is not None
            if not self.engine.has_room:
                self.stall()
            while self.engine.aborting:
                self._answer_abort()
            self._run_all()
        assert all(len(turn.terminal) == 1 for turn in self.turns.values())
        for turn_id in self.poisons & set(self.turns):
            (end,) = self.turns[turn_id].terminal
            assert isinstance(end, Failed | Finished | Cancelled)

    def _run_all(self) -> None:
        assert self.engine is not None
        for turn_id in sorted(self.engine.has):
            if turn_id in self.poisons:
                self._die(set(self.engine.has))
                return
            if turn_id in self.engine.has:
                over = self.engine.has[turn_id] > 2 * PROVEN_TOKENS
                self.table.on_engine_event(self.engine.ends(turn_id) if over else self.engine.says(turn_id))

    def _answer_abort(self) -> None:
        assert self.engine is not None
        turn_id = self.engine.aborting.pop(0)
        if turn_id in self.engine.has:
            self.table.on_engine_event(self.engine.ends(turn_id, "aborted"))

    def _die(self, named: set[str]) -> None:
        """Lose the engine; quarantine requires a turn that ran alone and was named twice before."""
        assert self.engine is not None
        alone = set(self.engine.has)
        if len(alone) == 1 and named == alone and self.accused.get(min(alone), 0) >= 2:
            self.may_be_quarantined |= alone
        self.engine = None
        running = {turn_id for turn_id in named if not self.turns[turn_id].terminal}
        for turn_id in running:
            self.accused[turn_id] = self.accused.get(turn_id, 0) + 1
        self.table.lost(EngineExit("died", tuple(sorted(named))))


@pytest.mark.parametrize("n_sequences", [25, pytest.param(100, marks=pytest.mark.slow)])
def test_any_sequence_of_turns(n_sequences: int) -> None:
    """Each turn ends once, and only a turn that killed engines is quarantined."""
    run_state_machine_as_test(TurnsMachine, settings=settings(max_examples=n_sequences))

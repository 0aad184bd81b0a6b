"""An internal error in a turn ends only that turn: its session is idle again and usable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from inferencecenter.config.limits import NO_LIMITS
from inferencecenter.protocol import events
from inferencecenter.sessions import turn_runner
from inferencecenter.sessions.context import UnlimitedQuota
from inferencecenter.sessions.event_log import EventLog, ReplayBuffer
from inferencecenter.sessions.history import TurnLog
from inferencecenter.sessions.journal import StoredSession, TurnEnded
from inferencecenter.sessions.session import LiveSession
from inferencecenter.sessions.turn import Turn
from tests.sessions.conftest import FakeJournal, FakeSink, SessionHarness

if TYPE_CHECKING:
    from collections.abc import Callable


class Running(UnlimitedQuota):
    """Counts the running turns."""

    limits = NO_LIMITS

    def __init__(self) -> None:
        self.running = 0

    def begin_turn(self) -> None:
        """Count the start of a turn."""
        self.running += 1

    def end_turn(self) -> None:
        """Count the end of a turn."""
        self.running -= 1


def broken_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, after: bool = False) -> list[str]:
    """Make a function raise once, before or after its work; the list is filled when it has."""
    whole = getattr(owner, name)
    raised: list[str] = []

    def defective(*args: Any, **kwargs: Any) -> Any:
        if raised:
            return whole(*args, **kwargs)
        raised.append(name)
        if after:
            whole(*args, **kwargs)
        raise RuntimeError("a defect")

    monkeypatch.setattr(owner, name, defective)
    return raised


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (EventLog, "queued"),
        (EventLog, "publish_text"),
        (EventLog, "end"),
        (EventLog, "publish"),
        (ReplayBuffer, "add"),
        (Turn, "start"),
        (Turn, "extend"),
        (Turn, "finished_outcome"),
        (TurnLog, "record_end"),
        (UnlimitedQuota, "use"),
        (turn_runner, "end_trace"),
        (turn_runner, "after_turn"),
    ],
)
def test_internal_error_ends_only_its_turn(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, after: bool
) -> None:
    """The client receives one end, the session is idle, and the next turn runs."""
    quota = Running()
    world = SessionHarness(quota_of=lambda _client, _token: quota)
    session_id = world.create()
    raised = broken_once(monkeypatch, owner, name, after=after)
    with capture_logs() as logs:
        world.infer(session_id, "Hi", id="first")
        turn_id = world.engine.last.turn_id
        if turn_id not in world.engine.aborted:
            world.engine.answer("Hello")
    assert raised
    assert "turn_broken" in [line["event"] for line in logs]
    assert (world.get(session_id).state, quota.running) == ("idle", 0)
    told = [event for event in world.sink.events if isinstance(event, events.End | events.Error)]
    assert [event.turn_id for event in told if isinstance(event, events.Error)] in ([turn_id], [])
    assert isinstance(told[-1], events.Error)
    assert told[-1].code == "internal"
    assert turn_id in world.engine.aborted
    world.turn(session_id, "And now?", "Well")
    assert world.transcript(session_id)[-1] == ("assistant", "Well")
    assert world.sink.last.op == "end"


def test_error_at_submission_leaves_the_session_idle(world: SessionHarness) -> None:
    """A turn that cannot be submitted leaves the session unchanged."""
    session_id = world.create()
    world.engine.refusal = RuntimeError("a defect")
    with pytest.raises(RuntimeError):
        world.infer(session_id)
    world.engine.refusal = None
    assert world.get(session_id).state == "idle"
    world.turn(session_id, "Hi", "Hello")


def test_resume_after_an_internal_error_sends_the_state(world: SessionHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The unpublished number leaves a gap, so earlier positions cannot be replayed."""
    session_id = world.create()
    epoch = world.get(session_id).epoch
    broken_once(monkeypatch, ReplayBuffer, "add")
    world.infer(session_id)
    world.turn(session_id, "Hi", "Hello")
    sink = FakeSink()
    world.resume(session_id, sink, epoch=epoch, last_seq=0)
    (told,) = sink.events
    assert isinstance(told, events.SessionResumed)
    assert (told.resumed, told.reason) == (False, "too_old")
    assert [message.content for message in told.transcript or ()] == ["Hi", "Hello"]


def test_failing_observer_does_not_affect_the_end(world: SessionHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The observer is called after the end was published."""
    monkeypatch.setattr(world, "turn_ended", _fail)
    session_id = world.create()
    world.turn(session_id, "Hi", "Hello")
    assert [event.op for event in world.sink.events].count("end") == 1
    assert world.get(session_id).state == "idle"


def _fail(*_args: Any) -> None:
    raise RuntimeError("a defect")


def test_unbuildable_session_does_not_prevent_the_start(world: SessionHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is logged and left in the file; the others are restored."""
    journal = FakeJournal()
    world.journal = journal
    world.reopen()
    names = [world.create() for _ in range(2)]
    for name in names:
        world.turn(name, "Hi", "Hello")
    kept = [_kept(world, journal, name) for name in names]
    world.reopen()
    restored: Callable[..., LiveSession] = LiveSession.restored

    def defective(each: Any, *args: Any, **kwargs: Any) -> LiveSession:
        if each.config.session_id == names[0]:
            raise RuntimeError("a defect")
        return restored(each, *args, **kwargs)

    monkeypatch.setattr(LiveSession, "restored", defective)
    with capture_logs() as logs:
        world.sessions.restore(kept, clean=True)
    assert [line["session"] for line in logs if line["event"] == "session_set_aside"] == [names[0]]
    assert world.transcript(names[1])[-1] == ("assistant", "Hello")
    assert world.sessions.totals().total_sessions == 1


def _kept(world: SessionHarness, journal: FakeJournal, session_id: str) -> Any:
    session = world.sessions._table.get(session_id)
    assert session is not None
    ended = next(record for record in journal.of(TurnEnded) if record.session_id == session_id)
    return StoredSession(
        config=session.config,
        seq=ended.seq,
        last_used_at=ended.last_used_at,
        history=ended.history,
        turns=(ended.turn,),
        ends={},
        pending_turn=None,
    )

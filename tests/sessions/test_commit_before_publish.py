"""Commit before publish: records precede events, and changes that cannot be stored are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.messages import PrefillProgress, QueuePosition, SampledLogprobs, TokenDelta, TokenLogprob
from inferencecenter.protocol import requests
from inferencecenter.protocol.base import SessionEvent
from inferencecenter.protocol.events import Error
from inferencecenter.protocol.values import Preset
from inferencecenter.sessions.journal import (
    MAX_PENDING,
    MAX_RESUMING,
    HistoryChanged,
    NullJournal,
    SessionDeleted,
    SessionOpened,
    StorageFault,
    TokensAppended,
    TurnEnded,
    TurnFailed,
    TurnQueued,
)
from tests.sessions.conftest import FakeJournal, FakeSink, SessionHarness, packed

if TYPE_CHECKING:
    from collections.abc import Callable

FAULT = StorageFault("the disk is full")


def journal(world: SessionHarness) -> FakeJournal:
    """The journal of ``world``."""
    assert world.journal is not None
    return world.journal


def kinds(world: SessionHarness) -> list[str]:
    """The types of the records."""
    return [type(record).__name__ for record in journal(world).records]


def test_turn_is_recorded_step_by_step(world: SessionHarness) -> None:
    """Its spec, each token and its end are recorded; only what must survive a power loss is flushed."""
    session_id = world.create(system="Be kind.", metadata={"a": "b"})
    world.infer(session_id, turn_key="k")
    world.engine.start()
    world.engine.generate("Hel")
    world.engine.say(TokenDelta(world.engine.last.turn_id, packed("l"), ""))
    world.engine.generate("o")
    world.engine.finish(kept="Hello")
    assert kinds(world) == [
        "SessionOpened",
        "TurnQueued",
        "UsageRecorded",
        "TokensAppended",
        "TokensAppended",
        "TokensAppended",
        "TokensAppended",
        "TurnEnded",
    ]
    assert journal(world).flushed == [True, True, False, False, False, False, False, True]
    opened, ordered, _read, *said, ended = journal(world).records
    assert isinstance(opened, SessionOpened)
    assert (opened.config.session_id, opened.config.metadata) == (session_id, {"a": "b"})
    assert [message.content for message in opened.history.messages] == ["Be kind."]
    assert isinstance(ordered, TurnQueued)
    assert (ordered.spec.turn_id, ordered.spec.request.turn_key) == (world.engine.last.turn_id, "k")
    assert b"".join(record.tokens for record in said if isinstance(record, TokensAppended)) == packed("Hello\0")
    assert "".join(record.text for record in said if isinstance(record, TokensAppended)) == "Helo"
    assert isinstance(ended, TurnEnded)
    assert (ended.turn_key, ended.end, ended.turn.messages) == ("k", world.sink.last, 3)
    assert [message.content for message in ended.history.messages] == ["Be kind.", "Hi", "Helo"]


def test_each_number_is_recorded_with_its_event(world: SessionHarness) -> None:
    """This includes events without any other record."""
    world.engine.position = 2
    session_id = world.create()
    world.infer(session_id, turn_key="k")
    world.engine.say(QueuePosition(world.engine.last.turn_id, 1))
    world.infer(session_id, turn_key="k")
    world.engine.start()
    world.engine.say(PrefillProgress(world.engine.last.turn_id, 1, 2))
    world.engine.generate("a")
    world.engine.fail()
    world.append(session_id, ("user", "x"))
    world.rewind(session_id, "start")
    written = [
        record.seq
        for record in journal(world).records
        if isinstance(record, TurnQueued | TokensAppended | TurnEnded | TurnFailed | HistoryChanged)
    ]
    told = [event.seq for event in world.sink.events if isinstance(event, SessionEvent | Error)]
    assert written == told == [1, 2, 3, 4, 5, 6, 7, 8]
    assert kinds(world)[-3:] == ["TurnFailed", "HistoryChanged", "HistoryChanged"]


def test_shift_records_a_new_spec(world: SessionHarness) -> None:
    """It contains the new view and the time of rendering."""
    session_id = world.create(system="Be kind.")
    for number in range(4):
        world.turn(session_id, f"question {number} " + "x" * 200, "answer")
    world.infer(session_id, "question 4")
    world.now += 60
    world.engine.overflow(1100)
    first, second = journal(world).of(TurnQueued)[-2:]
    assert first.spec.turn_id == second.spec.turn_id
    assert first.spec.view is None
    assert second.spec.view is not None
    assert second.spec.view.n_dropped > 0
    assert second.spec.rendered_at > first.spec.rendered_at
    assert second.seq == first.seq + 1 == world.sink.last.seq


def test_logprobs_without_text_are_recorded(world: SessionHarness) -> None:
    """Their number is recorded without text."""
    session_id = world.create()
    world.infer(session_id, n_probs=1)
    world.engine.start()
    entry = SampledLogprobs(TokenLogprob("H", 72, -0.5), ())
    world.engine.say(TokenDelta(world.engine.last.turn_id, packed("H"), "", (entry,)))
    (said,) = journal(world).of(TokensAppended)
    assert (said.seq, said.text, world.sink.last.seq) == (2, "", 2)


def test_ended_sessions_are_recorded(world: SessionHarness) -> None:
    """A session that is closed, expires or is evicted is recorded as deleted."""
    world.reopen(when_full="evict")
    session_id = world.create()
    world.infer(session_id)
    world.close(session_id)
    assert kinds(world)[-2:] == ["TurnEnded", "SessionDeleted"]
    world.create(ttl_s=1)
    world.now += 1
    world.fire()
    assert kinds(world)[-2:] == ["SessionOpened", "SessionDeleted"]
    for _ in range(4):
        world.create()
    world.sessions.detach(world.sink)
    world.create()
    assert kinds(world)[-2:] == ["SessionDeleted", "SessionOpened"]


def test_fork_records_its_history_and_turns(world: SessionHarness) -> None:
    """The record has the parent, the history and the turns of the fork."""
    session_id = world.create()
    world.turn(session_id, "a", "one")
    world.turn(session_id, "b", "two")
    child = world.fork(session_id)
    opened = journal(world).of(SessionOpened)[-1]
    assert (opened.config.session_id, opened.parent) == (child, session_id)
    assert [turn.turn_id for turn in opened.turns] == [turn.turn_id for turn in world.get(child).turns]
    assert len(opened.history.messages) == 4


def test_nothing_is_published_before_the_commit(world: SessionHarness) -> None:
    """Events and replies wait for the store, in order."""
    session_id = world.create()
    journal(world).holding = True
    world.infer(session_id)
    world.engine.answer("Hello")
    world.append(session_id, ("user", "x"))
    world.resume(session_id)
    assert world.sink.events == []
    journal(world).let_go(2)
    assert world.sink.ops == []  # events before the resume are part of its replay
    journal(world).let_go()
    assert world.sink.ops == ["session_resumed"]


def test_replies_wait_for_their_session(world: SessionHarness) -> None:
    """Replies about sessions that are not stored or do not exist wait for nothing."""
    stored, not_stored = world.create(), world.create(store=False)
    waits: list[tuple[Any, bool]] = [
        (requests.CreateSession(op="create_session"), True),
        (requests.CreateSession(op="create_session", store=False), False),
        (requests.ListSessions(op="list_sessions"), True),
        (requests.GetSession(op="get_session", session_id=stored), True),
        (requests.GetSession(op="get_session", session_id=not_stored), False),
        (requests.GetSession(op="get_session", session_id="s_none"), False),
        (requests.ForkSession(op="fork_session", session_id=stored), True),
        (requests.SetMetadata(op="set_metadata", session_id=stored, metadata={}), True),
        (requests.SetModel(op="set_model", session_id=stored), True),
        (requests.CloseSession(op="close_session", session_id=stored), True),
        (requests.ListPresets(op="list_presets"), True),
        (requests.SavePreset(op="save_preset", preset=Preset(preset_type="settings", name="a")), True),
        (requests.DeletePreset(op="delete_preset", preset_type="prompt", name="a"), True),
        (requests.Ping(op="ping"), False),
        (requests.Status(op="status"), False),
    ]
    for request, waiting in waits:
        assert (world.sessions.journal_for(request, world.client.client_id) is world.journal) is waiting, request.op


def test_session_with_store_false_writes_no_records(world: SessionHarness) -> None:
    """It never waits for the store."""
    journal(world).holding = True
    journal(world).fault = FAULT
    session_id = world.create(store=False)
    world.infer(session_id)
    world.engine.answer("Hello")
    world.append(session_id, ("user", "x"))
    child = world.fork(session_id)
    world.rewind(child, "start")
    world.close(session_id)
    assert world.sink.ops == ["queued", "token", "end", "appended", "session_rewound"]
    assert journal(world).records == []
    assert not world.engine.last.durable


def test_daemon_without_a_store_stores_no_session(world: SessionHarness) -> None:
    """Requests cannot change this, and the engine must not write KV, either."""
    world.journal = None
    world.reopen()
    assert not world.sessions.durable
    assert world.sessions.fault is None
    world.infer(world.create(store=True))
    assert not world.engine.last.durable


def test_changes_are_refused_while_the_store_is_faulty(world: SessionHarness) -> None:
    """Running turns continue; reading and closing work."""
    running, idle = world.create(), world.create()
    world.turn(idle, "Hi", "Hello", turn_key="k")
    world.infer(running)
    journal(world).fault = FAULT
    refusals: list[Callable[[], object]] = [
        world.create,
        lambda: world.infer(idle),
        lambda: world.append(idle, ("user", "x")),
        lambda: world.fork(idle),
        lambda: world.rewind(idle, "start"),
    ]
    n_records = len(journal(world).records)
    for refused in refusals:
        with pytest.raises(InferenceCenterError) as caught:
            refused()
        assert (caught.value.code, caught.value.message) == (ErrorCode.STORAGE_UNAVAILABLE, FAULT.message)
        assert caught.value.hint
        assert caught.value.spec.retryable
    assert len(journal(world).records) == n_records
    assert world.sessions.fault == FAULT
    world.infer(idle, turn_key="k")
    assert world.sink.last.op == "end"
    world.engine.answer("Hello")
    world.close(idle)
    journal(world).fault = None
    world.infer(running)


def test_failed_turn_is_dropped(world: SessionHarness) -> None:
    """Only the number of its last event stays."""
    session_id = world.create()
    world.infer(session_id)
    world.engine.fail()
    (dropped,) = journal(world).of(TurnFailed)
    assert (dropped.session_id, dropped.turn_id, dropped.seq) == (session_id, world.engine.last.turn_id, 2)


def test_all_turns_are_recorded_though_only_the_latest_are_listed(
    world: SessionHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change of a long session keeps its older turns."""
    monkeypatch.setattr("inferencecenter.sessions.history.MAX_TURNS", 3)
    session_id = world.create()
    for _ in range(5):
        world.turn(session_id, "a", "b")
    world.append(session_id, ("user", "x"))
    assert len(journal(world).of(HistoryChanged)[-1].turns) == 5
    assert len(world.get(session_id).turns) == 3


@given(lengths=st.lists(st.integers(0, 3), max_size=12))
def test_events_arrive_in_the_order_of_their_numbers(lengths: list[int]) -> None:
    """Slow and partial commits do not change the order."""
    world = SessionHarness()
    session_id = world.create()
    journal(world).holding = True
    world.infer(session_id)
    world.engine.start()
    for length in lengths:
        world.engine.generate("x" * length)
        journal(world).let_go(length)
    world.engine.finish(kept="x" * sum(lengths))
    journal(world).let_go()
    numbers = [event.seq for event in world.sink.events if isinstance(event, SessionEvent)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert world.sink.text == "x" * sum(lengths)


def test_null_journal_runs_callbacks_at_once() -> None:
    """Calls run at once."""
    told: list[int] = []
    unwritten = NullJournal()
    unwritten.write(SessionDeleted(session_id="s"), flush=True)
    unwritten.release(lambda: told.append(1))
    assert (told, unwritten.fault) == ([1], None)


def test_skipped_record_adds_a_warning(world: SessionHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn ends with it, because a restart would show the loss."""
    names = [world.create() for _ in range(2)]
    monkeypatch.setattr(journal(world), "is_incomplete", lambda session_id: session_id == names[0])
    warnings = []
    for name in names:
        world.turn(name, "Hi", "Hello")
        warnings.append(world.sink.last.warnings)
    assert "could not be stored" in warnings[0][-1]
    assert warnings[1] == ()


@pytest.mark.parametrize("fault", [None, StorageFault("the disk is full")])
def test_pending_resumes_are_bounded(world: SessionHarness, fault: StorageFault | None) -> None:
    """The bound is for a client over all sockets; sessions that are not stored are unaffected."""
    session_id, unstored = world.create(), world.create(store=False)
    journal(world).holding = True
    for _ in range(MAX_RESUMING):
        world.resume(session_id, FakeSink())
    journal(world).n_pending, journal(world).fault = MAX_RESUMING, fault
    with pytest.raises(InferenceCenterError) as caught:
        world.resume(session_id)
    assert caught.value.code is (ErrorCode.STORAGE_UNAVAILABLE if fault else ErrorCode.OVERLOADED)
    for _ in range(MAX_RESUMING + 1):
        world.resume(unstored)
    journal(world).holding = False
    journal(world).let_go()
    world.sink.events.clear()
    world.resume(session_id)
    assert world.sink.ops == ["session_resumed"]


def test_client_with_too_many_pending_writes_is_refused(world: SessionHarness) -> None:
    """Sessions that are not stored are not affected."""
    session_id, unstored = world.create(), world.create(store=False)
    journal(world).n_pending = MAX_PENDING + 1
    for refused in (lambda: world.append(session_id, ("user", "x")), lambda: world.infer(session_id), world.create):
        with pytest.raises(InferenceCenterError) as caught:
            refused()
        assert caught.value.code is ErrorCode.OVERLOADED
    world.turn(unstored, "Hi", "Hello")
    world.close(session_id)

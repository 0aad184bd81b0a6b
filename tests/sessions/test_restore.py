"""Restoring the sessions of an earlier daemon."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.messages import TokenDelta
from inferencecenter.ipc.port import EngineState, EngineStatus
from inferencecenter.protocol import events, requests
from inferencecenter.protocol.params import decode
from inferencecenter.sessions.context import AccountLimits, Principal
from inferencecenter.sessions.journal import EpochChanged, SessionDeleted, TurnEnded
from tests.sessions.conftest import (
    DETACHED_TURN_S,
    FakeEngine,
    FakeJournal,
    FakeSink,
    SessionHarness,
    make_model,
    packed,
)
from tests.sessions.oracle import kept

if TYPE_CHECKING:
    from collections.abc import Callable

DAY_S = 86_400.0


def restart(world: SessionHarness, *, clean: bool = True, loaded: bool = True, **changes: Any) -> None:
    """Restart the daemon with its records; the engine has no model before ``loaded``."""
    assert world.journal is not None
    records = world.journal.records
    world.journal = FakeJournal(records=records)
    world.engine = FakeEngine(status=EngineStatus(state=EngineState.STARTING))
    world.sink = FakeSink()
    world.timers.clear()
    for name, value in changes.items():
        setattr(world, name, value)
    world.reopen().restore(kept(tuple(records)), clean=clean)
    if loaded:
        world.engine.ready(make_model())


def interrupted(world: SessionHarness, *said: str, **fields: Any) -> str:
    """A session with an ended turn and a turn with a partial answer."""
    session_id = world.create(system="Be kind.", **fields)
    world.turn(session_id, "Hi", "Hello")
    world.infer(session_id, "Go on", turn_key="k")
    world.engine.start()
    for text in said:
        world.engine.generate(text)
    return session_id


def refused(code: ErrorCode, call: Callable[..., object], *args: Any, **kwargs: Any) -> InferenceCenterError:
    """The error of a call that must fail with ``code``."""
    with pytest.raises(InferenceCenterError) as caught:
        call(*args, **kwargs)
    assert caught.value.code is code
    return caught.value


def test_hidden_messages_stay_out_of_the_context(world: SessionHarness) -> None:
    """The transcript keeps them, the model gets the system prompt and what follows; also after a restart."""
    session_id = world.create(system="Be kind.")
    world.turn(session_id, "Hi", "Hello")
    world.infer(session_id, "Go on")
    refused(ErrorCode.SESSION_BUSY, world.sessions.hide_messages, world.client, session_id, 3)
    world.engine.answer("Well")
    world.sessions.hide_messages(world.client, session_id, 3)
    restart(world)
    world.infer(session_id, "And?")
    prompt = world.engine.last_text
    assert [text in prompt for text in ("Be kind.", "Hello", "Go on", "Well", "And?")] == [
        True,
        False,
        True,
        True,
        True,
    ]
    assert [message.content for message in world.get(session_id).transcript] == [
        "Be kind.",
        "Hi",
        "Hello",
        "Go on",
        "Well",
    ]


def test_pending_turn_resumes(world: SessionHarness) -> None:
    """It is submitted with the same prompt, its tokens and the emitted characters once an engine is ready."""
    session_id = interrupted(world, "ab")
    world.engine.say(TokenDelta(world.engine.last.turn_id, packed("cd"), "c"))
    first, history = world.engine.last, world.get(session_id).transcript
    restart(world, loaded=False)
    assert world.engine.submitted == []
    assert (world.get(session_id).state, world.get(session_id).transcript) == ("busy", history)
    world.engine.ready(make_model())
    again = world.engine.last
    assert (again.turn_id, again.tokens, again.pieces) == (first.turn_id, first.tokens, first.pieces)
    assert (again.answer, again.shown_chars, again.params_json) == (packed("abcd"), 3, first.params_json)
    assert (again.priority, again.durable, again.may_shift) == (first.priority, first.durable, first.may_shift)
    world.resume(session_id)
    assert world.sink.last.content == "abc"
    world.engine.start()
    world.engine.generate("de")
    world.engine.finish(kept="abcde")
    assert world.sink.last.finish_reason == "stop"
    assert world.transcript(session_id)[-1] == ("assistant", "abcde")
    assert [turn.messages for turn in world.get(session_id).turns] == [3, 5]


def test_failures_survive_a_restart(world: SessionHarness) -> None:
    """The failure of a turn with a note is known until the session is rewound."""
    session_id = world.create()
    turn_id = world.turn(session_id, "Hi", "Hello")
    request = requests.Infer(op="infer", session_id=session_id, prompt="Go on")
    world.sessions.infer(world.client, request, world.sink, note="mine")
    failed_id = world.engine.last.turn_id
    world.engine.fail("engine_crashed")
    before = world.sessions.get_turn(world.client, session_id, failed_id)
    restart(world)
    after = world.sessions.get_turn(world.client, session_id, failed_id)
    assert (after, after.note) == (before, "mine")
    assert after.failure is not None
    assert (after.failure.code, after.failure.turn_id) == ("engine_crashed", failed_id)
    world.rewind(session_id, turn_id)
    for _ in range(2):
        refused(ErrorCode.TURN_NOT_FOUND, world.sessions.get_turn, world.client, session_id, failed_id)
        restart(world)


def test_numbers_continue_after_a_clean_stop(world: SessionHarness) -> None:
    """A client at the last number misses nothing; an older position receives the state."""
    session_id = interrupted(world, "ab")
    seq, epoch = world.sink.last.seq, world.get(session_id).epoch
    restart(world)
    world.resume(session_id, epoch=epoch, last_seq=seq)
    assert (world.sink.last.op, world.sink.last.resumed, world.sink.last.seq) == ("session_resumed", True, seq)
    world.engine.start()
    world.engine.generate("c")
    assert (world.sink.last.seq, world.sink.last.content) == (seq + 1, "c")
    behind = FakeSink()
    restart(world)
    world.resume(session_id, behind, epoch=epoch, last_seq=seq)
    assert (behind.last.resumed, behind.last.reason, behind.last.content) == (False, "too_old", "abc")


def test_unclean_stop_changes_the_epoch(world: SessionHarness) -> None:
    """No old position is valid; the new epoch is recorded."""
    session_id = interrupted(world, "ab")
    idle = world.create()
    seq, epoch = world.sink.last.seq, world.get(session_id).epoch
    restart(world, clean=False)
    assert world.get(session_id).epoch != epoch
    assert world.journal is not None
    renamed = {record.session_id: record.epoch for record in world.journal.of(EpochChanged)}
    assert renamed == {name: world.get(name).epoch for name in (session_id, idle)}
    world.resume(session_id, epoch=epoch, last_seq=seq)
    assert world.sink.last.reason == "other_epoch"
    epoch = world.sink.last.epoch
    restart(world)
    assert world.get(session_id).epoch == epoch


def test_repeated_request_attaches_to_its_turn(world: SessionHarness) -> None:
    """The turn is resumed or has ended."""
    session_id = interrupted(world, "ab")
    restart(world)
    world.infer(session_id, "Go on", turn_key="k", id="i")
    assert (world.sink.last.op, world.sink.last.id) == ("queued", "i")
    world.engine.start()
    world.engine.finish(kept="ab")
    end = world.sink.last
    restart(world)
    world.infer(session_id, "Go on", turn_key="k", id="again")
    assert world.sink.events == [end.model_copy(update={"id": "again"})]
    assert world.engine.submitted == []


def test_shifted_turn_resumes_with_its_shorter_prompt(world: SessionHarness) -> None:
    """Dropped turns stay dropped."""
    world.engine.status = EngineStatus(state=EngineState.READY, model=make_model(n_ctx=400))
    session_id = world.create(system="Be kind.")
    for number in (1, 2, 3):
        world.turn(session_id, f"question {number}", f"answer {number}")
    world.infer(session_id, "question 4")
    world.engine.start()
    world.engine.generate("ab")
    world.now += 100
    world.engine.overflow(400, said="ab")
    shorter = world.engine.last
    restart(world, loaded=False)
    world.engine.ready(make_model(n_ctx=400))
    assert world.engine.last == shorter
    world.engine.answer("cd")
    assert world.get(session_id).dropped_messages > 0


def test_resumed_prompt_keeps_its_rendering_time(world: SessionHarness) -> None:
    """A template with the time renders the same prompt."""
    template = "{{ strftime_now('%H:%M:%S') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    model = make_model(chat_template=template)
    world.engine.status = EngineStatus(state=EngineState.READY, model=model)
    world.infer(world.create())
    text = world.engine.last_text
    world.now += 3600
    restart(world, loaded=False)
    world.engine.ready(model)
    assert world.engine.last_text == text


def test_time_continues_while_the_daemon_is_down(world: SessionHarness) -> None:
    """``max_time_ms`` counts by the wall clock from the request."""
    session_id = world.create()
    world.infer(session_id, params={"max_time_ms": 60_000})
    world.now += 20
    restart(world)
    assert decode(world.engine.last.params_json).max_time_ms == 40_000
    world.now -= 500
    restart(world)
    assert decode(world.engine.last.params_json).max_time_ms == 60_000


def test_figures_of_a_resumed_turn_count_all_its_tokens(world: SessionHarness) -> None:
    """Times count from the request; the speed is that of this daemon."""
    session_id = interrupted(world, "abcd")
    world.now += 10
    restart(world)
    world.resume(session_id)
    world.engine.start()
    world.now += 1
    world.engine.generate("e")
    world.now += 1
    world.engine.generate("f")
    world.engine.finish(kept="abcdef")
    end = world.sink.last
    assert (end.usage.completion_tokens, end.stats.total_ms, end.stats.tps) == (7, 12_000.0, 2.0)
    assert end.usage.prompt_tokens == len(world.engine.last.tokens) // 4 + len(world.engine.last_text)


def test_turns_resume_in_the_order_of_submission(world: SessionHarness) -> None:
    """The order of their sessions does not matter."""
    names = [world.create() for _ in range(3)]
    for name in reversed(names):
        world.now += 1
        world.infer(name)
    restart(world)
    assert [turn.session_id for turn in world.engine.submitted] == names[::-1]
    listed = world.sessions.list(world.client, requests.ListSessions(op="list_sessions"))
    assert [session.session_id for session in listed.sessions] == names


def test_restored_turn_refused_by_the_engine_keeps_its_text(world: SessionHarness) -> None:
    """A turn with a partial answer ends with it; a turn without one fails."""
    begun = interrupted(world, "ab")
    waiting = world.create()
    world.infer(waiting)
    assert world.journal is not None
    records = tuple(world.journal.records)
    world.engine.refusal = InferenceCenterError(ErrorCode.QUEUE_FULL, "too many")
    world.reopen().restore(kept(records), clean=True)
    assert world.transcript(begun)[-1] == ("assistant", "ab")
    assert world.transcript(waiting) == []
    ended = world.journal.of(TurnEnded)[-1]
    assert ended.end.finish_reason == "aborted"
    assert "too many" in ended.end.warnings[-1]
    assert world.sessions.totals().active_generations == 0


def test_another_model_keeps_the_partial_answer(world: SessionHarness) -> None:
    """The turn ends as aborted, and the session is usable."""
    session_id = interrupted(world, "ab")
    restart(world, loaded=False)
    world.engine.ready(make_model(n_vocab=9))
    assert world.transcript(session_id)[-1] == ("assistant", "ab")
    world.infer(session_id, "Next")
    assert world.engine.last.tokens == b""


def test_session_is_readable_before_its_model_is_loaded(world: SessionHarness) -> None:
    """A turn or a fork waits for the model; an abort does not."""
    session_id = interrupted(world, "ab")
    idle = world.create()
    before = world.get(idle)
    restart(world, loaded=False)
    assert world.get(idle) == before
    world.append(idle, ("user", "x"))
    refused(ErrorCode.MODEL_LOADING, world.fork, idle)
    refused(ErrorCode.MODEL_LOADING, world.infer, idle)
    refused(ErrorCode.MODEL_LOADING, world.create)
    world.resume(session_id)
    world.abort(session_id)
    assert world.engine.aborted == [world.sink.last.turn_id]


def test_sessions_above_the_limit_are_restored(world: SessionHarness) -> None:
    """A lower limit deletes none, but no other can be opened."""
    names = [world.create() for _ in range(4)]
    world.settings = world.settings.model_copy(update={"max_sessions": 2})
    restart(world, client=replace(world.client, max_sessions=1))
    assert world.sessions.session_ids() == tuple(names)
    for name in names:
        world.resume(name)
    refused(ErrorCode.SESSION_LIMIT, world.create)


def test_sessions_of_a_socket_end_with_the_daemon(world: SessionHarness) -> None:
    """Their socket ended with the daemon."""
    closing, staying = world.create(on_disconnect="close"), world.create()
    restart(world, clean=False)
    assert world.sessions.session_ids() == (staying,)
    assert world.journal is not None
    assert [record.session_id for record in world.journal.of(SessionDeleted)] == [closing]


def test_idle_time_counts_across_a_restart(world: SessionHarness) -> None:
    """The wall clock measures the downtime; expired sessions end at once."""
    gone, left = world.create(ttl_s=100), world.create(ttl_s=300)
    world.now += 200
    restart(world)
    assert world.sessions.session_ids() == (left,)
    assert [timer.delay_s for timer in world.timers] == [100.0]
    assert world.journal is not None
    assert [record.session_id for record in world.journal.of(SessionDeleted)] == [gone]


def test_pending_turn_keeps_its_session(world: SessionHarness) -> None:
    """The downtime does not expire it."""
    session_id = world.create(ttl_s=10)
    world.infer(session_id)
    world.now += 1000
    restart(world)
    world.engine.answer("Hello")
    assert world.transcript(session_id)[-1] == ("assistant", "Hello")


def test_clock_change_expires_no_session(world: SessionHarness) -> None:
    """The clock may jump forward while the daemon runs, or back at its start."""
    wall = [1000.0]
    session_id = world.create(ttl_s=100)
    world.sessions.close(world.client, requests.CloseSession(op="close_session", session_id=session_id))
    world.wall = lambda: wall[0]
    world.reopen()
    session_id = world.create(ttl_s=100)
    wall[0] += 10 * DAY_S
    world.now += 50
    world.fire()
    assert world.get(session_id).state == "idle"
    wall[0] = 0.0
    restart(world)
    assert world.get(session_id).state == "idle"
    assert world.timers[-1].delay_s == 100.0


def test_sessions_are_deleted_after_their_retention(world: SessionHarness) -> None:
    """The daemon's retention, the client's own, or a shorter ``ttl_s`` decides when."""
    eve = Principal("eve", 4, "normal", frozenset({"user"}), retention_days=1)
    world.reopen(retention_days=3)
    names = {"daemon": world.create(), "ttl": world.create(ttl_s=DAY_S / 2), "client": world.create(eve)}
    restart(world)
    world.sessions.restore([], clean=True, limits={"eve": AccountLimits(4, 1, None)})
    left = []
    for _ in range(7):
        left.append([kind for kind, name in names.items() if name in world.sessions.session_ids()])
        world.now += DAY_S / 2
        for timer in [timer for timer in world.timers if not timer.cancelled]:
            world.timers.remove(timer)
            timer.callback()
    both = ["daemon", "client"]
    assert left == [["daemon", "ttl", "client"], both, *([["daemon"]] * 4), []]


def test_restored_turn_keeps_its_events_for_a_while(world: SessionHarness) -> None:
    """The time counts from the start of the daemon."""
    interrupted(world, "ab")
    restart(world)
    assert [timer.delay_s for timer in world.timers] == [DETACHED_TURN_S]


@settings(deadline=None)
@given(
    steps=st.lists(
        st.sampled_from(["ask", "start", "say", "finish", "fail", "abort", "append", "rewind", "overflow", "lose"]),
        max_size=25,
    )
)
def test_restored_session_equals_the_original(steps: list[str]) -> None:
    """Transcript, turns, usage, numbers and partial answer are equal after a clean stop."""
    world = SessionHarness()
    session_id = world.create(system="Be kind.")

    said: list[str] = []

    def ask() -> None:
        world.infer(session_id)
        said.clear()

    def say() -> None:
        world.engine.generate("x")
        said.append("x")

    def lose() -> None:
        world.engine.lose()
        world.engine.ready()

    actions: dict[str, Callable[[], object]] = {
        "ask": ask,
        "start": world.engine.start,
        "say": say,
        "finish": lambda: world.engine.finish(kept="".join(said)),
        "fail": world.engine.fail,
        "abort": lambda: world.abort(session_id),
        "append": lambda: world.append(session_id, ("user", "y")),
        "rewind": lambda: world.rewind(session_id, "start"),
        "overflow": lambda: world.engine.overflow(1020, said="".join(said) or None),
        "lose": lose,
    }
    for step in steps:
        if step in ("start", "say", "finish", "fail", "overflow") and world.get(session_id).state == "idle":
            continue
        try:
            actions[step]()
        except InferenceCenterError as error:
            assert error.code in (ErrorCode.SESSION_BUSY, ErrorCode.NOTHING_TO_ABORT)  # noqa: PT017
    before, shown = world.get(session_id), answer(world, session_id)
    restart(world)
    assert world.get(session_id) == before
    assert answer(world, session_id) == shown


def answer(world: SessionHarness, session_id: str) -> tuple[str | None, str | None]:
    """The running turn and its partial answer."""
    sink = FakeSink()
    world.resume(session_id, sink)
    (resumed,) = sink.events
    assert isinstance(resumed, events.SessionResumed)
    return resumed.turn_id, resumed.content

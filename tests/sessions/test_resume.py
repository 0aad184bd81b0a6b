"""Resuming a session: replay, change of the subscriber, and limits of the buffer."""

from __future__ import annotations

from typing import Any

import pytest

from inferencecenter.ipc.messages import PrefillProgress
from inferencecenter.protocol import events, requests
from inferencecenter.protocol.base import SessionEvent
from inferencecenter.protocol.values import ChatMessage
from inferencecenter.sessions.context import Principal
from inferencecenter.sessions.table import MAX_BATCH
from tests.sessions.conftest import DETACHED_TURN_S, FakeSink, SessionHarness


def epoch(world: SessionHarness, session_id: str) -> str:
    """The session's epoch."""
    return world.get(session_id).epoch


def seqs(sink: FakeSink) -> list[int]:
    """The numbers of the session's events at a socket."""
    return [event.seq for event in sink.events if isinstance(event, SessionEvent)]


def begin(world: SessionHarness, *said: str, **fields: Any) -> str:
    """A session whose turn has a partial answer."""
    session_id = world.create(**fields)
    world.infer(session_id, "Hi", turn_key="k")
    world.engine.start()
    for text in said:
        world.engine.generate(text)
    return session_id


def test_resume_replays_missed_events_before_new_ones(world: SessionHarness) -> None:
    """Missed tokens arrive joined; nothing arrives twice."""
    session_id = begin(world, "a", "b", "c")
    world.sessions.detach(world.sink)
    world.engine.generate("d")
    other = FakeSink()
    world.resume(session_id, other, epoch=epoch(world, session_id), last_seq=2, id="r")
    world.engine.generate("e")
    resumed = other.events[0]
    assert isinstance(resumed, events.SessionResumed)
    assert (resumed.id, resumed.resumed, resumed.reason, resumed.state) == ("r", True, None, "busy")
    assert (resumed.seq, resumed.turn_id) == (5, world.engine.last.turn_id)
    assert (resumed.transcript, resumed.turns, resumed.content) == (None, None, None)
    assert [(event.seq, event.content) for event in other.events if isinstance(event, events.Token)] == [
        (5, "bcd"),
        (6, "e"),
    ]
    assert world.sink.text == "abc"


def test_resume_at_the_last_number_replays_nothing(world: SessionHarness) -> None:
    """This holds for an idle session, and on the same socket."""
    session_id = begin(world, "a")
    world.engine.finish(kept="a")
    last_seq = seqs(world.sink)[-1]
    world.resume(session_id, epoch=epoch(world, session_id), last_seq=last_seq)
    assert (world.sink.last.op, world.sink.last.resumed, world.sink.last.turn_id) == ("session_resumed", True, None)
    assert "session_detached" not in world.sink.ops


@pytest.mark.parametrize(
    ("position", "reason"),
    [
        ({}, "no_position"),
        ({"last_seq": 1}, "no_position"),
        ({"epoch": "e_other", "last_seq": 1}, "other_epoch"),
        ({"epoch": "", "last_seq": 99}, "unknown_position"),
    ],
)
def test_resume_without_a_position_sends_the_whole_state(
    world: SessionHarness, position: dict[str, Any], reason: str
) -> None:
    """The state is the transcript with the current question, the ended turns and the partial answer."""
    session_id = world.create(system="Be kind.")
    world.turn(session_id, "One?", "1")
    world.infer(session_id, "Two?")
    world.engine.start()
    world.engine.generate("2")
    if position.get("epoch") == "":
        position = {**position, "epoch": epoch(world, session_id)}
    other = FakeSink()
    world.resume(session_id, other, **position)
    (resumed,) = other.events
    assert isinstance(resumed, events.SessionResumed)
    assert (resumed.resumed, resumed.reason) == (False, reason)
    assert resumed.transcript is not None
    said = [message.content for message in resumed.transcript]
    assert said == ["Be kind.", "One?", "1", "Two?"]
    assert resumed.content == "2"
    assert resumed.turns is not None
    assert [said[turn.messages - 1] for turn in resumed.turns] == ["1"]
    world.engine.generate("!")
    assert (other.last.content, other.last.seq) == ("!", resumed.seq + 1)


def test_events_beyond_the_limit_are_too_old(world: SessionHarness) -> None:
    """The buffer is bounded by bytes and drops the oldest."""
    world.reopen(replay_kib=1)
    session_id = begin(world, *("x" * 100 for _ in range(30)))
    world.resume(session_id, epoch=epoch(world, session_id), last_seq=2)
    assert world.sink.last.reason == "too_old"
    assert world.sink.last.content == "x" * 3000
    world.resume(session_id, epoch=epoch(world, session_id), last_seq=world.sink.last.seq - 2)
    assert world.sink.last.content == "x" * 200


def test_resuming_moves_the_session_to_the_new_socket(world: SessionHarness) -> None:
    """The old socket is notified after its last event and keeps its other sessions."""
    session_id = begin(world, "a")
    staying = world.create()
    other = FakeSink()
    world.resume(session_id, other, epoch=epoch(world, session_id), last_seq=2)
    assert world.sink.last == events.SessionDetached(session_id=session_id, reason="resumed_elsewhere")
    world.engine.finish(kept="a")
    assert other.last.op == "end"
    assert world.sink.last.op == "session_detached"
    world.sessions.detach(world.sink)
    world.infer(staying)
    assert world.sink.last.op == "queued"


def test_infer_moves_the_session_to_its_socket(world: SessionHarness) -> None:
    """The old socket is notified; a repeated key moves it too."""
    session_id = world.create()
    sockets = [FakeSink(), FakeSink()]
    for sink in sockets:
        request = requests.Infer(op="infer", session_id=session_id, prompt="Hi", turn_key="k")
        world.sessions.infer(world.client, request, sink)
    assert world.sink.ops == ["session_detached"]
    assert sockets[0].ops == ["queued", "session_detached"]
    world.engine.answer("Hello")
    assert sockets[1].ops == ["queued", "token", "end"]
    world.infer(session_id, turn_key="k")
    assert sockets[1].ops[-1] == "session_detached"
    assert world.sink.last.op == "end"


def test_replies_to_another_socket_are_replayed(world: SessionHarness) -> None:
    """The requester of an append or rewind gets the reply; the subscriber gets it by replay."""
    session_id = world.create()
    other = FakeSink()
    message = ChatMessage(role="user", content="x")
    append = requests.Append(op="append", id="a", session_id=session_id, messages=[message])
    world.sessions.append(world.client, append, other)
    rewind = requests.RewindSession(op="rewind_session", session_id=session_id, turn="start")
    world.sessions.rewind(world.client, rewind, other)
    assert [(event.op, event.id) for event in other.events] == [("appended", "a"), ("session_rewound", None)]
    assert world.sink.events == []
    world.resume(session_id, epoch=epoch(world, session_id), last_seq=0)
    assert world.sink.ops == ["session_resumed", "appended", "session_rewound"]
    assert seqs(world.sink) == [1, 2]


def test_held_back_events_are_delivered_once_after_a_resume(world: SessionHarness) -> None:
    """They go to the new socket in order and not to the old one."""
    session_id = begin(world, "a")
    assert world.journal is not None
    world.journal.holding = True
    world.engine.generate("b")
    other = FakeSink()
    world.resume(session_id, other, epoch=epoch(world, session_id), last_seq=2)
    world.engine.generate("c")
    world.resume(session_id, other, epoch=epoch(world, session_id), last_seq=2)
    assert other.events == []
    world.journal.let_go()
    assert other.ops == ["session_resumed", "token"]
    assert other.text == "bc"
    assert world.sink.text == "a"
    assert world.sink.ops[-1] == "session_detached"


def test_held_back_events_stay_with_the_old_socket_on_infer(world: SessionHarness) -> None:
    """The new socket has not asked for a replay; the old one gets the rest before it is detached."""
    session_id = begin(world, "a")
    assert world.journal is not None
    world.journal.holding = True
    world.engine.finish(kept="a")
    other = FakeSink()
    world.sessions.infer(world.client, requests.Infer(op="infer", session_id=session_id, prompt="Next"), other)
    world.journal.let_go()
    assert world.sink.ops == ["queued", "token", "end", "session_detached"]
    assert other.ops == ["queued"]


def test_detached_turn_keeps_its_events_for_a_while(world: SessionHarness) -> None:
    """After that only its text is kept and sent on resume."""
    session_id = begin(world, "a")
    world.sessions.detach(world.sink)
    assert world.timers[-1].delay_s == DETACHED_TURN_S
    world.engine.generate("b")
    world.fire()
    world.engine.generate("c")
    world.resume(session_id, epoch=epoch(world, session_id), last_seq=2)
    assert (world.sink.last.reason, world.sink.last.content) == ("too_old", "abc")
    world.engine.generate("d")
    world.resume(session_id, epoch=epoch(world, session_id), last_seq=world.sink.last.seq - 1)
    assert world.sink.last.content == "d"


def test_resume_before_the_timeout_replays_all_events(world: SessionHarness) -> None:
    """The timer is cancelled by the resume and by the end of the turn."""
    session_id = begin(world, "a")
    world.sessions.detach(world.sink)
    world.resume(session_id, epoch=epoch(world, session_id), last_seq=2)
    assert world.timers[-1].cancelled
    world.sessions.detach(world.sink)
    world.engine.finish(kept="a")
    assert world.timers[-1].cancelled
    world.resume(session_id, epoch=epoch(world, session_id), last_seq=1)
    assert world.sink.ops[-3:] == ["session_resumed", "token", "end"]


def test_detached_idle_session_keeps_its_events(world: SessionHarness) -> None:
    """Only a running turn adds events."""
    session_id = world.create()
    world.sessions.detach(world.sink)
    assert world.timers == []
    world.resume(session_id, epoch=epoch(world, session_id), last_seq=0)
    assert world.sink.last.resumed


def test_all_kinds_of_events_are_replayed(world: SessionHarness) -> None:
    """Positions, progress, text and end are unchanged."""
    world.engine.position = 2
    session_id = world.create()
    world.infer(session_id, id="i")
    world.engine.start()
    world.engine.say(PrefillProgress(world.engine.last.turn_id, 1, 2))
    world.engine.generate("a")
    world.engine.finish(kept="a")
    told = list(world.sink.events)
    world.resume(session_id, epoch=epoch(world, session_id), last_seq=0)
    assert world.sink.events[len(told) + 1 :] == told


def test_purge_of_many_sessions_is_split_into_batches() -> None:
    """Each iteration of the event loop closes a bounded number, until none is left."""
    world = SessionHarness(client=Principal("ada", 1000, "normal", frozenset({"user"})))
    world.reopen(max_sessions=1000)
    for _ in range(2 * MAX_BATCH + 1):
        world.create()
    closed = [world.sessions.purge("client", "ada") for _ in range(4)]
    assert closed == [MAX_BATCH, MAX_BATCH, 1, 0]
    assert world.sessions.session_ids() == ()


def test_purged_session_ends_for_all_sockets(world: SessionHarness) -> None:
    """Its turn ends, its subscriber is notified, and other clients are not affected."""
    session_id = begin(world, "a")
    kept = world.create()
    assert world.sessions.purge("session", session_id) == 1
    assert world.sink.ops[-2:] == ["end", "session_closed"]
    assert world.sessions.session_ids() == (kept,)
    assert world.sessions.purge("session", session_id) == 0
    assert world.sessions.purge("client", "eve") == 0
    assert world.sessions.purge("client", "ada") == 1
    assert world.sessions.session_ids() == ()

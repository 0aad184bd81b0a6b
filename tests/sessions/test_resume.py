"""Coming back to a session: what was missed, where events go, and what is forgotten when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from inferencecenter.ipc.messages import PrefillProgress
from inferencecenter.protocol import events, requests
from inferencecenter.protocol.base import SessionEvent
from inferencecenter.protocol.values import ChatMessage
from tests.sessions.conftest import DETACHED_TURN_S, FakeSink

if TYPE_CHECKING:
    from tests.sessions.conftest import World


def epoch(world: World, session_id: str) -> str:
    """The session's epoch."""
    return world.get(session_id).epoch


def seqs(sink: FakeSink) -> list[int]:
    """Numbers of the session's events that a socket got."""
    return [event.seq for event in sink.events if isinstance(event, SessionEvent)]


def begin(world: World, *said: str, **fields: Any) -> str:
    """A session whose turn has begun and said something."""
    session_id = world.create(**fields)
    world.infer(session_id, "Hi", turn_key="k")
    world.engine.start()
    for text in said:
        world.engine.generate(text)
    return session_id


def test_missing_events_follow_the_answer_and_live_ones_them(world: World) -> None:
    """Tokens that were missed come as one event; nothing comes twice."""
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


def test_who_has_missed_nothing_is_told_so(world: World) -> None:
    """Also while the session is idle, and on the very same socket."""
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
def test_without_a_position_all_is_told(world: World, position: dict[str, Any], reason: str) -> None:
    """Transcript with the question that is being answered, the turns that have ended, and the answer so far."""
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


def test_events_beyond_the_limit_are_too_old(world: World) -> None:
    """What is kept is bounded by bytes, the oldest goes first."""
    world.replay_kib = 1
    world.reopen()
    session_id = begin(world, *("x" * 100 for _ in range(30)))
    world.resume(session_id, epoch=epoch(world, session_id), last_seq=2)
    assert world.sink.last.reason == "too_old"
    assert world.sink.last.content == "x" * 3000
    world.resume(session_id, epoch=epoch(world, session_id), last_seq=world.sink.last.seq - 2)
    assert world.sink.last.content == "x" * 200


def test_a_session_moves_to_the_socket_that_resumes_it(world: World) -> None:
    """The first is told when it has had all of its own, and stays open for its other sessions."""
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


def test_a_session_moves_to_the_socket_that_infers(world: World) -> None:
    """The first is told; a repeated key moves it as well."""
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


def test_answers_to_another_socket_are_found_by_the_attached_one(world: World) -> None:
    """Whoever appends or rewinds is answered; the number is not missing when the other one comes back."""
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


def test_what_is_held_back_when_somebody_resumes_is_told_once(world: World) -> None:
    """It goes to the one that resumed, in order, and not to the one before."""
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


def test_what_is_held_back_when_somebody_infers_goes_where_it_was_told(world: World) -> None:
    """The new socket has not asked for it; the old one hears its rest before it is told to go."""
    session_id = begin(world, "a")
    assert world.journal is not None
    world.journal.holding = True
    world.engine.finish(kept="a")
    other = FakeSink()
    world.sessions.infer(world.client, requests.Infer(op="infer", session_id=session_id, prompt="Next"), other)
    world.journal.let_go()
    assert world.sink.ops == ["queued", "token", "end", "session_detached"]
    assert other.ops == ["queued"]


def test_a_turn_that_nobody_hears_keeps_its_events_for_a_while(world: World) -> None:
    """Then only its text is kept, and whoever comes back gets that."""
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


def test_who_comes_back_in_time_has_missed_nothing(world: World) -> None:
    """The timer ends with the resume, and with the turn."""
    session_id = begin(world, "a")
    world.sessions.detach(world.sink)
    world.resume(session_id, epoch=epoch(world, session_id), last_seq=2)
    assert world.timers[-1].cancelled
    world.sessions.detach(world.sink)
    world.engine.finish(kept="a")
    assert world.timers[-1].cancelled
    world.resume(session_id, epoch=epoch(world, session_id), last_seq=1)
    assert world.sink.ops[-3:] == ["session_resumed", "token", "end"]


def test_an_idle_session_forgets_nothing_when_its_socket_goes(world: World) -> None:
    """Only a turn that goes on can grow."""
    session_id = world.create()
    world.sessions.detach(world.sink)
    assert world.timers == []
    world.resume(session_id, epoch=epoch(world, session_id), last_seq=0)
    assert world.sink.last.resumed


def test_all_kinds_of_events_are_told_again(world: World) -> None:
    """Places, progress, text and the end, as they were."""
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


def test_a_purged_session_is_over_for_all(world: World) -> None:
    """Its turn ends, whoever listens is told, and nothing of another client is touched."""
    session_id = begin(world, "a")
    kept = world.create()
    assert world.sessions.purge("session", session_id) == 1
    assert world.sink.ops[-2:] == ["end", "session_closed"]
    assert world.sessions.session_ids() == (kept,)
    assert world.sessions.purge("session", session_id) == 0
    assert world.sessions.purge("client", "eve") == 0
    assert world.sessions.purge("client", "ada") == 1
    assert world.sessions.session_ids() == ()

"""Tests of a client whose socket is lost, against daemons that follow a script for each socket."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from inferencecenter.client import Client, Connected, Ended, Reconnecting, SessionTakenOverError, Timing
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.events import End, EngineChanged, Pong, Queued, Token
from inferencecenter.protocol.requests import START, Ping
from inferencecenter.protocol.values import ChatMessage
from tests.client.peer import HELLO, USAGE
from tests.loop_clock import LoopClock

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from inferencecenter.client import ClientSession, Notice
    from tests.client.peer import Peer, Start

_TIMEOUT_S = 60.0
KEEPALIVE_S = 25.0
SUMMARY = {
    "state": "idle",
    "mode": "chat",
    "model": "demo",
    "messages": 0,
    "tokens": 0,
    "created_at": 0.0,
    "last_used_at": 0.0,
    "metadata": {},
}


@dataclass
class FakeTime:
    """A clock that only sleeping moves, and draws that are always the largest."""

    now: float = 0.0
    slept: list[float] = field(default_factory=list)
    on_sleep: Callable[[float], Awaitable[None]] | None = None

    def timing(self) -> Timing:
        """What a client is given."""
        return Timing(monotonic=lambda: self.now, sleep=self.sleep, random=lambda: 1.0)

    async def sleep(self, seconds: float) -> None:
        """Let that time pass at once."""
        self.slept.append(seconds)
        self.now += seconds
        if self.on_sleep is not None:
            await self.on_sleep(self.now)
        await asyncio.sleep(0)


async def _collect(session: ClientSession, prompt: str = "hi", *, into: list[Any] | None = None) -> list[Any]:
    events = [] if into is None else into
    async with asyncio.timeout(_TIMEOUT_S):
        async for event in session.infer(prompt).events():
            events.append(event)
    return events


async def _outcome(session: ClientSession) -> list[Any] | InferenceCenterError:
    try:
        return await _collect(session)
    except InferenceCenterError as error:
        return error


def _text(events: list[Any]) -> str:
    return "".join(event.content for event in events if isinstance(event, Token))


def _lost(**fields: Any) -> dict[str, Any]:
    return {"resumed": False, "reason": "other_epoch", "epoch": "e2", "state": "idle", **fields}


async def test_an_answer_goes_on_where_it_was_cut(scripted: Start) -> None:
    """The client says how far it came, takes only what is new, and tells of the loss and the return."""
    asked: list[Any] = []

    async def before(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        await peer.begin()
        await peer.token("t1", "Hel")
        await peer.socket.close(1012)

    async def after(peer: Peer) -> None:
        await peer.welcome()
        asked.append(await peer.resumed(turn_id="t1"))
        await peer.say(op="token", session_id="s1", seq=2, turn_id="t1", content="Hel")
        await peer.token("t1", "lo")
        await peer.end("t1")
        await peer.say(op="pong", id=(await peer.hear())["id"])

    notices: list[Notice] = []
    url = await scripted(before, after)
    async with Client(url, token="ic_a_b", on_notice=notices.append, timing=FakeTime().timing()) as client:
        session = await client.create_session()
        events = await _collect(session)
        await client.request(Ping(op="ping"))
        assert client.connected
    assert [type(event) for event in events] == [Queued, Token, Token, End]
    assert _text(events) == "Hello"
    assert (asked[0]["epoch"], asked[0]["last_seq"]) == ("e", 2)
    lost, back, over = notices
    assert isinstance(lost, Reconnecting)
    assert (lost.attempt, lost.in_s) == (1, 0.2)
    assert "1012" in lost.error.message
    assert back == Connected()
    assert isinstance(over, Ended)


async def test_a_restarted_daemon_tells_what_was_said(scripted: Start) -> None:
    """With another epoch the rest of what was said follows, and the numbers begin anew."""

    async def before(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        await peer.begin()
        await peer.token("t1", "Hel")
        peer.socket.transport.abort()

    async def after(peer: Peer) -> None:
        await peer.welcome()
        await peer.resumed(**_lost(turn_id="t1", content="Hello", seq=1, state="busy", transcript=[], turns=[]))
        await peer.say(op="token", session_id="s1", seq=2, turn_id="t1", content=" you")
        await peer.say(
            op="error",
            code="engine_crashed",
            message="x",
            error="x",
            session_id="s1",
            seq=3,
            turn_id="t1",
            retryable=True,
        )

    url = await scripted(before, after)
    async with Client(url, token="ic_a_b", timing=FakeTime().timing()) as client:
        session = await client.create_session()
        heard: list[Any] = []
        with pytest.raises(InferenceCenterError) as caught:
            await _collect(session, into=heard)
    assert _text(heard) == "Hello you"
    assert caught.value.code is ErrorCode.ENGINE_CRASHED


async def test_a_turn_that_ended_in_the_gap(scripted: Start) -> None:
    """The rest comes from the transcript, the end from asking again with the same key, though its number is old."""
    keys: list[Any] = []

    async def before(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        keys.append((await peer.begin())["turn_key"])
        await peer.token("t1", "Hel")
        await peer.socket.close(1011)

    async def after(peer: Peer) -> None:
        await peer.welcome()
        said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello"}]
        turns = [{"turn_id": "t1", "finish_reason": "stop", "messages": 2, "usage": USAGE}]
        await peer.resumed(**_lost(seq=40, transcript=said, turns=turns))
        again = await peer.hear()
        keys.append(again["turn_key"])
        await peer.end("t1", id=again["id"])

    url = await scripted(before, after)
    async with Client(url, token="ic_a_b", timing=FakeTime().timing()) as client:
        events = await _collect(await client.create_session())
    assert _text(events) == "Hello"
    assert isinstance(events[-1], End)
    assert keys[0] == keys[1]


async def test_a_question_that_was_never_acknowledged_is_sent_again(scripted: Start) -> None:
    """With the same key and another id, and again while the daemon is still loading its model."""
    heard: list[Any] = []

    async def before(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        heard.append(await peer.hear())
        await peer.socket.close(1012)

    async def after(peer: Peer) -> None:
        await peer.welcome()
        await peer.resumed(state="idle")
        heard.append(await peer.hear())
        await peer.refuse(heard[-1], "model_loading", retryable=True, retry_after_ms=700)
        heard.append(await peer.begin())
        await peer.token("t1", "Hello")
        await peer.end("t1")

    time = FakeTime()
    async with Client(await scripted(before, after), token="ic_a_b", timing=time.timing()) as client:
        events = await _collect(await client.create_session())
    assert _text(events) == "Hello"
    assert len({frame["turn_key"] for frame in heard}) == 1
    assert len({frame["id"] for frame in heard}) == 3
    assert time.slept == [0.2, pytest.approx(0.9)]


async def test_a_lost_session_fails_its_waiting_readers(scripted: Start) -> None:
    """``session_not_found`` reaches the turn of that session; others go on."""

    async def before(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session("s1")
        await peer.open_session("s2")
        await peer.begin()
        await peer.begin()
        await peer.socket.close(1012)

    async def after(peer: Peer) -> None:
        await peer.welcome()
        first = await peer.hear()
        await peer.refuse(first, "session_not_found")
        await peer.resumed(turn_id="t1")
        await peer.token("t1", "ok", "s2")
        await peer.end("t1", "s2")

    url = await scripted(before, after)
    async with Client(url, token="ic_a_b", timing=FakeTime().timing()) as client:
        one, two = await client.create_session(), await client.create_session()
        lost, kept = await asyncio.gather(_outcome(one), _outcome(two))
        assert isinstance(kept, list)
        assert _text(kept) == "ok"
        assert isinstance(lost, InferenceCenterError)
        assert lost.code is ErrorCode.SESSION_NOT_FOUND


async def test_requests_in_flight(scripted: Start) -> None:
    """What only reads or closes is asked again; of what changes something the outcome is unknown, and that is told."""
    n_lost = 8

    async def before(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        for _ in range(n_lost):
            await peer.hear()
        await peer.socket.close(1012)

    async def after(peer: Peer) -> None:
        await peer.welcome()
        await peer.resumed(state="idle")
        for _ in range(3):
            request = await peer.hear()
            answers: dict[str, dict[str, Any]] = {
                "ping": {"op": "pong"},
                "list_sessions": {"op": "sessions", "sessions": [{"session_id": "s1", **SUMMARY}]},
            }
            if request["op"] == "close_session":
                await peer.refuse(request, "session_not_found")
            else:
                await peer.say(**answers[request["op"]], id=request["id"])

    url = await scripted(before, after)
    async with Client(url, token="ic_a_b", timing=FakeTime().timing()) as client:
        session = await client.create_session()
        results = await asyncio.gather(
            session.append([ChatMessage(role="user", content="x")]),
            session.fork(),
            session.rewind(START),
            client.create_session(),
            session.append([ChatMessage(role="user", content="y")]),
            client.request(Ping(op="ping")),
            client.sessions(),
            session.close(),
            return_exceptions=True,
        )
    for error in results[:5]:
        assert isinstance(error, InferenceCenterError)
        assert error.code is ErrorCode.DAEMON_UNREACHABLE
        assert error.spec.retryable
        assert "its outcome is unknown" in error.message
    pong, sessions, closed = results[5:]
    assert isinstance(pong, Pong)
    assert isinstance(sessions, tuple)
    assert sessions[0].session_id == "s1"
    assert closed is None, "it was closed the first time"


async def test_requests_wait_for_the_connection(scripted: Start) -> None:
    """What is asked while the socket is lost goes out once every session is resumed."""
    order: list[str] = []

    async def before(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        await peer.socket.close(1013)

    async def after(peer: Peer) -> None:
        await peer.welcome()
        order.append((await peer.resumed(state="idle"))["op"])
        ping = await peer.hear()
        order.append(ping["op"])
        await peer.say(op="pong", id=ping["id"])

    lost = asyncio.Event()
    url = await scripted(before, after)

    def note(notice: Notice) -> None:
        if isinstance(notice, Reconnecting):
            lost.set()

    async with Client(url, token="ic_a_b", timing=FakeTime().timing(), on_notice=note) as client:
        await client.create_session()
        await lost.wait()
        assert not client.connected
        assert isinstance(await client.request(Ping(op="ping")), Pong)
    assert order == ["resume_session", "ping"]


async def test_an_abort_in_a_gap_is_remembered(scripted: Start) -> None:
    """It goes out with the turn's id once the session is resumed, and the turn ends through its iterator."""
    aborts: list[Any] = []

    async def before(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        await peer.begin()
        await peer.token("t1", "One")
        await peer.socket.close(1012)

    async def after(peer: Peer) -> None:
        await peer.welcome()
        await peer.resumed(turn_id="t1")
        aborts.append(await peer.hear())
        await peer.end("t1", id=aborts[0]["id"], finish_reason="aborted")

    time = FakeTime()
    sessions: list[ClientSession] = []

    async def abort(_now: float) -> None:
        await sessions[0].abort()

    time.on_sleep = abort
    async with Client(await scripted(before, after), token="ic_a_b", timing=time.timing()) as client:
        sessions.append(await client.create_session())
        events = await _collect(sessions[0])
    assert events[-1].finish_reason == "aborted"
    assert [(abort["op"], abort["turn_id"]) for abort in aborts] == [("abort", "t1")]


async def test_an_abort_that_was_sent_into_a_dying_socket_is_sent_again(scripted: Start) -> None:
    """Until the turn's end arrives, it is unknown whether the daemon received the abort."""
    aborts: list[Any] = []

    async def before(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        await peer.begin()
        await peer.token("t1", "One")
        aborts.append(await peer.hear())
        peer.socket.transport.abort()

    async def after(peer: Peer) -> None:
        await peer.welcome()
        await peer.resumed(turn_id="t1")
        aborts.append(await peer.hear())
        await peer.end("t1", finish_reason="aborted")

    url = await scripted(before, after)
    async with Client(url, token="ic_a_b", timing=FakeTime().timing()) as client:
        session = await client.create_session()
        async with asyncio.timeout(_TIMEOUT_S):
            async for event in session.infer("hi").events():
                if isinstance(event, Token):
                    await session.abort()
    assert [abort["turn_id"] for abort in aborts] == ["t1", "t1"]


async def test_an_abort_of_a_question_that_never_arrived(scripted: Start) -> None:
    """The question is sent again under its key, and its turn aborted as soon as it has a name."""
    heard: list[Any] = []

    async def before(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        await peer.hear()
        await peer.socket.close(1012)

    async def after(peer: Peer) -> None:
        await peer.welcome()
        await peer.resumed(state="idle")
        await peer.begin("t7")
        heard.append(await peer.hear())
        await peer.end("t7", finish_reason="aborted")

    time = FakeTime()
    sessions: list[ClientSession] = []

    async def abort(_now: float) -> None:
        await sessions[0].abort()

    time.on_sleep = abort
    async with Client(await scripted(before, after), token="ic_a_b", timing=time.timing()) as client:
        sessions.append(await client.create_session())
        events = await _collect(sessions[0])
    assert events[-1].finish_reason == "aborted"
    assert (heard[0]["op"], heard[0]["turn_id"]) == ("abort", "t7")


async def test_a_token_that_was_revoked_meanwhile_is_the_end(scripted: Start) -> None:
    """A wrong credential raises ``not_authenticated`` wherever something waits, and is not tried again."""

    async def before(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        await peer.begin()
        await peer.socket.close(1012)

    async def after(peer: Peer) -> None:
        await peer.say(**HELLO)
        auth = await peer.hear()
        await peer.say(op="auth_failed", id=auth["id"], reason="revoked")
        await peer.hear()
        await peer.say(**HELLO)

    time = FakeTime()
    async with Client(await scripted(before, after), token="ic_a_b", timing=time.timing()) as client:
        session = await client.create_session()
        with pytest.raises(InferenceCenterError, match="revoked") as caught:
            await _collect(session)
        assert caught.value.code is ErrorCode.NOT_AUTHENTICATED
        with pytest.raises(InferenceCenterError, match="revoked"):
            await client.sessions()
    assert len(time.slept) == 1


@pytest.mark.parametrize(
    ("code", "kind"), [(1000, "daemon_unreachable"), (1001, "daemon_unreachable"), (1008, "forbidden")]
)
async def test_a_final_close_is_the_end(scripted: Start, code: int, kind: str) -> None:
    """No other socket is opened."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        await peer.begin()
        await peer.socket.close(code)

    time = FakeTime()
    async with Client(await scripted(daemon), token="ic_a_b", timing=time.timing()) as client:
        session = await client.create_session()
        with pytest.raises(InferenceCenterError, match=str(code)) as caught:
            await _collect(session)
    assert caught.value.code.value == kind
    assert time.slept == []


async def test_a_daemon_that_is_away_for_an_hour(scripted: Start) -> None:
    """With all the time in the world the answer goes on when it is back; attempts are ten seconds apart at most."""
    reached: list[str] = []

    async def before(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        await peer.begin()
        await peer.token("t1", "Hel")
        await peer.socket.close(1012)

    async def away(peer: Peer) -> None:
        reached.append("away")
        peer.socket.transport.abort()

    async def after(peer: Peer) -> None:
        await peer.welcome()
        await peer.resumed(turn_id="t1")
        await peer.token("t1", "lo")
        await peer.end("t1")

    time = FakeTime()
    scripts = [before, *[away] * 363, after]
    url = await scripted(*scripts)
    async with Client(url, token="ic_a_b", timing=time.timing(), give_up_after_s=None) as client:
        events = await _collect(await client.create_session())
    assert _text(events) == "Hello"
    assert time.now > 3500
    assert max(time.slept) == 10.0


async def test_giving_up(scripted: Start) -> None:
    """A daemon that does not come back in time is ``daemon_unreachable``, with the last reason."""

    async def before(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        await peer.begin()
        await peer.socket.close(1012)

    async def away(peer: Peer) -> None:
        await peer.socket.close(1013, "overloaded as ever")

    time = FakeTime()
    url = await scripted(before, away)
    async with Client(url, token="ic_a_b", timing=time.timing(), give_up_after_s=30.0) as client:
        session = await client.create_session()
        with pytest.raises(InferenceCenterError, match="overloaded as ever") as caught:
            await _collect(session)
        assert client.ended is caught.value
    assert caught.value.code is ErrorCode.DAEMON_UNREACHABLE
    assert time.now == pytest.approx(30.0)


async def test_a_daemon_that_cannot_resume_yet_is_tried_again(scripted: Start) -> None:
    """A refusal that will pass costs an attempt, with the wait that it asks for, and not the session."""

    async def before(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        await peer.begin()
        await peer.socket.close(1012)

    async def busy(peer: Peer) -> None:
        await peer.welcome()
        await peer.refuse(await peer.hear(), "storage_unavailable", retryable=True, retry_after_ms=3000)

    async def after(peer: Peer) -> None:
        await peer.welcome()
        await peer.resumed(turn_id="t1")
        await peer.token("t1", "ok")
        await peer.end("t1")

    time = FakeTime()
    async with Client(await scripted(before, busy, after), token="ic_a_b", timing=time.timing()) as client:
        assert _text(await _collect(await client.create_session())) == "ok"
    assert time.slept == [0.2, 3.4]


async def test_missing_events_are_asked_for(scripted: Start) -> None:
    """A number that is skipped before anything but a token has the session resumed on the open socket."""
    asked: list[Any] = []

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        await peer.begin()
        await peer.say(op="progress", session_id="s1", seq=3, turn_id="t1", done=2, total=2)
        asked.append(await peer.resumed(turn_id="t1", seq=3))
        await peer.say(op="progress", session_id="s1", seq=2, turn_id="t1", done=1, total=2)
        await peer.say(op="progress", session_id="s1", seq=3, turn_id="t1", done=2, total=2)
        await peer.say(op="token", session_id="s1", seq=6, turn_id="t1", content="joined")
        peer.skip(5)
        await peer.end("t1")

    async with Client(await scripted(daemon), token="ic_a_b") as client:
        events = await _collect(await client.create_session())
    assert [event.op for event in events] == ["queued", "progress", "progress", "token", "end"]
    assert [(request["epoch"], request["last_seq"]) for request in asked] == [("e", 1)]


async def test_taking_up_a_session_from_elsewhere(scripted: Start) -> None:
    """What was said comes as the transcript, the running turn through ``follow``: its beginning at once, then live."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        said = [{"role": "user", "content": "hi"}]
        request = await peer.resumed(
            **_lost(turn_id="t1", content="Hel", seq=5, state="busy", transcript=said, turns=[])
        )
        assert (request["session_id"], "epoch" in request) == ("s1", False)
        await peer.say(op="token", session_id="s1", seq=6, turn_id="t1", content="lo")
        peer.skip(6)
        await peer.end("t1")
        await peer.begin("t2")
        await peer.end("t2")

    async with Client(await scripted(daemon), token="ic_a_b") as client:
        session, resumed = await client.resume("s1")
        assert resumed.transcript is not None
        assert resumed.transcript[0].content == "hi"
        events = [event async for event in session.follow().events()]
        assert [event.op for event in events] == ["token", "token", "end"]
        assert _text(events) == "Hello"
        assert [event async for event in session.follow().events()] == [], "it is over"
        assert [event.op for event in await _collect(session)] == ["queued", "end"]


async def test_a_session_that_cannot_be_taken_up(scripted: Start) -> None:
    """What the daemon says is raised, and the client forgets the session."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        await peer.refuse(await peer.hear(), "session_not_found")

    async with Client(await scripted(daemon), token="ic_a_b") as client:
        with pytest.raises(InferenceCenterError) as caught:
            await client.resume("s1")
    assert caught.value.code is ErrorCode.SESSION_NOT_FOUND


async def test_a_session_that_is_taken_over(scripted: Start) -> None:
    """The reader of its turn gets an error; it is not resumed against the other connection, but can be used again."""
    heard: list[Any] = []

    async def before(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        await peer.begin()
        await peer.say(op="session_detached", session_id="s1", reason="resumed_elsewhere")
        await peer.hear()
        await peer.socket.close(1012)

    async def after(peer: Peer) -> None:
        await peer.welcome()
        heard.append(await peer.hear())
        await peer.say(op="pong", id=heard[0]["id"])
        await peer.begin("t2")
        await peer.end("t2")

    url = await scripted(before, after)
    async with Client(url, token="ic_a_b", timing=FakeTime().timing()) as client:
        session = await client.create_session()
        with pytest.raises(SessionTakenOverError, match="s1"):
            await _collect(session)
        await client.request(Ping(op="ping"))
        assert [event.op for event in await _collect(session)] == ["queued", "end"]
    assert heard[0]["op"] == "ping"


async def test_an_expired_session_is_told(scripted: Start) -> None:
    """A reader of an expired session gets ``session_not_found``."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        await peer.begin()
        await peer.numbered("session_expired")

    async with Client(await scripted(daemon), token="ic_a_b") as client:
        session = await client.create_session()
        with pytest.raises(InferenceCenterError, match="idle") as caught:
            await _collect(session)
    assert caught.value.code is ErrorCode.SESSION_NOT_FOUND


async def test_a_session_that_is_closed_elsewhere(scripted: Start) -> None:
    """Its waiting readers get an error, it is no longer resumed, and the next turn is refused."""

    async def before(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        await peer.begin()
        await peer.say(op="session_closed", session_id="s1")
        await peer.refuse(await peer.hear(), "session_not_found")
        await peer.hear()
        await peer.socket.close(1012)

    async def after(peer: Peer) -> None:
        await peer.welcome()
        await peer.say(op="pong", id=(await peer.hear())["id"])

    url = await scripted(before, after)
    async with Client(url, token="ic_a_b", timing=FakeTime().timing()) as client:
        session = await client.create_session()
        for message in ("closed elsewhere", "session_not_found"):
            with pytest.raises(InferenceCenterError, match=message) as caught:
                await _collect(session)
            assert caught.value.code is ErrorCode.SESSION_NOT_FOUND
        assert isinstance(await client.request(Ping(op="ping")), Pong)


async def test_a_daemon_that_says_nothing_more_is_noticed(scripted: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that answers no ping is lost, though its socket is open."""
    monkeypatch.setattr("inferencecenter.client.transport._CLOSE_TIMEOUT_S", 0.05)
    clock = LoopClock(monkeypatch, timeouts=True)
    silenced: list[Peer] = []

    async def silent(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        await peer.begin()
        await peer.token("t1", "Hel")
        silenced.append(peer)
        peer.socket.transport.pause_reading()
        for _ in range(2):
            await clock.go_on(KEEPALIVE_S)

    async def after(peer: Peer) -> None:
        silenced[0].socket.transport.abort()
        await peer.welcome()
        await peer.resumed(turn_id="t1")
        await peer.token("t1", "lo")
        await peer.end("t1")

    url = await scripted(silent, after)
    async with Client(url, token="ic_a_b", keepalive_s=KEEPALIVE_S, timing=FakeTime().timing()) as client:
        assert _text(await _collect(await client.create_session())) == "Hello"


async def test_what_is_too_large_is_not_sent(scripted: Start) -> None:
    """The daemon would close the shared socket: ``message_too_large`` before that, and the client stays usable."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        await peer.begin()
        await peer.end("t1")

    async with Client(await scripted(daemon), token="ic_a_b") as client:
        session = await client.create_session()
        with pytest.raises(InferenceCenterError) as caught:
            await _collect(session, "ü" * 600_000)
        assert caught.value.code is ErrorCode.MESSAGE_TOO_LARGE
        assert len(await _collect(session)) == 2


async def test_broadcasts_reach_the_notice_callback(scripted: Start) -> None:
    """Changes of the engine reach the callback."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        await peer.say(op="engine", state="restarting", detail="it died")
        await peer.say(op="pong", id=(await peer.hear())["id"])

    notices: list[Notice] = []
    async with Client(await scripted(daemon), token="ic_a_b", on_notice=notices.append) as client:
        await client.request(Ping(op="ping"))
    assert notices[0] == EngineChanged(state="restarting", detail="it died")


async def test_closing_the_client_fails_everything_that_waits(scripted: Start) -> None:
    """A turn that another task reads ends with the client."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        await peer.begin()

    async with Client(await scripted(daemon), token="ic_a_b") as client:
        reading = asyncio.gather(_collect(await client.create_session()), return_exceptions=True)
        await asyncio.sleep(0)
    (error,) = await reading
    assert isinstance(error, InferenceCenterError)
    assert "closed" in error.message

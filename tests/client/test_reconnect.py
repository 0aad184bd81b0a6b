"""A client whose socket is lost, against daemons with a script for each socket."""

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
    """A clock advanced only by sleeping, with jitter that is always the maximum."""

    now: float = 0.0
    slept: list[float] = field(default_factory=list)
    on_sleep: Callable[[float], Awaitable[None]] | None = None

    def timing(self) -> Timing:
        """Return the clock, sleep and random functions of a client."""
        return Timing(monotonic=lambda: self.now, sleep=self.sleep, random=lambda: 1.0)

    async def sleep(self, seconds: float) -> None:
        """Advance the time at once."""
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


async def test_answer_resumes_at_the_exact_event(scripted: Start) -> None:
    """The client sends its position, yields only new events, and reports loss and return."""
    requests: list[Any] = []

    async def before(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        await peer.begin()
        await peer.token("t1", "Hel")
        await peer.socket.close(1012)

    async def after(peer: Peer) -> None:
        await peer.welcome()
        requests.append(await peer.resumed(turn_id="t1"))
        await peer.send(op="token", session_id="s1", seq=2, turn_id="t1", content="Hel")
        await peer.token("t1", "lo")
        await peer.end("t1")
        await peer.send(op="pong", id=(await peer.receive())["id"])

    notices: list[Notice] = []
    url = await scripted(before, after)
    async with Client(url, token="ic_a_b", on_notice=notices.append, timing=FakeTime().timing()) as client:
        session = await client.create_session()
        events = await _collect(session)
        await client.request(Ping(op="ping"))
        assert client.connected
    assert [type(event) for event in events] == [Queued, Token, Token, End]
    assert _text(events) == "Hello"
    assert (requests[0]["epoch"], requests[0]["last_seq"]) == ("e", 2)
    lost, back, over = notices
    assert isinstance(lost, Reconnecting)
    assert (lost.attempt, lost.in_s) == (1, 0.2)
    assert "1012" in lost.error.message
    assert back == Connected()
    assert isinstance(over, Ended)


async def test_restarted_daemon_completes_the_answer(scripted: Start) -> None:
    """With a new epoch the rest of the text follows, and numbers begin anew."""

    async def before(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        await peer.begin()
        await peer.token("t1", "Hel")
        peer.socket.transport.abort()

    async def after(peer: Peer) -> None:
        await peer.welcome()
        await peer.resumed(**_lost(turn_id="t1", content="Hello", seq=1, state="busy", transcript=[], turns=[]))
        await peer.send(op="token", session_id="s1", seq=2, turn_id="t1", content=" you")
        await peer.send(
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
        frames: list[Any] = []
        with pytest.raises(InferenceCenterError) as caught:
            await _collect(session, into=frames)
    assert _text(frames) == "Hello you"
    assert caught.value.code is ErrorCode.ENGINE_CRASHED


async def test_turn_that_ended_while_disconnected(scripted: Start) -> None:
    """The rest is read from the transcript, the end from repeating the key, though its number is old."""
    keys: list[Any] = []

    async def before(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        keys.append((await peer.begin())["turn_key"])
        await peer.token("t1", "Hel")
        await peer.socket.close(1011)

    async def after(peer: Peer) -> None:
        await peer.welcome()
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello"}]
        turns = [{"turn_id": "t1", "finish_reason": "stop", "messages": 2, "usage": USAGE}]
        await peer.resumed(**_lost(seq=40, transcript=messages, turns=turns))
        again = await peer.receive()
        keys.append(again["turn_key"])
        await peer.end("t1", id=again["id"])

    url = await scripted(before, after)
    async with Client(url, token="ic_a_b", timing=FakeTime().timing()) as client:
        events = await _collect(await client.create_session())
    assert _text(events) == "Hello"
    assert isinstance(events[-1], End)
    assert keys[0] == keys[1]


async def test_unacknowledged_turn_is_sent_again(scripted: Start) -> None:
    """It has the same key and a new id, and is repeated while the daemon loads its model."""
    frames: list[Any] = []

    async def before(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        frames.append(await peer.receive())
        await peer.socket.close(1012)

    async def after(peer: Peer) -> None:
        await peer.welcome()
        await peer.resumed(state="idle")
        frames.append(await peer.receive())
        await peer.refuse(frames[-1], "model_loading", retryable=True, retry_after_ms=700)
        frames.append(await peer.begin())
        await peer.token("t1", "Hello")
        await peer.end("t1")

    time = FakeTime()
    async with Client(await scripted(before, after), token="ic_a_b", timing=time.timing()) as client:
        events = await _collect(await client.create_session())
    assert _text(events) == "Hello"
    assert len({frame["turn_key"] for frame in frames}) == 1
    assert len({frame["id"] for frame in frames}) == 3
    assert time.slept == [0.2, pytest.approx(0.9)]


async def test_lost_session_fails_its_waiting_readers(scripted: Start) -> None:
    """``session_not_found`` reaches its turn; other sessions continue."""

    async def before(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session("s1")
        await peer.open_session("s2")
        await peer.begin()
        await peer.begin()
        await peer.socket.close(1012)

    async def after(peer: Peer) -> None:
        await peer.welcome()
        first = await peer.receive()
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
    """Reads and closes are repeated; changes raise an unknown outcome."""
    n_lost = 8

    async def before(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        for _ in range(n_lost):
            await peer.receive()
        await peer.socket.close(1012)

    async def after(peer: Peer) -> None:
        await peer.welcome()
        await peer.resumed(state="idle")
        for _ in range(3):
            request = await peer.receive()
            answers: dict[str, dict[str, Any]] = {
                "ping": {"op": "pong"},
                "list_sessions": {"op": "sessions", "sessions": [{"session_id": "s1", **SUMMARY}]},
            }
            if request["op"] == "close_session":
                await peer.refuse(request, "session_not_found")
            else:
                await peer.send(**answers[request["op"]], id=request["id"])

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
    """They are sent once every session is resumed."""
    order: list[str] = []

    async def before(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        await peer.socket.close(1013)

    async def after(peer: Peer) -> None:
        await peer.welcome()
        order.append((await peer.resumed(state="idle"))["op"])
        ping = await peer.receive()
        order.append(ping["op"])
        await peer.send(op="pong", id=ping["id"])

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


async def test_abort_while_disconnected_is_sent_after_resume(scripted: Start) -> None:
    """It has the turn's id; the turn's iterator receives the end."""
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
        aborts.append(await peer.receive())
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


async def test_abort_without_confirmation_is_sent_again(scripted: Start) -> None:
    """Until the turn's end arrives, the daemon may not have received the abort."""
    aborts: list[Any] = []

    async def before(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        await peer.begin()
        await peer.token("t1", "One")
        aborts.append(await peer.receive())
        peer.socket.transport.abort()

    async def after(peer: Peer) -> None:
        await peer.welcome()
        await peer.resumed(turn_id="t1")
        aborts.append(await peer.receive())
        await peer.end("t1", finish_reason="aborted")

    url = await scripted(before, after)
    async with Client(url, token="ic_a_b", timing=FakeTime().timing()) as client:
        session = await client.create_session()
        async with asyncio.timeout(_TIMEOUT_S):
            async for event in session.infer("hi").events():
                if isinstance(event, Token):
                    await session.abort()
    assert [abort["turn_id"] for abort in aborts] == ["t1", "t1"]


async def test_abort_of_an_undelivered_turn(scripted: Start) -> None:
    """The turn is sent again with its key and aborted once it has an id."""
    frames: list[Any] = []

    async def before(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        await peer.receive()
        await peer.socket.close(1012)

    async def after(peer: Peer) -> None:
        await peer.welcome()
        await peer.resumed(state="idle")
        await peer.begin("t7")
        frames.append(await peer.receive())
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
    assert (frames[0]["op"], frames[0]["turn_id"]) == ("abort", "t7")


async def test_revoked_token_while_disconnected_is_final(scripted: Start) -> None:
    """All waiting calls raise ``not_authenticated``, and it is not retried."""

    async def before(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        await peer.begin()
        await peer.socket.close(1012)

    async def after(peer: Peer) -> None:
        await peer.send(**HELLO)
        auth = await peer.receive()
        await peer.send(op="auth_failed", id=auth["id"], reason="revoked")
        await peer.receive()
        await peer.send(**HELLO)

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
async def test_final_close_code_is_not_retried(scripted: Start, code: int, kind: str) -> None:
    """No further socket is opened."""

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


async def test_daemon_absent_for_an_hour(scripted: Start) -> None:
    """Without a time limit the answer resumes; attempts are at most ten seconds apart."""
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


async def test_retries_end_at_the_limit(scripted: Start) -> None:
    """The error is ``daemon_unreachable`` with the last reason."""

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


async def test_temporary_resume_refusal_is_retried(scripted: Start) -> None:
    """It costs an attempt with the requested delay, not the session."""

    async def before(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        await peer.begin()
        await peer.socket.close(1012)

    async def busy(peer: Peer) -> None:
        await peer.welcome()
        await peer.refuse(await peer.receive(), "storage_unavailable", retryable=True, retry_after_ms=3000)

    async def after(peer: Peer) -> None:
        await peer.welcome()
        await peer.resumed(turn_id="t1")
        await peer.token("t1", "ok")
        await peer.end("t1")

    time = FakeTime()
    async with Client(await scripted(before, busy, after), token="ic_a_b", timing=time.timing()) as client:
        assert _text(await _collect(await client.create_session())) == "ok"
    assert time.slept == [0.2, 3.4]


async def test_missing_events_are_requested(scripted: Start) -> None:
    """A skipped number before anything but a token resumes the session on the open socket."""
    requests: list[Any] = []

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        await peer.begin()
        await peer.send(op="progress", session_id="s1", seq=3, turn_id="t1", done=2, total=2)
        requests.append(await peer.resumed(turn_id="t1", seq=3))
        await peer.send(op="progress", session_id="s1", seq=2, turn_id="t1", done=1, total=2)
        await peer.send(op="progress", session_id="s1", seq=3, turn_id="t1", done=2, total=2)
        await peer.send(op="token", session_id="s1", seq=6, turn_id="t1", content="joined")
        peer.skip(5)
        await peer.end("t1")

    async with Client(await scripted(daemon), token="ic_a_b") as client:
        events = await _collect(await client.create_session())
    assert [event.op for event in events] == ["queued", "progress", "progress", "token", "end"]
    assert [(request["epoch"], request["last_seq"]) for request in requests] == [("e", 1)]


async def test_session_of_another_client_program_is_resumed(scripted: Start) -> None:
    """The transcript is returned, and ``follow`` yields the running turn from its beginning."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        messages = [{"role": "user", "content": "hi"}]
        request = await peer.resumed(
            **_lost(turn_id="t1", content="Hel", seq=5, state="busy", transcript=messages, turns=[])
        )
        assert (request["session_id"], "epoch" in request) == ("s1", False)
        await peer.send(op="token", session_id="s1", seq=6, turn_id="t1", content="lo")
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


async def test_failed_resume_is_raised(scripted: Start) -> None:
    """The client forgets the session."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        await peer.refuse(await peer.receive(), "session_not_found")

    async with Client(await scripted(daemon), token="ic_a_b") as client:
        with pytest.raises(InferenceCenterError) as caught:
            await client.resume("s1")
    assert caught.value.code is ErrorCode.SESSION_NOT_FOUND


async def test_session_taken_over_by_another_connection(scripted: Start) -> None:
    """Its turn raises, it is not resumed automatically, and it can be used again."""
    frames: list[Any] = []

    async def before(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        await peer.begin()
        await peer.send(op="session_detached", session_id="s1", reason="resumed_elsewhere")
        await peer.receive()
        await peer.socket.close(1012)

    async def after(peer: Peer) -> None:
        await peer.welcome()
        frames.append(await peer.receive())
        await peer.send(op="pong", id=frames[0]["id"])
        await peer.begin("t2")
        await peer.end("t2")

    url = await scripted(before, after)
    async with Client(url, token="ic_a_b", timing=FakeTime().timing()) as client:
        session = await client.create_session()
        with pytest.raises(SessionTakenOverError, match="s1"):
            await _collect(session)
        await client.request(Ping(op="ping"))
        assert [event.op for event in await _collect(session)] == ["queued", "end"]
    assert frames[0]["op"] == "ping"


async def test_expired_session_is_reported(scripted: Start) -> None:
    """A reader receives ``session_not_found``."""

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


async def test_session_closed_by_another_connection(scripted: Start) -> None:
    """Its readers receive an error, it is no longer resumed, and the next turn is refused."""

    async def before(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        await peer.begin()
        await peer.send(op="session_closed", session_id="s1")
        await peer.refuse(await peer.receive(), "session_not_found")
        await peer.receive()
        await peer.socket.close(1012)

    async def after(peer: Peer) -> None:
        await peer.welcome()
        await peer.send(op="pong", id=(await peer.receive())["id"])

    url = await scripted(before, after)
    async with Client(url, token="ic_a_b", timing=FakeTime().timing()) as client:
        session = await client.create_session()
        for message in ("closed elsewhere", "session_not_found"):
            with pytest.raises(InferenceCenterError, match=message) as caught:
                await _collect(session)
            assert caught.value.code is ErrorCode.SESSION_NOT_FOUND
        assert isinstance(await client.request(Ping(op="ping")), Pong)


async def test_unresponsive_daemon_is_detected(scripted: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer without pongs counts as lost although its socket is open."""
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


async def test_oversized_request_is_refused_locally(scripted: Start) -> None:
    """``message_too_large`` instead of a closed socket, and the client stays usable."""

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


async def test_broadcasts_reach_the_callback(scripted: Start) -> None:
    """Engine state changes reach the callback."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        await peer.send(op="engine", state="restarting", detail="it died")
        await peer.send(op="pong", id=(await peer.receive())["id"])

    notices: list[Notice] = []
    async with Client(await scripted(daemon), token="ic_a_b", on_notice=notices.append) as client:
        await client.request(Ping(op="ping"))
    assert notices[0] == EngineChanged(state="restarting", detail="it died")


async def test_closing_the_client_fails_all_waiting_calls(scripted: Start) -> None:
    """A turn that another task reads fails too."""

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

"""The client's connection to a scripted daemon."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from inferencecenter.client import Client, RequestError
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.events import End, Queued, Token
from inferencecenter.protocol.requests import START, Ping
from inferencecenter.protocol.values import ChatMessage
from tests.client.peer import HELLO

if TYPE_CHECKING:
    from inferencecenter.client import ClientSession
    from tests.client.peer import Peer, Start


async def _collect(session: ClientSession, prompt: str, **params: Any) -> list[Any]:
    return [event async for event in session.infer(prompt, params=params or None).events()]


async def test_connect_authenticates(scripted: Start) -> None:
    """Hello and account are available, and the token was sent in the auth frame of a v1 socket."""
    received: list[Any] = []

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        received.extend([*peer.received, peer.socket.subprotocol])

    async with Client(await scripted(daemon), token="ic_a_b") as client:
        assert client.hello.model == "demo"
        assert client.account.client_id == "admin"
    auth, subprotocol = received
    assert (auth["op"], auth["token"], auth["protocol"]) == ("auth", "ic_a_b", 1)
    assert subprotocol == "inferencecenter.v1"


async def test_refused_credential_raises_its_reason(scripted: Start) -> None:
    """``auth_failed`` raises ``not_authenticated`` with the daemon's reason."""

    async def daemon(peer: Peer) -> None:
        await peer.send(**HELLO)
        auth = await peer.receive()
        await peer.send(op="auth_failed", id=auth["id"], reason="unknown token")
        await peer.receive()
        await peer.send(**HELLO)

    with pytest.raises(InferenceCenterError, match="unknown token") as caught:
        async with Client(await scripted(daemon), token="ic_a_b"):
            pass
    assert caught.value.code is ErrorCode.NOT_AUTHENTICATED


@pytest.mark.parametrize("told_when", [True, False])
async def test_rate_limited_login_is_not_a_wrong_credential(scripted: Start, told_when: bool) -> None:
    """Too many failures or sockets raise ``rate_limited``."""

    async def daemon(peer: Peer) -> None:
        await peer.send(**HELLO)
        auth = await peer.receive()
        when = {"retry_after_ms": 500} if told_when else {}
        await peer.send(op="auth_failed", id=auth["id"], reason="too many", **when)
        await peer.socket.close(4429)

    with pytest.raises(InferenceCenterError, match="too many") as caught:
        async with Client(await scripted(daemon), token="ic_a_b"):
            pass
    assert caught.value.code is ErrorCode.RATE_LIMITED
    assert caught.value.retry_after_ms == (500 if told_when else None)


@pytest.mark.parametrize("credential", [{}, {"client_id": "a"}, {"token": "t", "client_id": "a", "api_key": "b"}])
async def test_incomplete_credential_is_refused_locally(scripted: Start, credential: dict[str, str]) -> None:
    """No credential, half of a pair, and both kinds at once are refused without a request."""

    async def daemon(peer: Peer) -> None:
        await peer.send(**HELLO)

    with pytest.raises(RequestError, match="give either token"):
        async with Client(await scripted(daemon), **credential):  # type: ignore[arg-type]
            pass


async def test_closed_port_is_daemon_unreachable() -> None:
    """The error has the address and what to do."""
    with pytest.raises(InferenceCenterError, match=r"ws://127\.0\.0\.1:1/") as caught:
        async with Client("ws://127.0.0.1:1/", token="ic_a_b"):
            pass
    assert caught.value.code is ErrorCode.DAEMON_UNREACHABLE
    assert "inferencecenter serve" in str(caught.value.hint)


@pytest.mark.parametrize("url", ["ftp://127.0.0.1:1/", "nonsense"])
async def test_invalid_url_is_daemon_unreachable(url: str) -> None:
    """The error names the URL instead of raising a library's exception."""
    with pytest.raises(InferenceCenterError, match=url):
        async with Client(url, token="ic_a_b"):
            pass


async def test_other_websocket_server_is_refused(scripted: Start) -> None:
    """A server that sends no hello is not taken for the daemon."""

    async def echo(peer: Peer) -> None:
        await peer.socket.send("welcome to something else")

    with pytest.raises(InferenceCenterError, match="not InferenceCenter"):
        async with Client(await scripted(echo), token="ic_a_b"):
            pass


async def test_turn_streams_to_its_end(scripted: Start) -> None:
    """Events arrive in order and end with ``End``; prompt and parameters are sent unchanged."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        infer = await peer.begin()
        assert (infer["prompt"], infer["params"]) == ("hi", {"temp": 0})
        assert len(infer["turn_key"]) == 32
        await peer.token("t1", "Hel")
        await peer.token("t1", "lo")
        await peer.end("t1")

    async with Client(await scripted(daemon), token="ic_a_b") as client:
        session = await client.create_session(system="short", params={"top_k": 1})
        events = await _collect(session, "hi", temp=0)
    assert [type(event) for event in events] == [Queued, Token, Token, End]
    assert "".join(event.content for event in events[1:3]) == "Hello"
    assert events[-1].stats.tokens == 2


async def test_two_sessions_stream_on_one_socket(scripted: Start) -> None:
    """Interleaved events reach the iterator of their own session."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session("s1")
        await peer.open_session("s2")
        turns = {(await peer.begin("t"))["session_id"], (await peer.begin("t"))["session_id"]}
        assert turns == {"s1", "s2"}
        for text in ("1", "2"):
            for session_id in ("s2", "s1"):
                await peer.token("t", f"{session_id}:{text} ", session_id)
        await peer.end("t", "s1")
        await peer.end("t", "s2")

    async with Client(await scripted(daemon), token="ic_a_b") as client:
        one, two = await client.create_session(), await client.create_session()
        answers = await asyncio.gather(_collect(one, "a"), _collect(two, "b"))
    texts = ["".join(event.content for event in events if isinstance(event, Token)) for events in answers]
    assert texts == ["s1:1 s1:2 ", "s2:1 s2:2 "]


async def test_abort_ends_the_turns_iterator(scripted: Start) -> None:
    """The ``end`` with the abort's id is the turn's last event."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        await peer.begin()
        await peer.token("t1", "One")
        abort = await peer.receive()
        assert (abort["op"], abort["turn_id"]) == ("abort", "t1")
        await peer.end("t1", id=abort["id"], finish_reason="aborted")

    async with Client(await scripted(daemon), token="ic_a_b") as client:
        session = await client.create_session()
        reasons = []
        async for event in session.infer("count").events():
            if isinstance(event, Token):
                await session.abort()
            if isinstance(event, End):
                reasons.append(event.finish_reason)
    assert reasons == ["aborted"]


async def test_late_abort_refusal_does_not_affect_the_next_turn(scripted: Start) -> None:
    """``nothing_to_abort`` for an ended turn is not an error of the next one."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        abort = await peer.receive()
        await peer.begin("t2")
        text = {"code": "nothing_to_abort", "message": "nothing", "error": "nothing", "retryable": False}
        await peer.send(op="error", id=abort["id"], session_id="s1", **text)
        await peer.end("t2")

    async with Client(await scripted(daemon), token="ic_a_b") as client:
        session = await client.create_session()
        await session.abort()
        assert [type(event) for event in await _collect(session, "next")] == [Queued, End]


@pytest.mark.parametrize("place", ["reply", "turn"])
async def test_errors_carry_all_fields(scripted: Start, place: str) -> None:
    """A refused ``infer`` and a turn that fails later raise at the iterator."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        infer = await (peer.receive() if place == "reply" else peer.begin())
        where = {"id": infer["id"]} if place == "reply" else {"session_id": "s1", "turn_id": "t1", "seq": 2}
        text = {"message": "too hot", "error": "too hot", "hint": "lower", "field": "params.temp", "retryable": False}
        await peer.send(op="error", code="invalid_request", **text, **where)

    async with Client(await scripted(daemon), token="ic_a_b") as client:
        session = await client.create_session()
        with pytest.raises(InferenceCenterError, match="too hot") as caught:
            await _collect(session, "hi")
    error = caught.value
    assert (error.code, error.hint, error.field) == (ErrorCode.INVALID_REQUEST, "lower", "params.temp")


async def test_lost_socket_without_reconnect_raises(scripted: Start) -> None:
    """A running turn raises with the close code, and so does the next request."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        await peer.begin()
        await peer.socket.close(1012)

    async with Client(await scripted(daemon), token="ic_a_b", reconnect=False) as client:
        session = await client.create_session()
        with pytest.raises(InferenceCenterError, match=r"1012: restart") as caught:
            await _collect(session, "hi")
        assert caught.value.code is ErrorCode.DAEMON_UNREACHABLE
        with pytest.raises(InferenceCenterError, match="1012"):
            await session.close()
        assert client.ended is caught.value


async def test_revoked_token_differs_from_a_lost_daemon(scripted: Start) -> None:
    """Close code 4401 raises ``not_authenticated``."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        await peer.receive()
        await peer.socket.close(4401, "token revoked")

    async with Client(await scripted(daemon), token="ic_a_b") as client:
        with pytest.raises(InferenceCenterError, match="token revoked") as caught:
            await client.create_session()
    assert caught.value.code is ErrorCode.NOT_AUTHENTICATED


async def test_unknown_events_are_ignored(scripted: Start) -> None:
    """An op of a later version does not affect the turn."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session()
        await peer.begin()
        await peer.numbered("weather", sky="blue")
        await peer.send(op="forecast", sky="gray")
        await peer.token("t1", "ok")
        await peer.end("t1")

    async with Client(await scripted(daemon), token="ic_a_b") as client:
        session = await client.create_session()
        assert [type(event) for event in await _collect(session, "hi")] == [Queued, Token, End]


async def test_hello_can_be_refreshed(scripted: Start) -> None:
    """``refresh_hello`` returns the current loading progress."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        again = await peer.receive()
        await peer.send(**{**HELLO, "status": "loading", "message": "loading 40 %"}, id=again["id"])

    async with Client(await scripted(daemon), token="ic_a_b") as client:
        assert (await client.refresh_hello()).message == "loading 40 %"
        assert client.hello.status == "loading"


async def test_metadata_is_replaced(scripted: Start) -> None:
    """The daemon's answer is returned; another connection's change has no effect on it."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session("s1")
        await peer.send(op="metadata_set", session_id="s1", metadata={"title": "elsewhere"})
        request = await peer.receive()
        assert (request["op"], request["session_id"]) == ("set_metadata", "s1")
        await peer.send(op="metadata_set", id=request["id"], session_id="s1", metadata=request["metadata"])

    async with Client(await scripted(daemon), token="ic_a_b") as client:
        session = await client.create_session(metadata={"title": "old"})
        assert (await session.set_metadata({"title": "new"})).metadata == {"title": "new"}
        with pytest.raises(InferenceCenterError, match="metadata"):
            await session.set_metadata({"title": "x" * 513})


async def test_fork_rewind_and_append(scripted: Start) -> None:
    """Each sends its op and returns the daemon's answer; a fork is a separate session."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        await peer.open_session("s1")
        assert peer.received[-1]["on_full"] == "stop"
        append = await peer.receive()
        assert append["messages"] == [{"role": "user", "content": "hi"}]
        await peer.send(op="appended", id=append["id"], session_id="s1", seq=1, messages=1)
        await peer.open_session("s2")
        assert (peer.received[-1]["op"], peer.received[-1]["turn"]) == ("fork_session", "t1")
        rewind = await peer.receive()
        assert (rewind["op"], rewind["session_id"], rewind["turn"]) == ("rewind_session", "s2", "start")
        await peer.send(op="session_rewound", id=rewind["id"], session_id="s2", seq=1, turn="start", messages=0)
        await peer.open_session("s3")
        assert "turn" not in peer.received[-1]
        refusal = {"code": "turn_not_found", "message": "no turn", "error": "no turn", "retryable": False}
        await peer.send(op="error", id=(await peer.receive())["id"], session_id="s1", **refusal)
        await peer.send(op="pong", id=(await peer.receive())["id"])

    async with Client(await scripted(daemon), token="ic_a_b") as client:
        session = await client.create_session(on_full="stop")
        assert (await session.append([ChatMessage(role="user", content="hi")])).messages == 1
        fork = await session.fork("t1")
        assert fork.session_id == "s2"
        assert (await fork.rewind(START)).messages == 0
        assert (await session.fork()).session_id == "s3"
        with pytest.raises(InferenceCenterError, match="no turn") as caught:
            await session.rewind("t9")
        assert caught.value.code is ErrorCode.TURN_NOT_FOUND
        with pytest.raises(InferenceCenterError, match="unexpected op, pong"):
            await session.rewind("t1")


async def test_client_closed_immediately_leaves_no_socket(scripted: Start) -> None:
    """The daemon sees the disconnect before any task of the client has run."""
    gone = asyncio.Event()

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        await peer.socket.wait_closed()
        gone.set()

    client = Client(await scripted(daemon), token="ic_a_b")
    await client.open()
    await client.close()
    async with asyncio.timeout(60):
        await gone.wait()


async def test_failing_callback_is_logged(scripted: Start, caplog: pytest.LogCaptureFixture) -> None:
    """The event loop reports it, and the connection stays open."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        ping = await peer.receive()
        await peer.send(op="going_away", deadline_ms=1000, resume=True)
        await peer.send(op="pong", id=ping["id"])

    def fail(_notice: object) -> None:
        raise ZeroDivisionError

    async with Client(await scripted(daemon), token="ic_a_b", on_notice=fail) as client:
        await client.request(Ping(op="ping"))
        assert client.connected
    assert "ZeroDivisionError" in caplog.text

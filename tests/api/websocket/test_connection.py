"""A connection's life: authentication, protocol versions, frames and closing."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from typing import TYPE_CHECKING, Any, get_args

import pytest
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from inferencecenter.ipc.port import EngineState
from inferencecenter.protocol.codec import Frame, read_frame
from inferencecenter.protocol.events import AnyEvent
from inferencecenter.server.connection import LARGE_FRAME_CHARS, MAX_FRAMES_BEFORE_LOGIN
from tests.server.harness import Running, ask, close_code, ready, receive

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from inferencecenter.protocol.base import Request
    from tests.loop_clock import LoopClock

    Serve = Callable[..., AbstractAsyncContextManager[Running]]

LEGACY_OPS = {kind.model_fields["op"].default for kind in get_args(AnyEvent) if kind.first_protocol}


async def legacy_socket(server: Running, socket: ClientConnection) -> None:
    """Authenticate as the first protocol does."""
    assert (await receive(socket))["op"] == "hello"
    assert (await ask(socket, op="auth", client_id="kitchen", api_key="kitchen-key"))["op"] == "auth_success"


async def test_unauthenticated_socket_is_closed_at_the_deadline(serve: Serve, clock: LoopClock) -> None:
    """``hello`` does not extend the deadline."""
    async with serve(auth_timeout_s=30) as server, server.connect() as socket:
        await ask(socket, op="hello")
        await clock.go_on(30)
        assert await close_code(socket) == 4401


async def test_authentication_cancels_the_deadline(serve: Serve, clock: LoopClock) -> None:
    """A socket opened later passes its deadline first."""
    async with serve(auth_timeout_s=30) as server, server.v1() as socket, server.connect() as late:
        await receive(socket)
        await clock.go_on(30)
        assert await close_code(late) == 4401
        assert (await ask(socket, op="ping"))["op"] == "pong"


@pytest.mark.parametrize("op", ["ping", "create_session", "metrics", "status", "list_sessions", "nonsense"])
async def test_other_ops_before_authentication_are_refused(server: Running, op: str) -> None:
    """The error does not reveal which ops exist; the socket may still authenticate."""
    async with server.connect() as socket:
        await receive(socket)
        await ask(socket, op="hello", protocol=1)
        error = await ask(socket, op=op, id="7")
        assert (error["op"], error["code"], error["id"]) == ("error", "not_authenticated", "7")
        assert (await ask(socket, op="auth", token=server.token))["op"] == "auth_success"


async def test_wrong_credential_may_be_followed_by_a_right_one(server: Running) -> None:
    """``auth_failed`` has the reason, and the socket stays open."""
    async with server.connect() as socket:
        await receive(socket)
        failed = await ask(socket, op="auth", client_id="kitchen", api_key="wrong", id="1")
        assert failed == {"op": "auth_failed", "id": "1", "reason": "the credential is not valid"}
        assert (await ask(socket, op="auth", client_id="kitchen", api_key="kitchen-key"))["op"] == "auth_success"


async def test_too_many_wrong_credentials_close_the_socket(serve: Serve) -> None:
    """The last answer has the retry delay."""
    async with serve(login_attempts_per_minute=1) as server, server.connect() as socket:
        await receive(socket)
        assert (await ask(socket, op="auth", token="x", protocol=1))["op"] == "auth_failed"
        failed = await ask(socket, op="auth", token=server.token)
        assert failed["op"] == "auth_failed"
        assert 0 < failed["retry_after_ms"] <= 60_000
        assert await close_code(socket) == 4429


async def test_authenticating_twice_is_an_error(server: Running) -> None:
    """A socket does not change its client."""
    async with server.v1() as socket:
        await receive(socket)
        error = await ask(socket, op="auth", client_id="kitchen", api_key="kitchen-key")
        assert error["code"] == "invalid_request"
        assert (await ask(socket, op="create_session"))["op"] == "session_created"


async def test_failing_accounts_database_is_reported(server: Running) -> None:
    """It is neither a wrong credential nor a closed socket."""
    server.accounts._file.close()
    async with server.connect() as socket:
        await receive(socket)
        error = await ask(socket, op="auth", token=server.token, protocol=1)
        assert (error["op"], error["code"], error["retryable"]) == ("error", "storage_unavailable", True)
        assert error["message"] == "accounts cannot be read at the moment"


async def test_revoking_a_token_closes_only_its_sockets(server: Running) -> None:
    """Its sockets close with 4401; another token of the same client keeps working."""
    other = server.accounts.create_token("ada").token
    async with (
        server.v1() as socket,
        server.connect(additional_headers={"Authorization": f"Bearer {other}"}) as going_on,
        server.connect() as keyed,
    ):
        await receive(socket)
        await receive(going_on)
        await legacy_socket(server, keyed)
        server.accounts.revoke(server.token_id)
        server.context.tokens_changed()
        assert await close_code(socket) == 4401
        assert (await ask(going_on, op="hello"))["op"] == "hello"
        assert (await ask(keyed, op="hello"))["op"] == "hello"


async def test_token_expiry_closes_its_socket(clock: LoopClock, server: Running) -> None:
    """The socket closes with 4401 at the expiry, without a further frame."""
    token = server.accounts.create_token("ada", expires_at=time.time() + 3600).token
    async with server.connect(additional_headers={"Authorization": f"Bearer {token}"}) as socket:
        await receive(socket)
        await clock.go_on(3600)
        assert await close_code(socket) == 4401


@pytest.mark.parametrize(
    ("frame", "code"),
    [("{", "invalid_json"), ("[]", "invalid_json"), ('"x"', "invalid_json"), ("{}", "invalid_request")],
)
async def test_invalid_frame_is_answered_and_the_socket_stays_open(server: Running, frame: str, code: str) -> None:
    """No invalid request ends a connection."""
    async with server.v1() as socket:
        await receive(socket)
        await socket.send(frame)
        error = await receive(socket)
        assert (error["op"], error["code"]) == ("error", code)
        assert error["error"] == error["message"]
        assert (await ask(socket, op="ping"))["op"] == "pong"


async def test_binary_frame_is_answered_and_the_socket_stays_open(server: Running) -> None:
    """Frames are text."""
    async with server.v1() as socket:
        await receive(socket)
        await socket.send(b'{"op": "ping"}')
        error = await receive(socket)
        assert (error["code"], error["hint"]) == ("invalid_request", "Send JSON in text frames.")
        assert (await ask(socket, op="ping"))["op"] == "pong"


async def test_oversized_frame_closes_with_1009(serve: Serve) -> None:
    """It closes while the frame is still being sent; a frame at the limit is accepted."""
    async with serve(max_frame_bytes=2048) as server:
        async with server.v1() as socket:
            await receive(socket)
            padding = 2048 - len(json.dumps({"op": "ping", "id": ""}))
            assert (await ask(socket, op="ping", id="x" * padding))["op"] == "error"
            await socket.send("x" * 2049)
            assert await close_code(socket) == 1009
        async with server.v1() as socket:
            await receive(socket)
            with contextlib.suppress(ConnectionClosed):
                await socket.send("x" * 10_000_000)
            assert await close_code(socket) == 1009


async def test_legacy_socket_receives_only_first_protocol_frames(server: Running) -> None:
    """This holds for a conversation with errors and with newer ops."""
    seen: list[dict[str, Any]] = []
    async with server.connect() as socket:
        seen.append(await receive(socket))
        seen.append(await ask(socket, op="hello"))
        seen.append(await ask(socket, op="auth", client_id="kitchen", api_key="kitchen-key"))
        session = await ask(socket, op="create_session")
        seen += [session, await ask(socket, op="create_session", params={"temp": 99})]
        sid = session["session_id"]
        for op in ("ping", "list_sessions"):
            seen.append(await ask(socket, op=op))
            assert "protocol" in seen[-1]["error"]
        await socket.send(json.dumps({"op": "infer", "session_id": sid, "prompt": "hi", "params": {"temp": 0.5}}))
        await server.engine.submitted.wait()
        (turn,) = server.engine.turns
        server.engine.begin(turn)
        server.engine.say(turn, "a")
        server.engine.become(ready(state=EngineState.STARTING))
        server.engine.finish(turn)
        seen += [await receive(socket), await receive(socket)]
        seen += [await ask(socket, op="abort", session_id=sid), await receive(socket)]
        seen += [await ask(socket, op="nonsense"), await ask(socket, op="metrics")]
        seen += [await ask(socket, op="subscribe_metrics"), await ask(socket, op="unsubscribe_metrics")]
        seen += [await ask(socket, op="close_session", session_id=sid)]
    assert [frame["op"] for frame in seen] == [
        "hello", "hello", "auth_success", "session_created", "session_error", "error", "error", "token", "end",
        "abort", "error", "error", "metrics", "metrics_subscribed", "metrics_unsubscribed", "session_closed",
    ]  # fmt: skip
    assert {frame["op"] for frame in seen} <= LEGACY_OPS
    newer = {"seq", "turn_id", "epoch", "code", "hint", "finish_reason", "usage", "protocol", "scopes", "engine"}
    assert not [frame for frame in seen if newer & set(frame)]
    assert seen[7] == {"op": "token", "session_id": sid, "content": "a"}
    assert set(seen[8]["stats"]) == {"ttft_ms", "total_ms", "tokens", "tps"}


async def test_legacy_socket_receives_its_abort(server: Running) -> None:
    """It receives ``aborted`` and the turn's end, or ``not_found`` if no turn runs or the session is unknown."""
    async with server.connect() as socket:
        await legacy_socket(server, socket)
        sid = (await ask(socket, op="create_session"))["session_id"]
        await socket.send(json.dumps({"op": "infer", "session_id": sid, "prompt": "hi"}))
        await server.engine.submitted.wait()
        assert await ask(socket, op="abort", session_id=sid) == {"op": "abort", "session_id": sid, "status": "aborted"}
        assert (await receive(socket))["op"] == "end"
        for target in (sid, "unknown"):
            answer = await ask(socket, op="abort", session_id=target)
            assert answer == {"op": "abort", "session_id": target, "status": "not_found"}
            assert (await receive(socket))["op"] == "error"


async def test_hello_upgrades_to_v1_at_any_time(server: Running) -> None:
    """All ops and fields are sent from then on."""
    async with server.connect() as socket:
        await legacy_socket(server, socket)
        assert (await ask(socket, op="hello", protocol=1))["protocol"] == 1
        assert (await ask(socket, op="ping", id="p")) == {"op": "pong", "id": "p"}


async def test_engine_states_reach_v1_sockets(server: Running) -> None:
    """Loading, restarting and waking are sent once each; changes caused by shutdown are not."""
    async with server.v1() as socket, server.connect(subprotocols=["inferencecenter.v1"]) as unauthenticated:
        await receive(socket)
        await receive(unauthenticated)
        server.engine.become(ready(state=EngineState.BACKOFF, detail="it died"))
        server.engine.become(ready(state=EngineState.DRAINING))
        server.engine.become(ready(state=EngineState.STARTING, restarts=1, detail="it died"))
        server.engine.become(ready(restarts=1))
        server.engine.become(ready(state=EngineState.SUSPENDING, restarts=1))
        server.engine.become(ready(state=EngineState.ASLEEP, restarts=1))
        server.engine.become(ready(state=EngineState.STARTING, restarts=1))
        states = [await receive(socket) for _ in range(4)]
        assert [(event["state"], event["detail"]) for event in states] == [
            ("restarting", "it died"),
            ("ready", ""),
            ("asleep", ""),
            ("starting", ""),
        ]
        assert (await ask(unauthenticated, op="hello"))["op"] == "hello", (
            "a socket that is not authenticated hears nothing"
        )


async def test_lost_socket_closes_sessions_without_resume(server: Running) -> None:
    """Their running turns end, too."""
    async with server.v1() as socket:
        await receive(socket)
        sid = (await ask(socket, op="create_session", on_disconnect="close"))["session_id"]
        await ask(socket, op="infer", session_id=sid, prompt="hi")
        assert server.context.sessions.totals().active_generations == 1
    await socket.wait_closed()
    async with server.v1() as again:
        await receive(again)
        assert (await ask(again, op="list_sessions"))["sessions"] == []
    assert server.engine.turns == {}


@pytest.mark.parametrize("padding", ["x" * LARGE_FRAME_CHARS, [{}] * 256, [0] * 2049])
async def test_large_frame_is_parsed_off_the_event_loop(
    server: Running, monkeypatch: pytest.MonkeyPatch, padding: object
) -> None:
    """A frame with many objects or values is large, too; it is validated there, and frames are answered in order."""
    threads: list[int] = []
    parsed: list[int] = []

    def noting(text: str) -> Frame:
        threads.append(threading.get_ident())
        return read_frame(text)

    parse = Frame.parse

    def noting_parse(frame: Frame) -> Request:
        parsed.append(threading.get_ident())
        return parse(frame)

    monkeypatch.setattr("inferencecenter.api.websocket.connection.read_frame", noting)
    monkeypatch.setattr(Frame, "parse", noting_parse)
    async with server.v1() as socket:
        await receive(socket)
        await socket.send(json.dumps({"op": "ping", "id": "1", "padding": padding}))
        await socket.send(json.dumps({"op": "ping", "id": "2"}))
        answers = [await receive(socket) for _ in range(2)]
    assert [(answer["op"], answer["id"]) for answer in answers] == [("error", "1"), ("pong", "2")]
    assert threads[0] != threading.get_ident() == threads[1]
    assert parsed == threads


async def test_unauthenticated_frames_are_limited(server: Running) -> None:
    """Frames before login are answered up to a limit; an authenticated client has none."""
    async with server.connect() as socket, server.v1() as client:
        await receive(socket)
        for _ in range(MAX_FRAMES_BEFORE_LOGIN):
            assert (await ask(socket, op="hello"))["op"] == "hello"
        await socket.send('{"op": "hello"}')
        assert await close_code(socket) == 4429
        await receive(client)
        for _ in range(MAX_FRAMES_BEFORE_LOGIN + 1):
            assert (await ask(client, op="ping"))["op"] == "pong"


async def test_large_frame_before_authentication_is_not_parsed(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No login is that large; the socket may still authenticate."""
    async with server.connect() as socket:
        await receive(socket)
        await ask(socket, op="hello", protocol=1)
        with monkeypatch.context() as closed:
            closed.setattr("inferencecenter.api.websocket.connection.read_frame", pytest.fail)
            await socket.send(json.dumps({"op": "auth", "token": "x" * LARGE_FRAME_CHARS}))
            assert (await receive(socket, "error"))["code"] == "message_too_large"
        assert (await ask(socket, op="auth", token=server.token))["op"] == "auth_success"


async def test_internal_error_in_one_frame_leaves_the_socket_open(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is reported as an internal error."""
    async with server.v1() as socket:
        await receive(socket)
        with monkeypatch.context() as broken:
            broken.setattr("inferencecenter.api.websocket.connection.read_frame", fail_unexpectedly)
            assert (await ask(socket, op="ping"))["code"] == "internal"
        assert (await ask(socket, op="ping"))["op"] == "pong"


def fail_unexpectedly(_text: str) -> Frame:
    """Raise as a defect does."""
    raise RuntimeError

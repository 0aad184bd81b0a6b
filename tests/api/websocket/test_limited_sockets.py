"""Limits of a token as its sockets experience them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from websockets.exceptions import InvalidStatus

from inferencecenter.config.limits import NO_LIMITS, AccessLimits
from tests.server.harness import Running, ask, close_code, receive

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from websockets.asyncio.client import ClientConnection


def limit(server: Running, **limits: Any) -> None:
    """Change the limits of the server client's token while the daemon runs, as the command line does."""
    assert server.accounts.limit_token(server.token_id, AccessLimits(**limits))
    server.context.tokens_changed()


async def opened(socket: ClientConnection) -> str:
    """Create a session and return its id."""
    return str((await ask(socket, op="create_session"))["session_id"])


async def infer(socket: ClientConnection, session_id: str, **fields: Any) -> dict[str, Any]:
    """Request a turn and return the first frame of the answer."""
    return await ask(socket, op="infer", session_id=session_id, prompt="Hi", **fields)


async def test_limits_are_sent_at_login(serve: Callable[..., AbstractAsyncContextManager[Running]]) -> None:
    """Each is the token's own, else its account's, else the daemon's; allowed addresses are not sent."""
    async with serve(limits=AccessLimits(concurrent_turns=2, max_tokens=9)) as server:
        server.accounts.change_client(
            "ada", limits=AccessLimits(max_tokens=50, models=("stub",), addresses=("127.0.0.0/8",))
        )
        limit(server, tokens_per_day=1000)
        async with server.v1() as socket:
            assert (await receive(socket))["limits"] == {
                "max_sessions": 8,
                "max_connections": 32,
                "tokens_per_day": 1000,
                "max_tokens": 50,
                "concurrent_turns": 2,
                "models": ["stub"],
            }


async def test_exhausted_quota_has_a_retry_time(server: Running) -> None:
    """The turn is cut off with its text, the next is refused until midnight, and other tokens keep working."""
    limit(server, tokens_per_day=4)
    other = server.accounts.create_token("ada").token
    async with server.v1() as socket:
        await receive(socket)
        session_id = await opened(socket)
        turn_id = (await infer(socket, session_id))["turn_id"]
        server.engine.begin(turn_id)
        for word in ("one", " two", " three"):
            server.engine.say(turn_id, word)
        end = await receive(socket, "end")
        assert end["finish_reason"] == "quota_exceeded"
        session = await ask(socket, op="get_session", session_id=session_id)
        assert session["turns"][0]["finish_reason"] == "quota_exceeded"
        refused = await infer(socket, session_id, id="7")
        assert (refused["code"], refused["id"], refused["retryable"]) == ("quota_exceeded", "7", False)
        assert 0 < refused["retry_after_ms"] <= 86_400_000
        assert "00:00 UTC" in refused["hint"]
        async with server.connect(additional_headers={"X-Client-ID": "ada", "X-API-Key": other}) as elsewhere:
            await receive(elsewhere)
            await elsewhere.send(json.dumps({"op": "infer", "session_id": session_id, "prompt": "Hi"}))
            server.engine.submitted.clear()
            await server.engine.submitted.wait()


async def test_rate_and_concurrency_limits(server: Running) -> None:
    """Each refusal names its limit and has a retry delay."""
    limit(server, requests_per_minute=1)
    async with server.v1() as socket:
        await receive(socket)
        session_id, second = await opened(socket), await opened(socket)
        turn_id = (await infer(socket, session_id))["turn_id"]
        refused = await infer(socket, second)
        assert (refused["code"], refused["retryable"]) == ("rate_limited", True)
        assert 0 < refused["retry_after_ms"] <= 60_100
        limit(server, concurrent_turns=1)
        assert "1 turns of this token run or wait" in (await infer(socket, second))["message"]
        limit(server, tokens_per_minute=1)
        server.engine.begin(turn_id)
        server.engine.finish(turn_id)
        await receive(socket, "end")
        limit(server, tokens_per_minute=1000)
        assert (await infer(socket, second))["op"] == "queued"


async def test_limit_changes_apply_to_open_sockets(server: Running) -> None:
    """A lowered limit applies to the next frame, a removed one no longer does."""
    async with server.v1() as socket:
        await receive(socket)
        session_id = await opened(socket)
        limit(server, models=["another"])
        refused = await ask(socket, op="create_session")
        assert (refused["code"], refused["field"]) == ("forbidden", "model")
        assert (await infer(socket, session_id))["code"] == "forbidden"
        limit(server, max_tokens=5)
        long = await infer(socket, session_id, params={"max_tokens": 6})
        assert (long["code"], long["field"]) == ("invalid_request", "params.max_tokens")
        limit(server)
        assert (await infer(socket, session_id, params={"max_tokens": 6}))["op"] == "queued"


async def test_daemon_limits_can_be_reloaded(server: Running) -> None:
    """SIGHUP reloads them; limits of a token stay."""
    limit(server, max_tokens=7)
    server.context.limits_changed(AccessLimits(max_tokens=1, models=("another",)))
    async with server.v1() as socket:
        assert (await receive(socket))["limits"]["max_tokens"] == 7
        assert (await ask(socket, op="create_session"))["code"] == "forbidden"


# Allowed addresses.


async def test_disallowed_address_is_refused_like_a_wrong_token(server: Running) -> None:
    """The refusals are equal for every credential method; the audit log names the client."""
    limit(server, addresses=["192.0.2.0/24"])
    answers = []
    for token in (server.token, server.token[:-8] + "00000000"):
        with pytest.raises(InvalidStatus) as refused:
            await server.connect(additional_headers={"Authorization": f"Bearer {token}"})
        async with server.connect() as socket:
            await receive(socket)
            failed = await ask(socket, op="auth", token=token)
        answers.append((refused.value.response.status_code, refused.value.response.body, failed))
    assert answers[0] == answers[1]
    assert answers[0][0] == 401
    [*_, line] = [line for line in server.accounts.audit_lines(last=9) if line.event == "login_refused"]
    assert line.token_id == server.token_id


async def test_attempts_from_disallowed_addresses_are_limited(
    serve: Callable[..., AbstractAsyncContextManager[Running]],
) -> None:
    """They count as failed logins."""
    async with serve(login_attempts_per_minute=2) as server:
        limit(server, addresses=["192.0.2.0/24"])
        codes = []
        for _ in range(3):
            with pytest.raises(InvalidStatus) as refused:
                await server.v1()
            codes.append(refused.value.response.status_code)
        assert codes == [401, 401, 429]


async def test_sockets_close_when_their_address_is_disallowed(server: Running) -> None:
    """They close with 4401; those of other tokens stay open."""
    other = server.accounts.create_token("ada").token
    async with (
        server.v1() as socket,
        server.connect(additional_headers={"Authorization": f"Bearer {other}"}) as stays,
    ):
        await receive(socket)
        await receive(stays)
        limit(server, addresses=["127.0.0.0/8"])
        limit(server, addresses=["192.0.2.0/24"])
        assert await close_code(socket) == 4401
        assert (await ask(stays, op="hello"))["op"] == "hello"


async def test_session_limit_change_applies_at_once(server: Running) -> None:
    """It applies to open sockets and to requests; open sessions and other accounts are unaffected."""

    def limit_sessions(number: int) -> None:
        server.accounts.change_client("ada", limits=NO_LIMITS, max_sessions=number)
        server.context.tokens_changed()

    kitchen = {"X-Client-ID": "kitchen", "X-API-Key": "kitchen-key"}
    versioned = ["inferencecenter.v1"]
    async with (
        server.v1() as socket,
        server.connect(subprotocols=versioned, additional_headers=kitchen) as other,
    ):
        await receive(socket)
        await receive(other)
        first = await opened(socket)
        limit_sessions(1)
        refused = await ask(socket, op="create_session")
        assert (refused["code"], refused["message"]) == ("session_limit", "this client has 1 sessions of 1")
        assert (await ask(socket, op="get_session", session_id=first))["op"] != "error"
        assert (await ask(socket, op="status", type="sessions"))["values"]["max_sessions"] == 1
        limit_sessions(3)
        await opened(socket)
        assert (await ask(other, op="status", type="sessions"))["values"]["max_sessions"] == 3


async def test_session_limit_change_applies_to_running_requests(server: Running) -> None:
    """A Responses socket and a running request use the account's current limit."""
    async with server.connect(
        "/v1/responses", additional_headers={"Authorization": f"Bearer {server.token}"}
    ) as socket:
        await socket.send("{}")
        await socket.recv()
        (guest,) = server.context.hub.participants
        server.accounts.change_client("ada", limits=NO_LIMITS, max_sessions=1)
        server.context.tokens_changed()
        create = {"type": "response.create", "input": "Hi"}
        server.engine.submitted.clear()
        await socket.send(json.dumps({**create, "stream_id": "a"}))
        await server.engine.submitted.wait()
        await socket.send(json.dumps({**create, "stream_id": "b"}))
        refused = await frame_of(socket, "error")
        assert (guest.client.client_id, refused["stream_id"]) == ("ada", "b")
        assert refused["error"]["code"] == "session_limit"


async def frame_of(socket: ClientConnection, kind: str) -> dict[str, Any]:
    """Return the next frame of a type."""
    while True:
        frame: dict[str, Any] = json.loads(await socket.recv())
        if frame["type"] == kind:
            return frame

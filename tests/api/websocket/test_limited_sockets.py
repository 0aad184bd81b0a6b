"""Tests of what a limited token meets on a socket."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from websockets.exceptions import InvalidStatus

from inferencecenter.config.limits import NO_LIMITS, AccessLimits
from tests.server.harness import Running, ask, close_code, hear

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from websockets.asyncio.client import ClientConnection


def limit(server: Running, **limits: Any) -> None:
    """Give the token of the server's client these limits while the daemon runs, as the command line does."""
    assert server.accounts.limit_token(server.token_id, AccessLimits(**limits))
    server.context.tokens_changed()


async def opened(socket: ClientConnection) -> str:
    """Open a session."""
    return str((await ask(socket, op="create_session"))["session_id"])


async def infer(socket: ClientConnection, session_id: str, **fields: Any) -> dict[str, Any]:
    """Ask for a turn and return the first frame of the answer."""
    return await ask(socket, op="infer", session_id=session_id, prompt="Hi", **fields)


async def test_a_token_is_told_its_limits(serve: Callable[..., AbstractAsyncContextManager[Running]]) -> None:
    """Its own, where it has none its account's, then the daemon's; what it may come from is not its business."""
    async with serve(limits=AccessLimits(concurrent_turns=2, max_tokens=9)) as server:
        server.accounts.limit_client("ada", AccessLimits(max_tokens=50, models=("stub",), addresses=("127.0.0.0/8",)))
        limit(server, tokens_per_day=1000)
        async with server.v1() as socket:
            assert (await hear(socket))["limits"] == {
                "max_sessions": 8,
                "max_connections": 32,
                "tokens_per_day": 1000,
                "max_tokens": 50,
                "concurrent_turns": 2,
                "models": ["stub"],
            }


async def test_a_quota_that_runs_out_says_when_to_come_back(server: Running) -> None:
    """The turn is cut off with what it said; the next is refused until midnight; other tokens go on."""
    limit(server, tokens_per_day=4)
    other = server.accounts.create_token("ada").token
    async with server.v1() as socket:
        await hear(socket)
        session_id = await opened(socket)
        turn_id = (await infer(socket, session_id))["turn_id"]
        server.engine.begin(turn_id)
        for word in ("one", " two", " three"):
            server.engine.say(turn_id, word)
        end = await hear(socket, "end")
        assert end["finish_reason"] == "quota_exceeded"
        session = await ask(socket, op="get_session", session_id=session_id)
        assert session["turns"][0]["finish_reason"] == "quota_exceeded"
        refused = await infer(socket, session_id, id="7")
        assert (refused["code"], refused["id"], refused["retryable"]) == ("quota_exceeded", "7", False)
        assert 0 < refused["retry_after_ms"] <= 86_400_000
        assert "00:00 UTC" in refused["hint"]
        async with server.connect(additional_headers={"X-Client-ID": "ada", "X-API-Key": other}) as elsewhere:
            await hear(elsewhere)
            await elsewhere.send(json.dumps({"op": "infer", "session_id": session_id, "prompt": "Hi"}))
            server.engine.submitted.clear()
            await server.engine.submitted.wait()


async def test_limits_of_a_minute_and_at_once(server: Running) -> None:
    """Each refusal names its limit and says when it is worth asking again."""
    limit(server, requests_per_minute=1)
    async with server.v1() as socket:
        await hear(socket)
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
        await hear(socket, "end")
        limit(server, tokens_per_minute=1000)
        assert (await infer(socket, second))["op"] == "queued"


async def test_changes_reach_sockets_that_are_open(server: Running) -> None:
    """A limit that is lowered holds for the next frame, one that is taken away no longer does."""
    async with server.v1() as socket:
        await hear(socket)
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


async def test_the_daemons_own_limits_may_change(server: Running) -> None:
    """As SIGHUP has them read again; what a token sets itself stays."""
    limit(server, max_tokens=7)
    server.context.limits_changed(AccessLimits(max_tokens=1, models=("another",)))
    async with server.v1() as socket:
        assert (await hear(socket))["limits"]["max_tokens"] == 7
        assert (await ask(socket, op="create_session"))["code"] == "forbidden"


# Where a token may come from.


async def test_a_right_token_from_a_wrong_address_is_like_a_wrong_one(server: Running) -> None:
    """By every way of showing it, to the letter; the audit log knows who it was."""
    limit(server, addresses=["192.0.2.0/24"])
    answers = []
    for token in (server.token, server.token[:-8] + "00000000"):
        with pytest.raises(InvalidStatus) as refused:
            await server.connect(additional_headers={"Authorization": f"Bearer {token}"})
        async with server.connect() as socket:
            await hear(socket)
            failed = await ask(socket, op="auth", token=token)
        answers.append((refused.value.response.status_code, refused.value.response.body, failed))
    assert answers[0] == answers[1]
    assert answers[0][0] == 401
    [*_, line] = [line for line in server.accounts.audit_lines(last=9) if line.event == "login_refused"]
    assert line.token_id == server.token_id


async def test_guesses_from_a_wrong_address_are_limited(
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


async def test_sockets_close_when_their_address_is_not_allowed_any_more(server: Running) -> None:
    """With 4401; those of other tokens stay open."""
    other = server.accounts.create_token("ada").token
    async with (
        server.v1() as socket,
        server.connect(additional_headers={"Authorization": f"Bearer {other}"}) as stays,
    ):
        await hear(socket)
        await hear(stays)
        limit(server, addresses=["127.0.0.0/8"])
        limit(server, addresses=["192.0.2.0/24"])
        assert await close_code(socket) == 4401
        assert (await ask(stays, op="hello"))["op"] == "hello"


async def test_another_number_of_sessions_holds_at_once(server: Running) -> None:
    """On sockets that are open and for requests; what is open stays, and sockets of other accounts keep theirs."""

    def limit_sessions(number: int) -> None:
        server.accounts.limit_client("ada", NO_LIMITS, max_sessions=number)
        server.context.tokens_changed()

    kitchen = {"X-Client-ID": "kitchen", "X-API-Key": "kitchen-key"}
    versioned = ["inferencecenter.v1"]
    async with (
        server.v1() as socket,
        server.connect(subprotocols=versioned, additional_headers=kitchen) as other,
    ):
        await hear(socket)
        await hear(other)
        first = await opened(socket)
        limit_sessions(1)
        refused = await ask(socket, op="create_session")
        assert (refused["code"], refused["message"]) == ("session_limit", "this client has 1 sessions of 1")
        assert (await ask(socket, op="get_session", session_id=first))["op"] != "error"
        assert (await ask(socket, op="status", type="sessions"))["values"]["max_sessions"] == 1
        limit_sessions(3)
        await opened(socket)
        assert (await ask(other, op="status", type="sessions"))["values"]["max_sessions"] == 3


async def test_another_number_of_sessions_holds_for_guests(server: Running) -> None:
    """A socket for responses, and a request that is being answered, act for the account as it is now."""
    async with server.connect(
        "/v1/responses", additional_headers={"Authorization": f"Bearer {server.token}"}
    ) as socket:
        await socket.send("{}")
        await socket.recv()
        (guest,) = server.context.hub.participants
        server.accounts.limit_client("ada", NO_LIMITS, max_sessions=1)
        server.context.tokens_changed()
        create = {"type": "response.create", "input": "Hi"}
        server.engine.submitted.clear()
        await socket.send(json.dumps({**create, "stream_id": "a"}))
        await server.engine.submitted.wait()
        await socket.send(json.dumps({**create, "stream_id": "b"}))
        refused = await frame_of(socket, "error")
        assert (guest.account.client_id, refused["stream_id"]) == ("ada", "b")
        assert refused["error"]["code"] == "session_limit"


async def frame_of(socket: ClientConnection, kind: str) -> dict[str, Any]:
    """Return the next frame of a type."""
    while True:
        frame: dict[str, Any] = json.loads(await socket.recv())
        if frame["type"] == kind:
            return frame

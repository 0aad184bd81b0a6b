"""Usage reports and the operations of operators and administrators."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest

from inferencecenter.config.limits import AccessLimits
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.sessions.store.archive import UsageLine
from tests.server.harness import Running, ask, close_code, receive

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from websockets.asyncio import client

USED = (
    UsageLine("ada", "2026-11-20", 2, 100, 60, 30),
    UsageLine("ada", "2026-11-22", 1, 50, 0, 10),
)


def connect(server: Running, name: str, *scopes: str) -> client.connect:
    """Open a socket of a client with these scopes."""
    if scopes:
        server.accounts.ensure_client(name, max_sessions=4, priority="normal", scopes=scopes)
    token = server.accounts.create_token(name).token
    return server.connect(additional_headers={"Authorization": f"Bearer {token}"}, subprotocols=["inferencecenter.v1"])


def audit_entries(server: Running, event: str) -> list[tuple[str | None, str | None, str]]:
    """Return client, address and detail of the audit log's entries of an event."""
    return [
        (line.client_id, line.address, line.detail)
        for line in server.accounts.audit_lines(last=100)
        if line.event == event
    ]


@pytest.mark.parametrize(
    ("op", "scope"), [("list_clients", "admin"), ("kick", "admin"), ("drain", "operator"), ("usage", "operator")]
)
async def test_operations_require_their_scopes(server: Running, op: str, scope: str) -> None:
    """Other clients learn nothing, nothing is done, and nothing is logged."""
    fields = {"client_id": "ada"} if op in ("kick", "usage") else {}
    others = ({"operator", "admin", "priority"} - {scope}) if op != "usage" else {"admin"}
    async with connect(server, "eve", "user", *others) as socket:
        await receive(socket)
        refused = await ask(socket, op=op, id="1", **fields)
        assert (refused["code"], refused["id"]) == ("forbidden", "1")
        assert scope in refused["message"]
    assert [audit_entries(server, event) for event in ("clients_listed", "client_kicked", "drain_asked")] == [
        [],
        [],
        [],
    ]
    assert not server.context.hub.draining


async def test_connected_clients_are_listed(server: Running) -> None:
    """Each has its number of sockets, addresses, sessions and running turns, and today's tokens."""
    server.context.quotas.of("ada", server.token_id).use(70)
    async with (
        connect(server, "root", "user", "admin") as admin,
        server.v1() as one,
        server.v1() as two,
        server.connect() as unauthenticated,
    ):
        for socket in (admin, one, two, unauthenticated):
            await receive(socket)
        first = (await ask(one, op="create_session"))["session_id"]
        await ask(two, op="create_session")
        turn_id = (await ask(one, op="infer", session_id=first, prompt="Hi"))["turn_id"]
        listed = await ask(admin, op="list_clients", id="c")
        ada = {"connections": 2, "addresses": 1, "sessions": 2, "busy": 1, "tokens_today": 70}
        root = {"connections": 1, "addresses": 1, "sessions": 0, "busy": 0, "tokens_today": 0}
        assert listed == {
            "op": "clients",
            "id": "c",
            "clients": [{"client_id": "ada", **ada}, {"client_id": "root", **root}],
        }
        server.engine.finish(turn_id)
    assert audit_entries(server, "clients_listed") == [("root", "127.0.0.1", "")]


async def test_kick_closes_sockets_but_no_session(server: Running) -> None:
    """The turn continues, and the client can resume it."""
    async with connect(server, "root", "user", "admin") as admin, server.v1() as one, server.v1() as two:
        for socket in (admin, one, two):
            await receive(socket)
        created = await ask(one, op="create_session")
        turn_id = (await ask(one, op="infer", session_id=created["session_id"], prompt="Hi"))["turn_id"]
        kicked = await ask(admin, op="kick", client_id="ada", id="k")
        assert kicked == {"op": "kicked", "id": "k", "client_id": "ada", "connections": 2}
        assert [await close_code(one), await close_code(two)] == [1008, 1008]
        server.engine.begin(turn_id)
        server.engine.say(turn_id, "still here")
        async with server.v1() as back:
            await receive(back)
            resumed = await ask(back, op="resume_session", session_id=created["session_id"])
            assert (resumed["state"], resumed["turn_id"], resumed["content"]) == ("busy", turn_id, "still here")
            server.engine.finish(turn_id)
    assert audit_entries(server, "client_kicked") == [("root", "127.0.0.1", "ada")]


async def test_kicking_oneself_is_answered_first(server: Running) -> None:
    """The answer is sent before the socket closes."""
    async with connect(server, "root", "user", "admin") as admin:
        await receive(admin)
        assert (await ask(admin, op="kick", client_id="root"))["op"] == "kicked"
        assert await close_code(admin) == 1008


async def test_kicking_an_absent_client_is_an_error(server: Running) -> None:
    """The error names the client, and nothing is logged."""
    async with connect(server, "root", "user", "admin") as admin:
        await receive(admin)
        refused = await ask(admin, op="kick", client_id="adda")
        assert (refused["code"], refused["field"]) == ("invalid_request", "client_id")
    assert audit_entries(server, "client_kicked") == []


async def test_operator_drains_the_daemon(serve: Callable[..., AbstractAsyncContextManager[Running]]) -> None:
    """Like SIGTERM: clients are notified, a running turn ends, then sockets close with 1012 and the server stops."""
    async with serve(shutdown_timeout_s=30) as server:
        async with connect(server, "op", "user", "operator") as operator, server.v1() as socket:
            await receive(operator)
            await receive(socket)
            session_id = (await ask(socket, op="create_session"))["session_id"]
            turn_id = (await ask(socket, op="infer", session_id=session_id, prompt="Hi"))["turn_id"]
            assert await ask(operator, op="drain", id="d") == {"op": "draining", "id": "d", "deadline_ms": 30_000}
            assert (await receive(operator))["op"] == "going_away"
            assert await close_code(operator) == 1012
            assert (await receive(socket))["op"] == "going_away"
            server.engine.begin(turn_id)
            server.engine.finish(turn_id)
            assert (await receive(socket))["op"] == "end"
            assert await close_code(socket) == 1012
        async with asyncio.timeout(60):
            await server.serving
        assert audit_entries(server, "drain_asked") == [("op", "127.0.0.1", "")]


# Usage.


async def test_client_reads_its_usage(serve: Callable[..., AbstractAsyncContextManager[Running]]) -> None:
    """It has the usage by day, and the remaining quota of its token."""
    asked: list[tuple[str, str]] = []

    def read(client_id: str, since: str) -> tuple[UsageLine, ...]:
        asked.append((client_id, since))
        return USED

    async with serve(read_usage=read) as server:
        server.accounts.limit_token(server.token_id, AccessLimits(tokens_per_day=100, requests_per_minute=3))
        server.context.tokens_changed()
        server.context.quotas.of("ada", server.token_id).use(30)
        async with server.v1() as socket:
            await receive(socket)
            report = await ask(socket, op="usage", id="u", days=3)
            assert (report["op"], report["id"], report["client_id"]) == ("usage", "u", "ada")
            assert report["days"] == [
                {"day": "2026-11-20", "turns": 2, "prompt_tokens": 100, "cached_tokens": 60, "completion_tokens": 30},
                {"day": "2026-11-22", "turns": 1, "prompt_tokens": 50, "cached_tokens": 0, "completion_tokens": 10},
            ]
            left = report["left"]
            assert 0 < left.pop("day_ends_in_ms") <= 86_400_000
            assert left == {"tokens_today": 30, "turns": 0, "requests_left": 3, "day_tokens_left": 70}
            assert (await ask(socket, op="usage", client_id="bob"))["code"] == "forbidden"
        async with connect(server, "op", "user", "operator") as operator:
            await receive(operator)
            report = await ask(operator, op="usage", client_id="bob")
            assert (report["client_id"], "left" in report) == ("bob", False)
    assert [client_id for client_id, _ in asked] == ["ada", "bob"]


async def test_usage_read_failure_is_an_error(
    serve: Callable[..., AbstractAsyncContextManager[Running]],
) -> None:
    """The socket stays open, and later frames are answered in order."""

    def read(_client_id: str, _since: str) -> tuple[UsageLine, ...]:
        raise InferenceCenterError(ErrorCode.STORAGE_UNAVAILABLE, "the disk is gone")

    async with serve(read_usage=read) as server, server.v1() as socket:
        await receive(socket)
        await socket.send('{"op": "usage", "id": "1"}')
        refused = await ask(socket, op="ping", id="2")
        assert (refused["code"], refused["id"]) == ("storage_unavailable", "1")
        assert await receive(socket) == {"op": "pong", "id": "2"}
        assert (await ask(socket, op="usage", days=0))["field"] == "days"


async def test_usage_without_a_store_has_only_the_allowance(server: Running) -> None:
    """The remaining allowance is known without stored usage."""
    async with server.v1() as socket:
        await receive(socket)
        report = await ask(socket, op="usage")
        assert (report["days"], report["left"]["tokens_today"]) == ([], 0)


async def test_concurrent_usage_reads_of_a_client_share_one_thread(
    serve: Callable[..., AbstractAsyncContextManager[Running]],
) -> None:
    """Another client's read runs second."""
    reading, most, asked = 0, 0, list[str]()
    lock, go_on = threading.Lock(), threading.Event()

    def read_usage(client_id: str, _since: str) -> tuple[UsageLine, ...]:
        nonlocal reading, most
        with lock:
            reading += 1
            most = max(most, reading)
            asked.append(client_id)
        assert go_on.wait(60)
        with lock:
            reading -= 1
        return ()

    async with serve(read_usage=read_usage) as server, AsyncExitStack() as open_sockets:
        greedy = [await open_sockets.enter_async_context(connect(server, "ada")) for _ in range(4)]
        other = await open_sockets.enter_async_context(connect(server, "eve", "user"))
        for socket in (*greedy, other):
            await receive(socket)
        for socket in (*greedy, other):
            await socket.send('{"op": "usage"}')
        frames_in = server.context.metrics.registry.get_sample_value
        async with asyncio.timeout(60):
            while (frames_in("inferencecenter_frames_in_total") or 0) < 5:  # noqa: ASYNC110 - steps of the loop
                await asyncio.sleep(0)
        go_on.set()
        for socket in (*greedy, other):
            assert (await receive(socket))["op"] == "usage"
    assert most == 1
    assert sorted(asked) == ["ada"] * 4 + ["eve"]
    assert asked.index("eve") <= 2

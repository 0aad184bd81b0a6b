"""Sessions that outlive their sockets, over real connections."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from inferencecenter.api.websocket.connection import Connection
from inferencecenter.server.outbox import Outbox
from inferencecenter.sessions.journal import StorageFault
from tests.server.harness import StubJournal, ask, close_code, receive

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    import pytest
    from websockets.asyncio.client import ClientConnection

    from inferencecenter.protocol.base import Event
    from tests.server.harness import Running

    Serve = Callable[..., AbstractAsyncContextManager[Running]]


async def begin(server: Running, socket: ClientConnection, *texts: str) -> tuple[dict[str, Any], str]:
    """Create a session with a turn that has produced text; return the creation event and the turn."""
    created = await ask(socket, op="create_session")
    turn = (await ask(socket, op="infer", session_id=created["session_id"], prompt="hi"))["turn_id"]
    server.engine.begin(turn)
    for text in texts:
        server.engine.say(turn, text)
        assert (await receive(socket))["content"] == text
    return created, turn


async def test_answer_continues_after_reconnect(server: Running) -> None:
    """Missed text arrives first as one event, then live events follow."""
    async with server.v1() as socket:
        await receive(socket)
        created, turn = await begin(server, socket, "a", "b")
        socket.transport.abort()
    await socket.wait_closed()
    server.engine.say(turn, "c")
    server.engine.say(turn, "d")
    async with server.v1() as again:
        await receive(again)
        position = {"session_id": created["session_id"], "epoch": created["epoch"], "last_seq": 3}
        resumed = await ask(again, op="resume_session", id="r", **position)
        assert (resumed["op"], resumed["id"], resumed["resumed"], resumed["seq"]) == ("session_resumed", "r", True, 5)
        token = await receive(again)
        assert (token["op"], token["seq"], token["content"]) == ("token", 5, "cd")
        server.engine.finish(turn)
        assert (await receive(again))["op"] == "end"


async def test_resume_moves_the_session_to_the_new_socket(server: Running) -> None:
    """The previous socket is notified and stays usable for its other sessions."""
    async with server.v1() as first, server.v1() as second:
        await receive(first)
        await receive(second)
        created, turn = await begin(server, first, "a")
        resumed = await ask(second, op="resume_session", session_id=created["session_id"])
        assert (resumed["resumed"], resumed["reason"], resumed["content"]) == (False, "no_position", "a")
        assert [message["content"] for message in resumed["transcript"]] == ["hi"]
        detached = await receive(first)
        assert (detached["op"], detached["session_id"]) == ("session_detached", created["session_id"])
        server.engine.finish(turn)
        assert (await receive(second))["op"] == "end"
        assert (await ask(first, op="create_session"))["op"] == "session_created"


async def test_resuming_foreign_and_unknown_sessions_is_indistinguishable(server: Running) -> None:
    """The errors are equal byte for byte for any position."""
    server.accounts.ensure_client("eve", max_sessions=1, priority="normal")
    token = server.accounts.create_token("eve").token
    headers = {"Authorization": f"Bearer {token}"}
    async with (
        server.v1() as socket,
        server.connect(additional_headers=headers, subprotocols=["inferencecenter.v1"]) as eve,
    ):
        await receive(socket)
        await receive(eve)
        created, turn = await begin(server, socket, "a")
        for position in ({}, {"epoch": created["epoch"], "last_seq": 2}):
            answers = []
            for session_id in (created["session_id"], "s_" + "A" * 22):
                frame = {"op": "resume_session", "id": "r", "session_id": session_id, **position}
                await eve.send(json.dumps(frame))
                answers.append(await eve.recv())
            assert answers[0] == answers[1]
            assert "session_not_found" in str(answers[0])
        server.engine.say(turn, "b")
        assert (await receive(socket))["content"] == "b"


async def test_sessions_of_legacy_sockets_end_with_them(server: Running) -> None:
    """Sessions created with ``on_disconnect`` detach stay."""
    async with server.connect() as old:
        await receive(old)
        await ask(old, op="auth", client_id="desk", api_key="desk-key")
        closing = (await ask(old, op="create_session"))["session_id"]
        staying = (await ask(old, op="create_session", on_disconnect="detach"))["session_id"]
    await old.wait_closed()
    assert set(server.context.sessions.session_ids()) == {staying}
    assert closing != staying


async def test_session_events_wait_for_the_store(serve: Serve) -> None:
    """A ping is answered at once; session events and answers follow when they are durable."""
    journal = StubJournal()
    async with serve(journal=journal) as server, server.v1() as socket:
        await receive(socket)
        journal.holding = True
        await socket.send(json.dumps({"op": "create_session", "id": "c"}))
        assert (await ask(socket, op="ping"))["op"] == "pong"
        not_stored = await ask(socket, op="create_session", store=False)
        assert not_stored["op"] == "session_created"
        (session_id,) = set(server.context.sessions.session_ids()) - {not_stored["session_id"]}
        await socket.send(json.dumps({"op": "infer", "session_id": session_id, "prompt": "hi"}))
        await socket.send(json.dumps({"op": "get_session", "session_id": session_id}))
        assert (await ask(socket, op="ping"))["op"] == "pong"
        journal.run_callbacks()
        assert [(await receive(socket))["op"] for _ in range(3)] == ["session_created", "queued", "session"]


async def test_store_failure_is_reported_without_details(serve: Serve) -> None:
    """All clients learn the state, operators and refused clients the reason; unstored sessions keep working."""
    journal = StubJournal()
    async with serve(journal=journal) as server, server.v1() as socket, server.connect() as stranger:
        await receive(socket)
        assert (await receive(stranger))["status"] == "ready"
        session_id = (await ask(socket, op="create_session"))["session_id"]
        journal.fault = StorageFault("the secret disk is full")
        hello = await ask(stranger, op="hello")
        assert hello["status"] == "degraded"
        assert "cannot be written" in hello["message"]
        assert "secret" not in json.dumps(hello)
        assert (await ask(socket, op="status", type="sessions"))["values"]["storage"] == "unavailable"
        for frame in (
            {"op": "create_session"},
            {"op": "infer", "session_id": session_id, "prompt": "hi"},
            {"op": "append", "session_id": session_id, "messages": [{"role": "user", "content": "x"}]},
            {"op": "fork_session", "session_id": session_id},
            {"op": "rewind_session", "session_id": session_id, "turn": "start"},
        ):
            error = await ask(socket, id="e", **frame)
            assert (error["code"], error["message"], error["id"]) == ("storage_unavailable", journal.fault.message, "e")
            assert error["hint"]
            assert error["retryable"]
        assert (await ask(socket, op="create_session", store=False))["op"] == "session_created"
        async with server.connect() as desk:
            await receive(desk)
            await ask(desk, op="auth", client_id="desk", api_key="desk-key", protocol=1)
            status = await ask(desk, op="status", type="sessions")
            assert status["values"]["storage"] == journal.fault.message


async def test_store_failure_is_broadcast(serve: Serve) -> None:
    """The event has the reason and the retry delay; sockets of the first protocol receive none."""
    async with serve(journal=StubJournal()) as server, server.v1() as socket, server.connect() as old:
        await receive(socket)
        await receive(old)
        await ask(old, op="auth", client_id="kitchen", api_key="kitchen-key")
        server.context.storage_changed(StorageFault("the disk is full", 1000))
        server.context.storage_changed(None)
        frames = [await receive(socket) for _ in range(2)]
        assert frames == [
            {"op": "storage", "state": "unavailable", "detail": "the disk is full", "retry_after_ms": 1000},
            {"op": "storage", "state": "ok", "detail": ""},
        ]
        assert (await ask(old, op="hello"))["op"] == "hello"


async def test_shutdown_notice_reports_resumability(serve: Serve) -> None:
    """Sessions can be resumed after the restart if they are stored."""
    for journal, resumable in ((StubJournal(), True), (None, False)):
        async with serve(journal=journal) as server, server.v1() as socket:
            await receive(socket)
            server.listener.stop()
            assert (await receive(socket))["resume"] is resumable
            assert await close_code(socket) == 1012


async def test_drain_waits_for_the_resumed_socket(serve: Serve) -> None:
    """The socket that resumed the turn receives its end; the previous one closes at once."""
    async with serve(shutdown_timeout_s=60) as server, server.v1() as first, server.v1() as second:
        await receive(first)
        await receive(second)
        created, turn = await begin(server, first, "a")
        await ask(second, op="resume_session", session_id=created["session_id"])
        server.listener.stop()
        assert await close_code(first) == 1012
        assert (await receive(second))["op"] == "going_away"
        server.engine.finish(turn)
        assert (await receive(second))["op"] == "end"
        assert await close_code(second) == 1012


async def test_resume_is_allowed_during_drain(serve: Serve) -> None:
    """Resuming starts no work; a new turn is refused."""
    async with serve(shutdown_timeout_s=60) as server, server.v1() as socket:
        await receive(socket)
        created, turn = await begin(server, socket, "a")
        server.listener.stop()
        assert (await receive(socket))["op"] == "going_away"
        position = {"session_id": created["session_id"], "epoch": created["epoch"], "last_seq": 2}
        assert (await ask(socket, op="resume_session", **position))["resumed"]
        refused = await ask(socket, op="infer", session_id=created["session_id"], prompt="hi")
        assert refused["code"] == "engine_unavailable"
        server.engine.finish(turn)
        assert (await receive(socket))["op"] == "end"
        assert await close_code(socket) == 1012


async def test_large_sessions_are_replayed_in_sequence(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that resumes more than its queue holds receives all of it and keeps its socket."""
    at_once: list[int] = []
    replay = Outbox.replay

    def counted(self: Outbox, missed: Sequence[Event]) -> None:
        at_once.append(self._n_replayed)
        replay(self, missed)

    monkeypatch.setattr(Outbox, "replay", counted)
    async with serve(outbox_bytes=2**14) as server, server.v1(max_size=None) as socket:
        await receive(socket)
        names = [(await ask(socket, op="create_session", system="x" * 400_000))["session_id"] for _ in range(8)]
        for name in names:
            await socket.send(json.dumps({"op": "resume_session", "session_id": name}))
            await socket.send(json.dumps({"op": "get_session", "session_id": name}))
        for name in names:
            resumed, read = await receive(socket), await receive(socket)
            assert (resumed["op"], resumed["session_id"], len(resumed["transcript"])) == ("session_resumed", name, 1)
            assert (read["op"], read["session_id"]) == ("session", name)
        assert (await ask(socket, op="ping"))["op"] == "pong"
    assert at_once == [0] * 16


async def test_socket_lost_during_replay_is_cleaned_up(serve: Serve) -> None:
    """The wait for the peer ends with the connection."""
    async with serve(outbox_bytes=2**14) as server:
        socket = await server.v1(max_size=None, max_queue=1)
        await receive(socket)
        name = (await ask(socket, op="create_session", system="x" * 900_000))["session_id"]
        for _ in range(30):
            await socket.send(json.dumps({"op": "get_session", "session_id": name}))
        (connection,) = server.context.hub._connections
        assert isinstance(connection, Connection)
        async with asyncio.timeout(60):
            while not connection._outbox.replay_pending:  # noqa: ASYNC110 - what a peer does not read sets no event
                await asyncio.sleep(0)
            socket.transport.abort()
            while len(server.context.hub):  # noqa: ASYNC110 - neither does a lost socket
                await asyncio.sleep(0)

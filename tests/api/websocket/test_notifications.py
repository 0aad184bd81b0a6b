"""Notifications to a client's sockets about sessions attached elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.server.harness import ask, receive

if TYPE_CHECKING:
    from tests.server.harness import Running


async def test_closed_session_is_sent_to_all_v1_sockets_of_the_client(server: Running) -> None:
    """Sockets of the first protocol and of other clients receive nothing."""
    old = server.connect(additional_headers={"Authorization": f"Bearer {server.token}"})
    other = server.connect(additional_headers={"X-Client-ID": "desk", "X-API-Key": "desk-key"})
    async with server.v1() as having, server.v1() as closing, server.v1() as third, old as plain, other as stranger:
        for socket in (having, closing, third, plain, stranger):
            await receive(socket)
        await ask(stranger, op="hello", protocol=1)
        sid = (await ask(having, op="create_session"))["session_id"]
        closed = {"op": "session_closed", "session_id": sid}
        assert await ask(closing, op="close_session", id="c", session_id=sid) == {**closed, "id": "c"}
        assert await receive(having) == await receive(third) == closed
        for socket in (having, closing, third, stranger):
            assert (await ask(socket, op="ping"))["op"] == "pong"
        assert (await ask(plain, op="metrics"))["op"] == "metrics"


async def test_turn_end_precedes_session_closed(server: Running) -> None:
    """The attached socket receives the turn's end, then ``session_closed``, then errors."""
    async with server.v1() as having, server.v1() as closing:
        for socket in (having, closing):
            await receive(socket)
        sid = (await ask(having, op="create_session"))["session_id"]
        assert (await ask(having, op="infer", session_id=sid, prompt="Hi"))["op"] == "queued"
        await ask(closing, op="close_session", session_id=sid)
        frames = [await receive(having), await receive(having)]
        assert [each["op"] for each in frames] == ["end", "session_closed"]
        assert frames[0]["finish_reason"] == "aborted"
        assert (await ask(having, op="infer", session_id=sid, prompt="Hi"))["code"] == "session_not_found"


async def test_legacy_socket_is_notified_of_its_attached_session_only(server: Running) -> None:
    """It is notified when its session is purged, but not of other sessions of its client."""
    async with server.connect(additional_headers={"Authorization": f"Bearer {server.token}"}) as plain:
        await receive(plain)
        own = (await ask(plain, op="create_session"))["session_id"]
        async with server.v1() as socket:
            await receive(socket)
            sid = (await ask(socket, op="create_session"))["session_id"]
            server.context.sessions.purge("session", sid)
            server.context.sessions.purge("session", own)
            assert [(await receive(socket))["session_id"] for _ in range(2)] == [sid, own]
        assert (await receive(plain))["session_id"] == own


async def test_titled_session_is_announced_to_other_sockets(server: Running) -> None:
    """The creating socket receives only its answer."""
    async with server.v1() as opening, server.v1() as other:
        for socket in (opening, other):
            await receive(socket)
        sid = (await ask(opening, op="create_session", metadata={"title": "Ada"}))["session_id"]
        assert await receive(other) == {"op": "metadata_set", "session_id": sid, "metadata": {"title": "Ada"}}
        assert (await ask(opening, op="ping"))["op"] == "pong"

"""What sockets of a client hear of its sessions that others have, or have closed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.server.harness import ask, hear

if TYPE_CHECKING:
    from tests.server.harness import Running


async def test_all_sockets_of_a_client_hear_that_a_session_is_gone(server: Running) -> None:
    """As a second tab, whoever has the session; sockets of the first protocol and of other clients hear nothing."""
    old = server.connect(additional_headers={"Authorization": f"Bearer {server.token}"})
    other = server.connect(additional_headers={"X-Client-ID": "desk", "X-API-Key": "desk-key"})
    async with server.v1() as having, server.v1() as closing, server.v1() as third, old as plain, other as stranger:
        for socket in (having, closing, third, plain, stranger):
            await hear(socket)
        await ask(stranger, op="hello", protocol=1)
        sid = (await ask(having, op="create_session"))["session_id"]
        gone = {"op": "session_closed", "session_id": sid}
        assert await ask(closing, op="close_session", id="c", session_id=sid) == {**gone, "id": "c"}
        assert await hear(having) == await hear(third) == gone
        for socket in (having, closing, third, stranger):
            assert (await ask(socket, op="ping"))["op"] == "pong"
        assert (await ask(plain, op="metrics"))["op"] == "metrics"


async def test_a_running_turn_ends_before_its_session_is_gone(server: Running) -> None:
    """Whoever reads the answer hears its end, then that nothing follows, then refusals."""
    async with server.v1() as having, server.v1() as closing:
        for socket in (having, closing):
            await hear(socket)
        sid = (await ask(having, op="create_session"))["session_id"]
        assert (await ask(having, op="infer", session_id=sid, prompt="Hi"))["op"] == "queued"
        await ask(closing, op="close_session", session_id=sid)
        heard = [await hear(having), await hear(having)]
        assert [each["op"] for each in heard] == ["end", "session_closed"]
        assert heard[0]["finish_reason"] == "aborted"
        assert (await ask(having, op="infer", session_id=sid, prompt="Hi"))["code"] == "session_not_found"


async def test_a_socket_of_the_first_protocol_hears_of_the_session_that_it_has(server: Running) -> None:
    """It is purged under it; of its client's others it hears nothing."""
    async with server.connect(additional_headers={"Authorization": f"Bearer {server.token}"}) as plain:
        await hear(plain)
        own = (await ask(plain, op="create_session"))["session_id"]
        async with server.v1() as socket:
            await hear(socket)
            sid = (await ask(socket, op="create_session"))["session_id"]
            server.context.sessions.purge("session", sid)
            server.context.sessions.purge("session", own)
            assert [(await hear(socket))["session_id"] for _ in range(2)] == [sid, own]
        assert (await hear(plain))["session_id"] == own


async def test_other_sockets_hear_of_a_new_session_with_a_title(server: Running) -> None:
    """Whoever opened it is answered and told nothing else."""
    async with server.v1() as opening, server.v1() as other:
        for socket in (opening, other):
            await hear(socket)
        sid = (await ask(opening, op="create_session", metadata={"title": "Ada"}))["session_id"]
        assert await hear(other) == {"op": "metadata_set", "session_id": sid, "metadata": {"title": "Ada"}}
        assert (await ask(opening, op="ping"))["op"] == "pong"

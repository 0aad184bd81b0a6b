"""Responses over a WebSocket: lanes, cancelling, errors, and what becomes of responses whose socket is gone."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

import pytest
from websockets.exceptions import InvalidStatus

from inferencecenter.api.responses.response_events import ResponseEvent, ResponseEventBuilder
from inferencecenter.api.responses.streams import MAX_STREAMS, MAX_WAITING
from inferencecenter.auth.rate_limits import FREE_REFUSALS
from tests.api.asking import tick
from tests.api.responses import told
from tests.api.responses.serving import PATH, begun, get, hear, left, made, send, socket
from tests.server.harness import close_code

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from inferencecenter.protocol.base import Event
    from tests.server.harness import Running

    Serve = Callable[..., AbstractAsyncContextManager[Running]]

ENDS = ("response.completed", "response.incomplete", "response.failed", "error")


async def test_a_response_is_told_as_over_http(server: Running) -> None:
    """Every event is one that openai knows, and none names a lane that was not named."""
    async with socket(server) as connection:
        await send(connection, input="Hello")
        (turn,) = await begun(server)
        server.engine.say(turn, "Good day")
        server.engine.finish(turn)
        frames = [await hear(connection)]
        while frames[-1]["type"] not in ENDS:
            frames.append(await hear(connection))
    for frame in frames:
        told.event(frame)
        assert "stream_id" not in frame
    assert told.response(frames[-1]["response"]).output_text == "Good day"


async def test_lanes_go_on_at_once_and_each_in_order(server: Running) -> None:
    """What comes second in a lane begins when the first has ended, whatever the other lane does."""
    async with socket(server) as connection:
        for lane, text in (("a", "a1"), ("a", "a2"), ("b", "b1")):
            await send(connection, stream_id=lane, input=text)
        turns = await begun(server, 2)
        assert len(server.engine.turns) == 2
        server.engine.finish(turns[0])
        assert (await hear(connection, *ENDS))["stream_id"] == "a"
        later = await begun(server, 2)
        assert turns[1] in later
        for turn in later:
            server.engine.finish(turn)
        assert {(await hear(connection, *ENDS))["stream_id"] for _ in later} == {"a", "b"}


async def test_a_chain_goes_on_over_another_socket_and_http(server: Running) -> None:
    """What is stored is nobody's connection."""
    first = (await made(server, {"input": "Hello"})).json
    async with socket(server) as connection:
        await send(connection, input="More", previous_response_id=first["id"])
        (turn,) = await begun(server)
        server.engine.finish(turn)
        second = (await hear(connection, *ENDS))["response"]
    assert second["id"][:27] == first["id"][:27]
    assert (await get(server, second["id"])).json["previous_response_id"] == first["id"]


async def test_what_runs_in_a_lane_is_cancelled(server: Running) -> None:
    """It ends as cancelled with what it said; so does one that is named, and then nothing is left to cancel."""
    async with socket(server) as connection:
        await send(connection, input="Hello", stream_id="a")
        (turn,) = await begun(server)
        server.engine.say(turn, "Good")
        await send(connection, "response.cancel", stream_id="a")
        ended = await hear(connection, *ENDS)
        assert (ended["type"], ended["response"]["status"]) == ("response.incomplete", "cancelled")
        assert told.response(ended["response"]).output_text == "Good"
        await send(connection, input="Hello")
        name = (await hear(connection, "response.created"))["response"]["id"]
        await send(connection, "response.cancel", response_id=name)
        assert (await hear(connection, *ENDS))["response"]["status"] == "cancelled"
        await send(connection, "response.cancel")
        assert (await hear(connection))["error"]["code"] == "nothing_to_abort"
        await send(connection, "response.cancel", response_id="resp_" + "a" * 44)
        assert (await hear(connection))["error"]["param"] == "response_id"


@pytest.mark.parametrize(
    ("frame", "status", "code", "param"),
    [
        ({"type": "response.steer"}, 400, "invalid_request", "type"),
        ({"input": "x"}, 400, "invalid_request", "type"),
        ({"type": "response.create", "nonsense": 1, "stream_id": "a"}, 400, "invalid_request", "nonsense"),
        ({"type": "response.create"}, 400, "invalid_request", "input"),
        ({"type": "response.create", "input": "x", "background": True}, 400, "invalid_request", "background"),
        (
            {"type": "response.create", "input": "x", "previous_response_id": "resp_1", "stream_id": "a"},
            400,
            "previous_response_not_found",
            "previous_response_id",
        ),
        ({"type": "response.create", "input": "x", "model": "missing"}, 404, "model_not_found", "model"),
    ],
)
async def test_what_is_wrong_is_told_and_the_socket_goes_on(
    server: Running, frame: dict[str, Any], status: int, code: str, param: str
) -> None:
    """In the lane that the frame names."""
    async with socket(server) as connection:
        await connection.send(json.dumps(frame))
        error = await hear(connection)
        told.event(error)
        assert (error["type"], error["status"], error.get("stream_id")) == ("error", status, frame.get("stream_id"))
        assert (error["error"]["code"], error["error"]["param"]) == (code, param)
        await send(connection, input="Hello")
        server.engine.finish((await begun(server))[0])
        assert (await hear(connection, *ENDS))["type"] == "response.completed"


@pytest.mark.parametrize("frame", ["{", "[]", '"x"', "1", b"\x00"])
async def test_what_is_no_object_is_told(server: Running, frame: str | bytes) -> None:
    """Binary frames, too."""
    async with socket(server) as connection:
        await connection.send(frame)
        assert (await hear(connection))["status"] == 400


async def test_an_upgrade_needs_a_token(server: Running) -> None:
    """From the header or from the subprotocols, as browsers send it; pages of other origins are refused."""
    for options, status in (
        ({}, 401),
        ({"additional_headers": {"Authorization": "Bearer ic_x_y"}}, 401),
        ({"additional_headers": {"Authorization": f"Bearer {server.token}", "Origin": "https://evil.example"}}, 403),
    ):
        with pytest.raises(InvalidStatus) as refusal:
            async with server.connect(PATH, **options):
                pass
        response = refusal.value.response
        assert response.status_code == status
        assert response.body is not None
        assert set(json.loads(response.body)["error"]) == {"message", "type", "param", "code"}
    offered = ["inferencecenter.v1", f"token.{server.token}"]
    async with server.connect(PATH, subprotocols=offered) as connection:
        assert connection.subprotocol == "inferencecenter.v1"


async def test_a_client_has_so_many_sockets(serve: Serve) -> None:
    """Another one is refused with the code that programs wait and try again for."""
    async with serve(max_connections_per_client=1) as server, socket(server):
        with pytest.raises(InvalidStatus) as refusal:
            async with socket(server):
                pass
        response = refusal.value.response
        assert (response.status_code, response.headers["Retry-After"]) == (429, "1")
        assert response.body is not None
        assert json.loads(response.body)["error"]["code"] == "websocket_connection_limit_reached"


async def test_a_socket_has_so_many_lanes_and_so_many_wait(server: Running) -> None:
    """What is beyond is refused, and what runs goes on."""
    server.accounts.ensure_client("crowd", max_sessions=100, priority="normal")
    token = server.accounts.create_token("crowd", name="test").token
    async with socket(server, token=token) as connection:
        for lane in range(MAX_STREAMS):
            await send(connection, input="x", stream_id=f"{lane}")
        await begun(server, MAX_STREAMS)
        await send(connection, input="x", stream_id="one more")
        refused = await hear(connection, "error")
        assert (refused["status"], refused["error"]["code"]) == (429, "websocket_stream_limit_reached")
        for _ in range(MAX_WAITING + 1):
            await send(connection, input="x", stream_id="0")
        assert (await hear(connection, "error"))["error"]["code"] == "websocket_stream_limit_reached"
        assert len(server.engine.turns) == MAX_STREAMS


async def test_what_is_stored_goes_on_without_its_socket(server: Running) -> None:
    """And is there for whoever asks; what is not ends with the socket, and what waited never begins."""
    async with socket(server) as connection:
        await send(connection, input="Hello", stream_id="kept")
        name = (await hear(connection, "response.created"))["response"]["id"]
        await send(connection, input="Later", stream_id="kept")
        await send(connection, input="Hello", stream_id="lost", store=False)
        kept, _ = await begun(server, 2)
    await left(server, 1)
    server.engine.say(kept, "Good day")
    server.engine.finish(kept)
    await tick(3)
    assert server.engine.turns == {}
    found = told.response((await get(server, name)).json)
    assert (found.status, found.output_text) == ("completed", "Good day")


async def test_a_session_belongs_to_nobody_when_its_response_has_ended(server: Running) -> None:
    """A client that has as many sessions as it may have gets another: the oldest makes room."""
    async with socket(server) as connection:
        for _ in range(10):
            await send(connection, input="Hello")
            server.engine.finish((await begun(server))[0])
            assert (await hear(connection, *ENDS))["type"] == "response.completed"
    assert server.context.sessions.session_counts("ada") == (8, 0)


async def test_without_generate_all_is_read_and_nothing_told(server: Running) -> None:
    """The response is complete and empty, and what goes on from it begins with what was read."""
    async with socket(server) as connection:
        await send(connection, input="Hello", instructions="Be kind.", generate=False)
        (turn,) = await begun(server)
        assert b'"max_tokens":1' in server.engine.turns[turn].submission().params_json
        server.engine.say(turn, "unheard")
        server.engine.finish(turn, reason="length")
        warm = (await hear(connection, *ENDS))["response"]
        assert (warm["status"], warm["output"]) == ("completed", [])
        assert (await get(server, warm["id"])).json["output"] == []
        await send(connection, input="More", instructions="Be kind.", previous_response_id=warm["id"])
        (turn,) = await begun(server)
        read = "".join(piece.text for piece in server.engine.turns[turn].submission().pieces)
        assert [part in read for part in ("Be kind.", "Hello", "More", "unheard")] == [True, True, True, False]
        server.engine.finish(turn)
        assert (await hear(connection, *ENDS))["response"]["status"] == "completed"


async def test_what_only_has_instructions_is_read_too(server: Running) -> None:
    """There is no question to answer yet, and none is left behind."""
    async with socket(server) as connection:
        await send(connection, instructions="Be kind.", generate=False, store=False)
        server.engine.finish((await begun(server))[0], reason="length")
        warm = (await hear(connection, *ENDS))["response"]
        await send(connection, input="Hello", instructions="Be kind.", store=False, previous_response_id=warm["id"])
        (turn,) = await begun(server)
        server.engine.finish(turn)
        name = (await hear(connection, *ENDS))["response"]["id"]
    items = (await get(server, name, "/input_items")).json["data"]
    assert [item["content"][0]["text"] for item in items] == ["Hello"]


async def test_a_daemon_that_stops_lets_responses_end(serve: Serve) -> None:
    """What waits is refused, what runs has its time, and the socket closes with 1012 after it."""
    async with serve(shutdown_timeout_s=30) as server, socket(server) as connection:
        await send(connection, input="Hello", stream_id="a")
        (turn,) = await begun(server)
        await send(connection, input="Later", stream_id="a")
        await send(connection, "response.cancel", stream_id="b")
        assert (await hear(connection, "error"))["error"]["code"] == "nothing_to_abort"
        draining = asyncio.get_running_loop().create_task(server.context.drain())
        assert (await hear(connection, "error"))["error"]["code"] == "engine_unavailable"
        await send(connection, input="No more", stream_id="b")
        assert (await hear(connection, "error"))["stream_id"] == "b"
        server.engine.finish(turn)
        assert (await hear(connection, *ENDS))["type"] == "response.completed"
        assert await close_code(connection) == 1012
        await draining


async def test_at_the_deadline_the_socket_closes_whatever_runs(serve: Serve) -> None:
    """The response goes on with the next daemon."""
    async with serve(shutdown_timeout_s=0) as server, socket(server) as connection:
        await send(connection, input="Hello")
        await begun(server)
        await server.context.drain()
        assert await close_code(connection) == 1012
        assert len(server.engine.turns) == 1


async def test_a_token_that_is_revoked_closes_its_sockets(server: Running) -> None:
    """With the code that says so."""
    async with socket(server) as connection:
        await send(connection, "response.cancel")
        await hear(connection)
        server.accounts.revoke(server.token_id)
        server.context.tokens_changed()
        assert await close_code(connection) == 4401


async def test_a_token_that_expires_closes_its_sockets(server: Running, expiries: list[Callable[[], object]]) -> None:
    """At its time, without anybody asking; what is stored goes on."""
    token = server.accounts.create_token("ada", expires_at=time.time() + 3600).token
    async with socket(server, token=token) as connection:
        await send(connection, input="Hello")
        (turn,) = await begun(server)
        (expire,) = expiries
        expire()
        assert await close_code(connection) == 4401
    assert expiries == []
    assert turn in server.engine.turns


async def test_a_reader_that_stops_loses_its_socket(serve: Serve) -> None:
    """What is stored goes on; nobody else notices."""
    async with serve(outbox_bytes=2**14) as server:
        connection = await socket(server, max_queue=1)
        try:
            await send(connection, input="Hello")
            (turn,) = await begun(server)
            name = (await hear(connection, "response.created"))["response"]["id"]
            async with asyncio.timeout(60):
                while server.context.metrics.outbox_overflows.value == 0:
                    server.engine.say(turn, "x" * 4096)
                    await asyncio.sleep(0)
        finally:
            connection.transport.abort()
        server.engine.finish(turn)
        await tick(3)
        assert (await get(server, name)).json["status"] == "completed"


@pytest.mark.parametrize("where", ["prepare_turn", "start_turn", "ResponseEventBuilder"])
async def test_a_defect_ends_one_response_and_not_the_socket(
    server: Running, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """It is told as an error of its lane; the other lane's response goes on, and what waits in the same lane begins."""
    async with socket(server) as connection:
        await send(connection, input="Hello", stream_id="b")
        (other,) = await begun(server)
        with monkeypatch.context() as broken:
            broken.setattr(f"inferencecenter.api.responses.socket.{where}", fail_unexpectedly)
            await send(connection, input="Hello", stream_id="a")
            error = await hear(connection, "error")
        assert (error["stream_id"], error["status"], error["error"]["code"]) == ("a", 500, "internal")
        await send(connection, input="Again", stream_id="a")
        for turn in await begun(server, 2):
            server.engine.finish(turn)
        ended = [await hear(connection, *ENDS) for _ in range(2)]
        assert {(each["type"], each["stream_id"]) for each in ended} == {
            ("response.completed", "a"),
            ("response.completed", "b"),
        }
        assert other not in server.engine.turns


async def test_a_response_that_cannot_be_told_ends_with_an_error(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its turn is ended unless it may be asked for later, and the lane goes on with what waits in it."""
    async with socket(server) as connection:
        await send(connection, input="Hello", stream_id="a", store=False)
        await send(connection, input="Again", stream_id="a")
        (turn,) = await begun(server)
        await hear(connection, "response.created")
        feed = ResponseEventBuilder.feed

        def failing_once(builder: ResponseEventBuilder, event: Event) -> list[ResponseEvent]:
            monkeypatch.setattr(ResponseEventBuilder, "feed", feed)
            raise RuntimeError

        monkeypatch.setattr(ResponseEventBuilder, "feed", failing_once)
        server.engine.say(turn, "Good day")
        error = await hear(connection, "error")
        assert (error["stream_id"], error["error"]["code"]) == ("a", "internal")
        async with asyncio.timeout(60):
            while turn in server.engine.turns or not server.engine.turns:
                await tick()
        for later in await begun(server):
            server.engine.finish(later)
        assert (await hear(connection, *ENDS))["type"] == "response.completed"


async def test_a_frame_of_too_many_values_is_refused(server: Running) -> None:
    """In no lane, as it is not read; the socket goes on."""
    async with socket(server) as connection:
        await connection.send('{"type":"response.create","input":[' + "[]," * 250_000 + "0]}")
        error = await hear(connection)
        assert (error["status"], error["error"]["code"]) == (413, "message_too_large")
        await send(connection, input="x" * 100_000)
        server.engine.finish((await begun(server))[0])
        assert (await hear(connection, *ENDS))["type"] == "response.completed"


def fail_unexpectedly(*_: object, **__: object) -> Any:
    """Fail as a defect does."""
    raise RuntimeError


async def test_a_socket_is_read_later_after_many_refusals(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each refusal after the first ones has the next frame wait longer; they count with those over HTTP."""
    waited: list[float] = []

    async def noting(delay_s: float) -> None:
        waited.append(delay_s)

    monkeypatch.setattr("inferencecenter.api.responses.socket.sleep", noting)
    async with socket(server) as connection:
        for _ in range(FREE_REFUSALS + 3):
            await connection.send("{")
            assert (await hear(connection))["status"] == 400
        await connection.send("{")
        await hear(connection)
    assert len(waited) >= 3
    assert waited == sorted(set(waited))

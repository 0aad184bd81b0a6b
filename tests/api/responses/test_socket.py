"""Responses over a WebSocket: streams, cancellation, errors, and responses that outlive their socket."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from websockets.exceptions import InvalidStatus

from inferencecenter.api import request_context
from inferencecenter.api.body import checked
from inferencecenter.api.responses.response_events import ResponseEvent, ResponseEventBuilder
from inferencecenter.api.responses.socket import MAX_STREAMS, MAX_WAITING
from inferencecenter.auth.rate_limits import FREE_REFUSALS
from inferencecenter.server.connection import SocketConnection
from tests.api.http_client import tick
from tests.api.responses import openai_types
from tests.api.responses.helpers import PATH, begin_turns, create_response, get, receive, send, socket, wait_turns_left
from tests.server.harness import close_code

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from inferencecenter.protocol.base import Event
    from tests.server.harness import Running

    Serve = Callable[..., AbstractAsyncContextManager[Running]]

ENDS = ("response.completed", "response.incomplete", "response.failed", "error")


async def test_socket_events_equal_http_events(server: Running) -> None:
    """The openai package parses every event, and none has a stream id that the request did not give."""
    async with socket(server) as connection:
        await send(connection, input="Hello")
        (turn,) = await begin_turns(server)
        server.engine.say(turn, "Good day")
        server.engine.finish(turn)
        frames = [await receive(connection)]
        while frames[-1]["type"] not in ENDS:
            frames.append(await receive(connection))
    for frame in frames:
        openai_types.event(frame)
        assert "stream_id" not in frame
    assert openai_types.response(frames[-1]["response"]).output_text == "Good day"


async def test_frame_of_many_items_is_validated_off_the_event_loop(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,900 short messages have less than 64 Ki characters, and take ten times as long as a long text."""
    threads: list[int] = []

    def record(kind: Any, value: object, **options: Any) -> Any:
        threads.append(threading.get_ident())
        return checked(kind, value, **options)

    monkeypatch.setattr("inferencecenter.api.responses.socket.checked", record)
    async with socket(server) as connection:
        for items in ([{"role": "user", "content": "a"}], [{"role": "unknown", "content": "a"}] * 300):
            await send(connection, input=items)
            await asyncio.sleep(0)
        await begin_turns(server)
        assert (await receive(connection, *ENDS))["type"] == "error"
    assert len(threads) == 2
    assert threads[0] == threading.get_ident() != threads[1]


async def test_streams_run_concurrently_and_each_in_order(server: Running) -> None:
    """The second response of a stream begins when the first has ended, independently of other streams."""
    async with socket(server) as connection:
        for stream_id, text in (("a", "a1"), ("a", "a2"), ("b", "b1")):
            await send(connection, stream_id=stream_id, input=text)
        turns = await begin_turns(server, 2)
        assert len(server.engine.turns) == 2
        server.engine.finish(turns[0])
        assert (await receive(connection, *ENDS))["stream_id"] == "a"
        later = await begin_turns(server, 2)
        assert turns[1] in later
        for turn in later:
            server.engine.finish(turn)
        assert {(await receive(connection, *ENDS))["stream_id"] for _ in later} == {"a", "b"}


async def test_chain_continues_over_another_socket_and_http(server: Running) -> None:
    """Stored responses are not bound to a connection."""
    first = (await create_response(server, {"input": "Hello"})).json
    async with socket(server) as connection:
        await send(connection, input="More", previous_response_id=first["id"])
        (turn,) = await begin_turns(server)
        server.engine.finish(turn)
        second = (await receive(connection, *ENDS))["response"]
    assert second["id"][:27] == first["id"][:27]
    assert (await get(server, second["id"])).json["previous_response_id"] == first["id"]


async def test_running_response_is_cancelled(server: Running) -> None:
    """The stream or the response id names it; it ends as cancelled with its text, and can be cancelled only once."""
    async with socket(server) as connection:
        await send(connection, input="Hello", stream_id="a")
        (turn,) = await begin_turns(server)
        server.engine.say(turn, "Good")
        await send(connection, "response.cancel", stream_id="a")
        ended = await receive(connection, *ENDS)
        assert (ended["type"], ended["response"]["status"]) == ("response.incomplete", "cancelled")
        assert openai_types.response(ended["response"]).output_text == "Good"
        await send(connection, input="Hello")
        name = (await receive(connection, "response.created"))["response"]["id"]
        await send(connection, "response.cancel", response_id=name)
        assert (await receive(connection, *ENDS))["response"]["status"] == "cancelled"
        await send(connection, "response.cancel")
        assert (await receive(connection))["error"]["code"] == "nothing_to_abort"
        await send(connection, "response.cancel", response_id="resp_" + "a" * 44)
        assert (await receive(connection))["error"]["param"] == "response_id"


@pytest.mark.parametrize(
    ("frame", "status", "code", "param"),
    [
        ({"type": "response.steer"}, 400, "invalid_request", "type"),
        ({"input": "x"}, 400, "invalid_request", "type"),
        ({"type": "response.create", "conversation": "c", "stream_id": "a"}, 400, "invalid_request", "conversation"),
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
async def test_invalid_frame_is_answered_and_the_socket_stays_open(
    server: Running, frame: dict[str, Any], status: int, code: str, param: str
) -> None:
    """The error has the frame's stream id."""
    async with socket(server) as connection:
        await connection.send(json.dumps(frame))
        error = await receive(connection)
        openai_types.event(error)
        assert (error["type"], error["status"], error.get("stream_id")) == ("error", status, frame.get("stream_id"))
        assert (error["error"]["code"], error["error"]["param"]) == (code, param)
        await send(connection, input="Hello")
        server.engine.finish((await begin_turns(server))[0])
        assert (await receive(connection, *ENDS))["type"] == "response.completed"


@pytest.mark.parametrize("frame", ["{", "[]", '"x"', "1", b"\x00"])
async def test_frame_without_an_object_is_answered(server: Running, frame: str | bytes) -> None:
    """A binary frame is answered, too."""
    async with socket(server) as connection:
        await connection.send(frame)
        assert (await receive(connection))["status"] == 400


async def test_upgrade_requires_a_token(server: Running) -> None:
    """Browsers send it as a subprotocol, others as a header; other origins are refused."""
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


async def test_sockets_per_client_are_limited(serve: Serve) -> None:
    """A further one is refused with the close code on which programs wait and retry."""
    async with serve(max_connections_per_client=1) as server, socket(server):
        with pytest.raises(InvalidStatus) as refusal:
            async with socket(server):
                pass
        response = refusal.value.response
        assert (response.status_code, response.headers["Retry-After"]) == (429, "1")
        assert response.body is not None
        assert json.loads(response.body)["error"]["code"] == "websocket_connection_limit_reached"


async def test_streams_and_queue_of_a_socket_are_limited(server: Running) -> None:
    """Requests beyond the limits are refused, and running ones continue."""
    server.accounts.ensure_client("crowd", max_sessions=100, priority="normal")
    token = server.accounts.create_token("crowd", name="test").token
    async with socket(server, token=token) as connection:
        for stream_id in range(MAX_STREAMS):
            await send(connection, input="x", stream_id=f"{stream_id}")
        await begin_turns(server, MAX_STREAMS)
        await send(connection, input="x", stream_id="one more")
        refused = await receive(connection, "error")
        assert (refused["status"], refused["error"]["code"]) == (429, "websocket_stream_limit_reached")
        for _ in range(MAX_WAITING + 1):
            await send(connection, input="x", stream_id="0")
        assert (await receive(connection, "error"))["error"]["code"] == "websocket_stream_limit_reached"
        assert len(server.engine.turns) == MAX_STREAMS


async def test_stored_response_outlives_its_socket(server: Running) -> None:
    """Unstored responses end with the socket, and queued ones never begin."""
    async with socket(server) as connection:
        await send(connection, input="Hello", stream_id="kept")
        name = (await receive(connection, "response.created"))["response"]["id"]
        await send(connection, input="Later", stream_id="kept")
        await send(connection, input="Hello", stream_id="lost", store=False)
        stored, _ = await begin_turns(server, 2)
    await wait_turns_left(server, 1)
    server.engine.say(stored, "Good day")
    server.engine.finish(stored)
    await tick(3)
    assert server.engine.turns == {}
    found = openai_types.response((await get(server, name)).json)
    assert (found.status, found.output_text) == ("completed", "Good day")


async def test_session_of_an_ended_response_can_be_evicted(server: Running) -> None:
    """A client at its session limit gets another one, since the oldest idle session is evicted."""
    async with socket(server) as connection:
        for _ in range(10):
            await send(connection, input="Hello")
            server.engine.finish((await begin_turns(server))[0])
            assert (await receive(connection, *ENDS))["type"] == "response.completed"
    assert server.context.sessions.session_counts("ada") == (8, 0)


async def test_generate_false_prefills_without_output(server: Running) -> None:
    """The response is empty and complete, and its continuation reuses the prefilled prefix."""
    async with socket(server) as connection:
        await send(connection, input="Hello", instructions="Be kind.", generate=False)
        (turn,) = await begin_turns(server)
        assert b'"max_tokens":1' in server.engine.submission(turn).params_json
        server.engine.say(turn, "unheard")
        server.engine.finish(turn, reason="length")
        warm = (await receive(connection, *ENDS))["response"]
        assert (warm["status"], warm["output"]) == ("completed", [])
        assert (await get(server, warm["id"])).json["output"] == []
        await send(connection, input="More", instructions="Be kind.", previous_response_id=warm["id"])
        (turn,) = await begin_turns(server)
        read = "".join(piece.text for piece in server.engine.submission(turn).pieces)
        assert [part in read for part in ("Be kind.", "Hello", "More", "unheard")] == [True, True, True, False]
        server.engine.finish(turn)
        assert (await receive(connection, *ENDS))["response"]["status"] == "completed"


async def test_generate_false_with_only_instructions_prefills_them(server: Running) -> None:
    """No question exists yet, and no message is left behind."""
    async with socket(server) as connection:
        await send(connection, instructions="Be kind.", generate=False, store=False)
        server.engine.finish((await begin_turns(server))[0], reason="length")
        warm = (await receive(connection, *ENDS))["response"]
        await send(connection, input="Hello", instructions="Be kind.", previous_response_id=warm["id"])
        (turn,) = await begin_turns(server)
        server.engine.finish(turn)
        name = (await receive(connection, *ENDS))["response"]["id"]
    items = (await get(server, name, "/input_items")).json["data"]
    assert [item["content"][0]["text"] for item in items] == ["Hello"]


async def test_drain_lets_running_responses_finish(serve: Serve) -> None:
    """Queued ones are refused, running ones have their time, and the socket closes with 1012 afterwards."""
    async with serve(shutdown_timeout_s=30) as server, socket(server) as connection:
        await send(connection, input="Hello", stream_id="a")
        (turn,) = await begin_turns(server)
        await send(connection, input="Later", stream_id="a")
        await send(connection, "response.cancel", stream_id="b")
        assert (await receive(connection, "error"))["error"]["code"] == "nothing_to_abort"
        draining = asyncio.get_running_loop().create_task(server.context.drain())
        assert (await receive(connection, "error"))["error"]["code"] == "engine_unavailable"
        await send(connection, input="No more", stream_id="b")
        assert (await receive(connection, "error"))["stream_id"] == "b"
        server.engine.finish(turn)
        assert (await receive(connection, *ENDS))["type"] == "response.completed"
        assert await close_code(connection) == 1012
        await draining


async def test_drain_deadline_closes_the_socket(serve: Serve) -> None:
    """The response resumes in the next daemon."""
    async with serve(shutdown_timeout_s=0) as server, socket(server) as connection:
        await send(connection, input="Hello")
        await begin_turns(server)
        await server.context.drain()
        assert await close_code(connection) == 1012
        assert len(server.engine.turns) == 1


async def test_revoked_token_closes_its_sockets(server: Running) -> None:
    """The close code gives the reason."""
    async with socket(server) as connection:
        await send(connection, "response.cancel")
        await receive(connection)
        server.accounts.revoke(server.token_id)
        server.context.tokens_changed()
        assert await close_code(connection) == 4401


async def test_token_expiry_closes_its_sockets(server: Running, expiries: list[Callable[[], object]]) -> None:
    """The close comes at the expiry, without a further frame; stored responses continue."""
    token = server.accounts.create_token("ada", expires_at=time.time() + 3600).token
    async with socket(server, token=token) as connection:
        await send(connection, input="Hello")
        (turn,) = await begin_turns(server)
        (expire,) = expiries
        expire()
        assert await close_code(connection) == 4401
    assert expiries == []
    assert turn in server.engine.turns


async def test_stalled_reader_loses_its_socket(serve: Serve) -> None:
    """Stored responses and other clients are unaffected."""
    async with serve(outbox_bytes=2**14) as server:
        connection = await socket(server, max_queue=1)
        try:
            await send(connection, input="Hello")
            (turn,) = await begin_turns(server)
            name = (await receive(connection, "response.created"))["response"]["id"]
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
async def test_internal_error_ends_one_response_only(
    server: Running, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The error is reported in its stream; other streams and the stream's next response continue."""
    async with socket(server) as connection:
        await send(connection, input="Hello", stream_id="b")
        (other,) = await begin_turns(server)
        with monkeypatch.context() as broken:
            broken.setattr(f"inferencecenter.api.responses.socket.{where}", fail_unexpectedly)
            await send(connection, input="Hello", stream_id="a")
            error = await receive(connection, "error")
        assert (error["stream_id"], error["status"], error["error"]["code"]) == ("a", 500, "internal")
        await send(connection, input="Again", stream_id="a")
        for turn in await begin_turns(server, 2):
            server.engine.finish(turn)
        ended = [await receive(connection, *ENDS) for _ in range(2)]
        assert {(each["type"], each["stream_id"]) for each in ended} == {
            ("response.completed", "a"),
            ("response.completed", "b"),
        }
        assert other not in server.engine.turns


async def test_response_whose_events_cannot_be_built_ends_with_an_error(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its turn ends unless it is stored, and the stream's next response begins."""
    async with socket(server) as connection:
        await send(connection, input="Hello", stream_id="a", store=False)
        await send(connection, input="Again", stream_id="a")
        (turn,) = await begin_turns(server)
        await receive(connection, "response.created")
        feed = ResponseEventBuilder.feed

        def failing_once(builder: ResponseEventBuilder, event: Event) -> list[ResponseEvent]:
            monkeypatch.setattr(ResponseEventBuilder, "feed", feed)
            raise RuntimeError

        monkeypatch.setattr(ResponseEventBuilder, "feed", failing_once)
        server.engine.say(turn, "Good day")
        error = await receive(connection, "error")
        assert (error["stream_id"], error["error"]["code"]) == ("a", "internal")
        async with asyncio.timeout(60):
            while turn in server.engine.turns or not server.engine.turns:
                await tick()
        for later in await begin_turns(server):
            server.engine.finish(later)
        assert (await receive(connection, *ENDS))["type"] == "response.completed"


async def test_frame_of_too_many_values_is_refused(server: Running) -> None:
    """The error has no stream id, since the frame is not parsed; the socket stays open."""
    async with socket(server) as connection:
        await connection.send('{"type":"response.create","input":[' + "[]," * 250_000 + "0]}")
        error = await receive(connection)
        assert (error["status"], error["error"]["code"]) == (413, "message_too_large")
        await send(connection, input="x" * 100_000)
        server.engine.finish((await begin_turns(server))[0])
        assert (await receive(connection, *ENDS))["type"] == "response.completed"


def fail_unexpectedly(*_: object, **__: object) -> Any:
    """Raise as a defect does."""
    raise RuntimeError


@pytest.mark.parametrize("frame", ["{", '{"type": "response.create", "input": "x", "model": "missing"}'])
async def test_repeated_refusals_delay_reading(server: Running, monkeypatch: pytest.MonkeyPatch, frame: str) -> None:
    """Each refusal of a frame or of a response after the first ones delays the next frame longer."""
    waited: list[float] = []

    async def noting(_: SocketConnection[Any], delay_s: float) -> None:
        waited.append(delay_s)

    monkeypatch.setattr(SocketConnection, "_wait", noting)
    async with socket(server) as connection:
        for _ in range(FREE_REFUSALS + 3):
            await connection.send(frame)
            assert (await receive(connection))["type"] == "error"
        await connection.send(frame)
        await receive(connection)
    assert len(waited) >= 3
    assert waited == sorted(set(waited))


async def test_upgrades_beyond_the_operation_budget_are_delayed(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused upgrade counts as a connection while it is delayed, and no more afterwards."""
    waited: list[float] = []

    async with serve(operations_per_minute=1) as server:

        async def noting(delay_s: float) -> None:
            assert len(server.context.hub.participants_of("ada")) == 1
            waited.append(delay_s)

        monkeypatch.setattr(request_context, "sleep", noting)
        async with socket(server):
            pass
        for _ in range(FREE_REFUSALS + 3):
            with pytest.raises(InvalidStatus) as refusal:
                async with socket(server):
                    pass
            assert refusal.value.response.status_code == 429
        assert server.context.hub.participants_of("ada") == []
    assert len(waited) == 3
    assert waited == sorted(set(waited))

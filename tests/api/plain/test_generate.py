"""Tests of ``/v1/generate``."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from inferencecenter.core.errors import ErrorCode
from inferencecenter.ipc.messages import Failed
from tests.api.http_client import HttpResponse, post, request, tick

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from inferencecenter.ipc.messages import Submit
    from tests.server.harness import Running

    Serve = Callable[..., AbstractAsyncContextManager[Running]]


async def begin_turn(server: Running) -> str:
    """Begin the turn that reached the engine, and return its id."""
    await asyncio.wait_for(server.engine.submitted.wait(), 60)
    server.engine.submitted.clear()
    (turn,) = server.engine.turns
    server.engine.begin(turn)
    return turn


async def generate(
    server: Running, body: dict[str, Any], *texts: str, reason: str = "stop"
) -> tuple[HttpResponse, Submit]:
    """Send a request, have the engine answer it, and return the response and what was submitted to the engine."""
    pending = asyncio.get_running_loop().create_task(post(server, "/generate", body))
    turn = await begin_turn(server)
    submitted = server.engine.submission(turn)
    for text in texts:
        server.engine.say(turn, text)
    server.engine.finish(turn, reason=reason)
    return await pending, submitted


def text_of(submitted: Submit) -> str:
    """Return the text of the submitted prompt."""
    return "".join(piece.text for piece in submitted.pieces)


async def test_prompt_is_answered(server: Running) -> None:
    """The response has the whole text, the finish reason, usage and stats."""
    response, submitted = await generate(server, {"prompt": "Hello"}, "Good ", "day")
    assert response.status == 200
    assert response.headers["content-type"] == "application/json"
    answer = response.json
    assert (answer["text"], answer["finish_reason"]) == ("Good day", "stop")
    usage = {"prompt_tokens": 1, "cached_tokens": 0, "completion_tokens": 1, "reasoning_tokens": 0}
    assert answer["usage"] == usage
    assert answer["stats"]["tps"] == 4.0
    assert "Hello" in text_of(submitted)


async def test_stream_sends_each_piece_and_the_end(server: Running) -> None:
    """Each piece is an event, and the last has the finish reason."""
    response, _ = await generate(server, {"prompt": "Hello", "stream": True}, "Good ", "day", reason="length")
    *parts, last = response.events
    assert "".join(part["text"] for part in parts) == "Good day"
    assert (last["finish_reason"], "text" in last, last["usage"]["completion_tokens"]) == ("length", False, 1)


async def test_parameters_reach_the_engine(server: Running) -> None:
    """Top-level fields and ``params`` are merged, and raw text is passed unchanged."""
    body = {
        "prompt": "Once upon",
        "mode": "raw",
        "max_tokens": 5,
        "stop": "x",
        "seed": 7,
        "temperature": 0,
        "params": {"top_k": 3},
        "model": None,
        "regex": "a+",
    }
    _, submitted = await generate(server, body)
    assert text_of(submitted) == "Once upon"
    assert submitted.grammar is not None
    assert (submitted.grammar.kind, submitted.grammar.text) == ("regex", "a+")
    for texts in (b'"max_tokens":5', b'"seed":7', b'"top_k":3', b'"temperature":0', b'"stop":["x"]'):
        assert texts in submitted.params_json.replace(b"0.0", b"0"), texts


async def test_system_prompt_is_rendered_first_and_no_session_is_listed(server: Running) -> None:
    """The model reads the system prompt before the prompt, and no client sees a session of the call."""
    response, submitted = await generate(server, {"prompt": "Hello", "system": "Be brief."}, "Hi")
    assert response.status == 200
    assert text_of(submitted).index("Be brief.") < text_of(submitted).index("Hello")
    assert server.context.sessions.session_counts("ada") == (0, 0)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": "a", "promt": "b"}, "promt"),
        ({"prompt": "a", "mode": "loud"}, "mode"),
        ({"prompt": "a", "stream": 1}, "stream"),
        ({"prompt": "a", "temperature": 9}, "temperature"),
        ({"prompt": "a", "temperature": "1"}, "temperature"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 1e300}, "max_tokens"),
        ({"prompt": "a", "seed": -2}, "seed"),
        ({"prompt": "a", "seed": 2**64}, "seed"),
        ({"prompt": "a", "stop": ["x"] * 17}, "stop"),
        ({"prompt": "a", "stop": [""]}, "stop"),
        ({"prompt": "a", "params": {"temprature": 1}}, "params.temprature"),
        ({"prompt": "a", "params": {"seed": 1}, "seed": 1}, "seed"),
        ({"prompt": "a", "regex": "a", "grammar": "b"}, None),
        ({"prompt": "a", "model": "missing"}, "model"),
    ],
)
async def test_invalid_field_is_refused_by_name(server: Running, body: dict[str, Any], param: str | None) -> None:
    """Nothing reaches the engine, and the error names the field."""
    response = await post(server, "/generate", body)
    assert response.status == (404 if param == "model" else 400)
    assert param is None or (response.error["param"] or "").startswith(param)
    assert not server.engine.turns


@pytest.mark.parametrize("stream", [False, True])
async def test_failure_before_first_token_has_http_status(server: Running, stream: bool) -> None:
    """The error replaces the answer, streamed or not."""
    pending = asyncio.get_running_loop().create_task(post(server, "/generate", {"prompt": "a", "stream": stream}))
    turn = await begin_turn(server)
    server.engine.turns.pop(turn).on_engine_event(
        Failed(turn_id=turn, code=ErrorCode.QUEUE_TIMEOUT.value, message="too long")
    )
    response = await pending
    assert (response.status, response.error["code"], response.error["type"]) == (503, "queue_timeout", "server_error")
    assert response.headers["retry-after"] == "1"


async def test_failure_during_stream_is_the_last_event(server: Running) -> None:
    """Text sent before the failure is kept, and the error is the last event."""
    pending = asyncio.get_running_loop().create_task(post(server, "/generate", {"prompt": "a", "stream": True}))
    turn = await begin_turn(server)
    server.engine.say(turn, "Good")
    await tick(20)
    server.engine.turns.pop(turn).on_engine_event(
        Failed(turn_id=turn, code=ErrorCode.ENGINE_CRASHED.value, message="boom")
    )
    *parts, last = (await pending).events
    assert [part["text"] for part in parts] == ["Good"]
    assert last["error"]["code"] == "engine_crashed"


async def test_disconnect_aborts_the_turn(server: Running) -> None:
    """The turn is aborted when the client disconnects."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    body = b'{"prompt": "a", "stream": true}'
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.token}\r\nContent-Length: {len(body)}"
    writer.write(head.encode() + b"\r\n\r\n" + body)
    turn = await begin_turn(server)
    server.engine.say(turn, "Good")
    await reader.readuntil(b"Good")
    writer.close()
    async with asyncio.timeout(60):
        while server.engine.turns:
            await tick()


async def test_token_is_required(server: Running) -> None:
    """Without a valid token the body is not read, and the error does not repeat the token."""
    for token in (None, "ic_0123456789ab_secret"):
        response = await request(server, "POST", "/generate", body={"prompt": "a"}, token=token)
        assert (response.status, response.error["type"]) == (401, "authentication_error")
        assert response.headers["www-authenticate"] == "Bearer"
        assert b"secret" not in response.body

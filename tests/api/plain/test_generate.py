"""Tests of the plainest call."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from inferencecenter.core.errors import ErrorCode
from inferencecenter.ipc.messages import Failed
from tests.api.asking import Heard, post, request, tick

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from inferencecenter.ipc.messages import Submit
    from tests.server.harness import Running

    Serve = Callable[..., AbstractAsyncContextManager[Running]]


async def begun(server: Running) -> str:
    """Return the turn that has come to the engine."""
    await asyncio.wait_for(server.engine.submitted.wait(), 60)
    server.engine.submitted.clear()
    (turn,) = server.engine.turns
    server.engine.begin(turn)
    return turn


async def answered(server: Running, body: dict[str, Any], *said: str, reason: str = "stop") -> tuple[Heard, Submit]:
    """Ask, have the engine answer, and return the answer and what the engine was asked."""
    asking = asyncio.get_running_loop().create_task(post(server, "/generate", body))
    turn = await begun(server)
    submitted = server.engine.turns[turn].submission()
    for text in said:
        server.engine.say(turn, text)
    server.engine.finish(turn, reason=reason)
    return await asking, submitted


def text_of(submitted: Submit) -> str:
    """Return what the engine was given to read."""
    return "".join(piece.text for piece in submitted.pieces)


async def test_a_prompt_is_answered(server: Running) -> None:
    """The text is whole, with why it ended, its tokens and how it went."""
    heard, submitted = await answered(server, {"prompt": "Hello"}, "Good ", "day")
    assert heard.status == 200
    assert heard.headers["content-type"] == "application/json"
    answer = heard.json
    assert (answer["text"], answer["finish_reason"]) == ("Good day", "stop")
    usage = {"prompt_tokens": 1, "cached_tokens": 0, "completion_tokens": 1, "reasoning_tokens": 0}
    assert answer["usage"] == usage
    assert answer["stats"]["tps"] == 4.0
    assert "Hello" in text_of(submitted)


async def test_it_streams(server: Running) -> None:
    """Each piece is an event, and the last says why the answer is over."""
    heard, _ = await answered(server, {"prompt": "Hello", "stream": True}, "Good ", "day", reason="length")
    *parts, last = heard.events
    assert "".join(part["text"] for part in parts) == "Good day"
    assert (last["finish_reason"], "text" in last, last["usage"]["completion_tokens"]) == ("length", False, 1)


async def test_what_is_asked_for_is_what_the_engine_gets(server: Running) -> None:
    """Shorts and params are one set of parameters; raw text goes as it is."""
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
    _, submitted = await answered(server, body)
    assert text_of(submitted) == "Once upon"
    assert submitted.grammar is not None
    assert (submitted.grammar.kind, submitted.grammar.text) == ("regex", "a+")
    for said in (b'"max_tokens":5', b'"seed":7', b'"top_k":3', b'"temperature":0', b'"stop":["x"]'):
        assert said in submitted.params_json.replace(b"0.0", b"0"), said


async def test_a_system_prompt_comes_first_and_no_session_is_left_to_see(server: Running) -> None:
    """The model reads it before the prompt; what is kept of the call is nobody's session."""
    heard, submitted = await answered(server, {"prompt": "Hello", "system": "Be brief."}, "Hi")
    assert heard.status == 200
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
async def test_what_cannot_be_obeyed_is_refused_by_name(
    server: Running, body: dict[str, Any], param: str | None
) -> None:
    """Nothing reaches the engine, and the field is named."""
    heard = await post(server, "/generate", body)
    assert heard.status == (404 if param == "model" else 400)
    assert param is None or (heard.error["param"] or "").startswith(param)
    assert not server.engine.turns


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_that_fails_before_it_says_anything_has_its_status(server: Running, stream: bool) -> None:
    """The error comes in place of the answer, streamed or not."""
    asking = asyncio.get_running_loop().create_task(post(server, "/generate", {"prompt": "a", "stream": stream}))
    turn = await begun(server)
    server.engine.turns.pop(turn).on_engine_event(
        Failed(turn_id=turn, code=ErrorCode.QUEUE_TIMEOUT.value, message="too long")
    )
    heard = await asking
    assert (heard.status, heard.error["code"], heard.error["type"]) == (503, "queue_timeout", "server_error")
    assert heard.headers["retry-after"] == "1"


async def test_a_turn_that_fails_halfway_ends_its_stream_with_the_error(server: Running) -> None:
    """What was said stays said; the last event is the error."""
    asking = asyncio.get_running_loop().create_task(post(server, "/generate", {"prompt": "a", "stream": True}))
    turn = await begun(server)
    server.engine.say(turn, "Good")
    await tick(20)
    server.engine.turns.pop(turn).on_engine_event(
        Failed(turn_id=turn, code=ErrorCode.ENGINE_CRASHED.value, message="boom")
    )
    *parts, last = (await asking).events
    assert [part["text"] for part in parts] == ["Good"]
    assert last["error"]["code"] == "engine_crashed"


async def test_nobody_answers_who_has_hung_up(server: Running) -> None:
    """When the peer goes its turn is aborted."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    body = b'{"prompt": "a", "stream": true}'
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.token}\r\nContent-Length: {len(body)}"
    writer.write(head.encode() + b"\r\n\r\n" + body)
    turn = await begun(server)
    server.engine.say(turn, "Good")
    await reader.readuntil(b"Good")
    writer.close()
    async with asyncio.timeout(60):
        while server.engine.turns:
            await tick()


async def test_it_takes_a_token(server: Running) -> None:
    """Without one, or with a wrong one, nothing is read of the request; the error does not repeat it."""
    for token in (None, "ic_0123456789ab_secret"):
        heard = await request(server, "POST", "/generate", body={"prompt": "a"}, token=token)
        assert (heard.status, heard.error["type"]) == (401, "authentication_error")
        assert heard.headers["www-authenticate"] == "Bearer"
        assert b"secret" not in heard.body

"""Counting the tokens of a prompt without a turn, with the packages of both dialects and with raw HTTP."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import openai
import pytest

from inferencecenter.config.limits import AccessLimits
from tests.api.http_client import post, tick
from tests.api.responses.helpers import begin_turns, create_response, text_of
from tests.api.streaming import requests_done
from tests.server.harness import MODEL, ready

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from anthropic import AsyncAnthropic
    from openai import AsyncOpenAI

    from inferencecenter.ipc.messages import TokensCounted
    from tests.server.harness import Running

    Serve = Callable[..., AbstractAsyncContextManager[Running]]

RESPONSES = "/v1/responses"
COUNT_RESPONSE = f"{RESPONSES}/input_tokens"
COUNT_MESSAGE = "/v1/messages/count_tokens"
LOOK: dict[str, Any] = {"type": "function", "name": "look", "parameters": {"type": "object"}}
ASKED: Any = [{"role": "user", "content": "Hi"}]


async def prompt_chars(server: Running, path: str, body: dict[str, Any]) -> int:
    """Return the characters, which are the stub's tokens, of the prompt of a request, and answer it."""
    pending = asyncio.get_running_loop().create_task(post(server, path, body))
    (turn,) = await begin_turns(server)
    n_chars = len(text_of(server.engine.submission(turn)))
    server.engine.say(turn, "Hello")
    server.engine.finish(turn)
    assert (await pending).status == 200
    return n_chars


async def test_count_of_a_response_is_that_of_its_prompt(server: Running, ada: AsyncOpenAI) -> None:
    """Instructions, items and tools count; no turn is started."""
    fields: dict[str, Any] = {"instructions": "Be brief.", "input": ASKED, "tools": [LOOK]}
    counted = await ada.responses.input_tokens.count(model="stub", **fields)
    assert not server.engine.turns
    assert (counted.object, counted.input_tokens) == (
        "response.input_tokens",
        await prompt_chars(server, RESPONSES, {**fields, "store": False}),
    )


async def test_count_of_a_continuation_has_the_conversation_before_it(server: Running, ada: AsyncOpenAI) -> None:
    """The previous response counts with its question, and its instructions do not."""
    first = await create_response(server, {"input": "Hi", "instructions": "Be brief."}, "Hello")
    counted = await ada.responses.input_tokens.count(previous_response_id=first.json["id"], input="And?")
    whole = [*ASKED, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "And?"}]
    assert counted.input_tokens == (await ada.responses.input_tokens.count(input=whole)).input_tokens


async def test_count_of_a_message_is_that_of_its_prompt(server: Running, claude: AsyncAnthropic) -> None:
    """The system prompt and tools count, without the block that is no part of the prompt."""
    fields: dict[str, Any] = {
        "model": "stub",
        "messages": ASKED,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cch=1a;"},
            {"type": "text", "text": "Be brief."},
        ],
        "tools": [{"name": "look", "input_schema": {"type": "object"}}],
    }
    counted = await claude.messages.count_tokens(**fields)
    assert not server.engine.turns
    assert counted.input_tokens == await prompt_chars(server, "/v1/messages", {**fields, "max_tokens": 9})


async def test_count_is_refused_where_a_turn_would_be(
    server: Running, ada: AsyncOpenAI, claude: AsyncAnthropic
) -> None:
    """An unknown model, an empty request, and a text that certainly exceeds the context are refused."""
    from anthropic import BadRequestError  # noqa: PLC0415 - it takes more than a second to import, which other workers are spared

    with pytest.raises(openai.NotFoundError):
        await ada.responses.input_tokens.count(model="gone", input="Hi")
    with pytest.raises(openai.BadRequestError) as empty:
        await ada.responses.input_tokens.count(model="stub")
    assert empty.value.param == "input"
    server.engine.status = ready(model=msgspec.structs.replace(MODEL, n_ctx=8, max_token_bytes=1))
    with pytest.raises(openai.BadRequestError) as long:
        await ada.responses.input_tokens.count(model="stub", input="What is that?")
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(BadRequestError) as too_long:
        await claude.messages.count_tokens(model="stub", messages=[{"role": "user", "content": "What is that?"}])
    assert "prompt is too long" in too_long.value.message


async def test_model_limits_of_a_token_apply_to_counts(serve: Serve) -> None:
    """A token that may not use a model may not count with it."""
    async with serve(limits=AccessLimits(models=("another",))) as server:
        response = await post(server, COUNT_RESPONSE, {"input": "Hi"})
        assert (response.status, response.error["code"], response.error["param"]) == (403, "forbidden", "model")


@pytest.mark.parametrize("path", [COUNT_RESPONSE, COUNT_MESSAGE])
async def test_disconnect_withdraws_the_count(server: Running, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """The engine's tokens are not awaited after the client disconnected."""
    waiting: asyncio.Future[TokensCounted] = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(server.engine, "count_tokens", lambda _pieces, *, first, client_id: waiting)
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    body = b'{"model": "stub", "messages": [{"role": "user", "content": "a"}], "input": "a"}'
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {server.token}"]
    writer.write("\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body)
    async with asyncio.timeout(60):
        while server.context.metrics.http_requests._value.get() == 0:
            await tick()
        writer.close()
        while not waiting.done():
            await tick()
    await requests_done(server)

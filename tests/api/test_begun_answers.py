"""The start of an answer that is sent as the last message of a conversation, in each dialect."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests.api.http_client import post
from tests.api.streaming import next_turn

if TYPE_CHECKING:
    from tests.server.harness import Running

DIALECTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "stub"},
    "/v1/messages": {"model": "stub", "max_tokens": 9},
    "/api/chat": {"model": "stub", "stream": False},
}


def begun(path: str, start: str) -> dict[str, Any]:
    """Return a request whose answer begins with a text."""
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": start}]
    return {**DIALECTS[path], "messages": messages}


@pytest.mark.parametrize("path", DIALECTS)
async def test_answer_is_continued(server: Running, path: str) -> None:
    """The prompt ends with its start, the response has the rest, and the history has both."""

    async def answer() -> str:
        turn = await next_turn(server)
        pieces = server.engine.submission(turn).pieces
        server.engine.begin(turn)
        server.engine.say(turn, "lo")
        server.engine.finish(turn)
        return "".join(piece.text for piece in pieces)

    response, prompt = await asyncio.gather(post(server, path, begun(path, "Hel")), answer())
    assert prompt.endswith("assistant\nHel")
    body = response.json
    if path == "/v1/chat/completions":
        assert body["choices"][0]["message"]["content"] == "lo"
    elif path == "/v1/messages":
        assert body["content"] == [{"type": "text", "text": "lo"}]
    else:
        assert body["message"]["content"] == "lo"
    (session,) = server.context.sessions._table
    assert session.history.messages[-1].content == "Hello"


@pytest.mark.parametrize("path", DIALECTS)
async def test_start_that_is_too_long_is_refused_by_the_name_of_its_field(server: Running, path: str) -> None:
    """The dialects have no field ``prefix``."""
    refused = await post(server, path, begun(path, "x" * 300_000))
    assert refused.status == 400
    text = refused.body.decode()
    assert "messages is" in text
    assert "prefix" not in text

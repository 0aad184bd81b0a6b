"""Tests of looking tokens up."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from inferencecenter.config.limits import AccessLimits
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.messages import PromptSegment, Tokenized, pack_tokens
from tests.api.asking import post, tick

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from tests.server.harness import Running

    Serve = Callable[..., AbstractAsyncContextManager[Running]]


async def test_there_and_back(server: Running) -> None:
    """A text's tokens spell the text; an empty one has none."""
    text = "Grüße, 世界"
    found = (await post(server, "/tokenize", {"text": text})).json
    assert found == {"tokens": [ord(character) for character in text], "count": len(text)}
    assert (await post(server, "/detokenize", {"tokens": found["tokens"]})).json == {"text": text}
    assert (await post(server, "/tokenize", {"text": ""})).json == {"tokens": [], "count": 0}
    assert (await post(server, "/detokenize", {"tokens": []})).json == {"text": ""}


async def test_text_is_text_unless_it_is_said_to_be_more(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the engine is asked says whether names of special tokens count, and whether the text begins a sequence."""
    asked: list[tuple[Sequence[PromptSegment], bool]] = []

    def tokenize(pieces: Sequence[PromptSegment], *, first: bool, client_id: str) -> asyncio.Future[Tokenized]:
        assert client_id
        asked.append((pieces, first))
        future: asyncio.Future[Tokenized] = asyncio.get_running_loop().create_future()
        future.set_result(Tokenized(0, pack_tokens([7, 8]), (b"\xe4\xb8", b"<s>")))
        return future

    monkeypatch.setattr(server.engine, "tokenize", tokenize)
    plain = await post(server, "/tokenize", {"text": "<s>", "pieces": True, "model": "stub"})
    await post(server, "/tokenize", {"text": "<s>", "special": True, "add_bos": True})
    assert asked == [((PromptSegment("<s>", False),), False), ((PromptSegment("<s>", True),), True)]
    assert plain.json == {"tokens": [7, 8], "count": 2, "pieces": ["\ufffd", "<s>"]}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "text"),
        ("/tokenize", {"text": 5}, 400, "text"),
        ("/tokenize", {"text": "x" * 1_048_577}, 400, "text"),
        ("/tokenize", {"text": "x", "special": 1}, 400, "special"),
        ("/tokenize", {"text": "x", "model": "other"}, 404, "model"),
        ("/tokenize", b'{"text": "\\ud800"}', 400, None),
        ("/detokenize", {"tokens": [65, 55296]}, 400, "tokens.1"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens.0"),
        ("/detokenize", {"tokens": [2**31]}, 400, "tokens.0"),
        ("/detokenize", {"tokens": [2**63]}, 400, "tokens.0"),
        ("/detokenize", {"tokens": [1.0]}, 400, "tokens.0"),
        ("/detokenize", {"tokens": [True]}, 400, "tokens.0"),
        ("/detokenize", {"tokens": "65"}, 400, "tokens"),
        ("/detokenize", {"tokens": [65] * 262_145}, 400, "tokens"),
    ],
)
async def test_what_is_no_text_and_what_is_no_token_is_refused(
    server: Running, path: str, body: Any, status: int, param: str | None
) -> None:
    """The field is named, by its place in a list, and the error stays short."""
    heard = await post(server, path, body)
    assert (heard.status, heard.error["param"]) == (status, param)
    assert len(heard.body) < 1000


async def test_an_engine_that_cannot_answer_says_so(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The status is the failure's own, with when to try again."""

    def overloaded(_tokens: Sequence[int], *, client_id: str) -> asyncio.Future[Any]:
        raise InferenceCenterError(ErrorCode.OVERLOADED, retry_after_ms=1000)

    monkeypatch.setattr(server.engine, "detokenize", overloaded)
    heard = await post(server, "/detokenize", {"tokens": [65]})
    assert (heard.status, heard.error["code"], heard.headers["retry-after"]) == (503, "overloaded", "1")


async def test_nobody_waits_for_tokens_that_nobody_wants(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the peer goes the engine's answer is not waited for."""
    waiting: asyncio.Future[Tokenized] = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(server.engine, "tokenize", lambda _pieces, *, first, client_id: waiting)
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head = f"POST /tokenize HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.token}\r\nContent-Length: 13\r\n\r\n"
    writer.write(head.encode() + b'{"text": "a"}')
    async with asyncio.timeout(60):
        while server.context.metrics.http_requests._value.get() == 0:
            await tick()
        writer.close()
        while not waiting.done():
            await tick()


async def test_a_model_that_a_token_may_not_use_has_no_tokens_for_it(serve: Serve) -> None:
    """What limits a token's turns limits its look-ups."""
    async with serve(limits=AccessLimits(models=("another",))) as server:
        heard = await post(server, "/tokenize", {"text": "a"})
        assert (heard.status, heard.error["code"], heard.error["param"]) == (403, "forbidden", "model")

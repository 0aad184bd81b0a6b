"""Tests of the tokenize and detokenize endpoints."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from inferencecenter.config.limits import AccessLimits
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.messages import PromptSegment, Tokenized, pack_tokens
from tests.api.http_client import post, tick

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from tests.server.harness import Running

    Serve = Callable[..., AbstractAsyncContextManager[Running]]


async def test_tokenize_and_detokenize_are_inverse(server: Running) -> None:
    """The tokens of a text decode to the text; an empty text has none."""
    text = "Grüße, 世界"
    found = (await post(server, "/tokenize", {"text": text})).json
    assert found == {"tokens": [ord(character) for character in text], "count": len(text)}
    assert (await post(server, "/detokenize", {"tokens": found["tokens"]})).json["text"] == text
    assert (await post(server, "/tokenize", {"text": ""})).json == {"tokens": [], "count": 0}
    assert (await post(server, "/detokenize", {"tokens": []})).json == {"text": "", "content": ""}


async def test_special_tokens_are_parsed_only_on_request(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine request has the flags for special tokens and for the start of a sequence."""
    requests: list[tuple[Sequence[PromptSegment], bool]] = []

    def tokenize(pieces: Sequence[PromptSegment], *, first: bool, client_id: str) -> asyncio.Future[Tokenized]:
        assert client_id
        requests.append((pieces, first))
        future: asyncio.Future[Tokenized] = asyncio.get_running_loop().create_future()
        future.set_result(Tokenized(0, pack_tokens([7, 8]), (b"\xe4\xb8", b"<s>")))
        return future

    monkeypatch.setattr(server.engine, "tokenize", tokenize)
    plain = await post(server, "/tokenize", {"text": "<s>", "pieces": True, "model": "stub"})
    await post(server, "/tokenize", {"text": "<s>", "special": True, "add_bos": True})
    assert requests == [((PromptSegment("<s>", False),), False), ((PromptSegment("<s>", True),), True)]
    assert plain.json == {"tokens": [7, 8], "count": 2, "pieces": ["\ufffd", "<s>"]}


async def test_count_alone(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine counts, and sends no tokens."""
    monkeypatch.setattr(server.engine, "tokenize", None)
    assert (await post(server, "/tokenize", {"text": "Grüße", "count_only": True})).json == {"count": 5}
    assert (await post(server, "/tokenize", {"text": "", "count_only": True})).json == {"count": 0}
    refused = await post(server, "/tokenize", {"text": "x", "count_only": True, "pieces": True})
    assert (refused.status, refused.json["error"]["param"]) == (400, "count_only")


async def test_text_of_llama_server_is_its_content(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its special tokens are parsed unless the request says otherwise, and pieces are objects."""
    requests: list[tuple[Sequence[PromptSegment], bool]] = []
    tokenize = server.engine.tokenize

    def noting(pieces: Sequence[PromptSegment], *, first: bool, client_id: str) -> asyncio.Future[Tokenized]:
        requests.append((pieces, first))
        return tokenize(pieces, first=first, client_id=client_id)

    monkeypatch.setattr(server.engine, "tokenize", noting)
    found = await post(server, "/tokenize", {"content": "ab", "add_special": True, "with_pieces": True})
    await post(server, "/tokenize", {"content": "ab", "parse_special": False})
    assert requests == [((PromptSegment("ab", True),), True), ((PromptSegment("ab", False),), False)]
    assert found.json["tokens"] == [{"id": 97, "piece": "a"}, {"id": 98, "piece": "b"}]
    assert (await post(server, "/detokenize", {"tokens": [97]})).json["content"] == "a"


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "text"),
        ("/tokenize", {"text": "x", "content": "x"}, 400, "text"),
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
async def test_invalid_text_and_token_ids_are_refused(
    server: Running, path: str, body: Any, status: int, param: str | None
) -> None:
    """The error names the field or list index, and stays short."""
    response = await post(server, path, body)
    assert (response.status, response.error["param"]) == (status, param)
    assert len(response.body) < 1000


async def test_engine_failure_has_its_status(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The status is that of the failure, with its retry delay."""

    def overloaded(_tokens: Sequence[int], *, client_id: str) -> asyncio.Future[Any]:
        raise InferenceCenterError(ErrorCode.OVERLOADED, retry_after_ms=1000)

    monkeypatch.setattr(server.engine, "detokenize", overloaded)
    response = await post(server, "/detokenize", {"tokens": [65]})
    assert (response.status, response.error["code"], response.headers["retry-after"]) == (503, "overloaded", "1")


async def test_disconnect_cancels_the_lookup(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's answer is not awaited after the client disconnected."""
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


async def test_model_limits_of_a_token_apply(serve: Serve) -> None:
    """A token that may not use a model may not tokenize with it."""
    async with serve(limits=AccessLimits(models=("another",))) as server:
        response = await post(server, "/tokenize", {"text": "a"})
        assert (response.status, response.error["code"], response.error["param"]) == (403, "forbidden", "model")

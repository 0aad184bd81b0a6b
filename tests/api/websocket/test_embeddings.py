"""The ops ``embed`` and ``rerank``: the reply, errors, several at once, and sockets that close."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from typing import TYPE_CHECKING, Any

import pytest

from inferencecenter.api.websocket.connection import MAX_EMBEDDINGS
from inferencecenter.ipc.messages import EmbeddingDelta, EmbeddingDone, EmbeddingInput, Failed
from tests.api.http_client import tick
from tests.server.harness import receive

if TYPE_CHECKING:
    from inferencecenter.ipc.port import EngineTurn
    from tests.server.harness import Running


@pytest.fixture
def embedding_server(server: Running) -> Running:
    """A server with an embedding model."""
    server.engine.kind = "embedding"
    return server


async def _turn(server: Running) -> EngineTurn:
    """Return the next request that the engine has got."""
    await asyncio.wait_for(server.engine.submitted.wait(), 60)
    server.engine.submitted.clear()
    _, turn = server.engine.turns.popitem()
    return turn


def _answer(turn: EngineTurn, *vectors: tuple[float, ...]) -> None:
    packed = b"".join(struct.pack(f"<{len(vector)}f", *vector) for vector in vectors)
    turn.on_engine_event(EmbeddingDelta(turn.turn_id, packed, len(vectors), 5))
    turn.on_engine_event(EmbeddingDone(turn.turn_id, 1.0, 2.0))


async def _send(socket: Any, **frame: Any) -> None:
    await socket.send(json.dumps({"op": "embed", **frame}))


async def test_documents_get_scores(server: Running) -> None:
    """The best first, with their index, and no more than were requested."""
    server.engine.kind = "reranking"
    async with server.v1() as socket:
        await _send(socket, op="rerank", id="1", query="pet", documents=["a car", "the cat", "a dog"], top_n=2)
        turn = await _turn(server)
        submission = turn.submission(lambda: None)
        assert submission is not None
        assert submission.query == "pet"  # type: ignore[union-attr]
        _answer(turn, (-1.0,), (0.75,), (0.5,))
        reply = await receive(socket, "document_scores")
    assert (reply["id"], reply["model"], reply["prompt_tokens"]) == ("1", "stub", 5)
    assert reply["results"] == [{"index": 1, "relevance_score": 0.75}, {"index": 2, "relevance_score": 0.5}]


async def test_embedding_model_ranks_no_documents(embedding_server: Running) -> None:
    """The error names the field and what to do."""
    async with embedding_server.v1() as socket:
        await _send(socket, op="rerank", query="a", documents=["b"], model="stub")
        error = await receive(socket, "error")
        assert (error["code"], error["field"]) == ("invalid_request", "model")


async def test_texts_get_vectors(embedding_server: Running) -> None:
    """The reply has the request's id, and the vectors as base64."""
    async with embedding_server.v1() as socket:
        await _send(socket, id="1", texts=["the cat", "a dog"])
        turn = await _turn(embedding_server)
        submission = turn.submission(lambda: None)
        assert submission is not None
        assert submission.inputs == (EmbeddingInput("the cat"), EmbeddingInput("a dog"))  # type: ignore[union-attr]
        _answer(turn, (0.5, 0.25), (1.0, 0.0))
        reply = await receive(socket, "embeddings")
        assert (reply["id"], reply["model"], reply["dimensions"], reply["prompt_tokens"]) == ("1", "stub", 2, 5)
        assert [struct.unpack("<2f", base64.b64decode(each)) for each in reply["vectors"]] == [(0.5, 0.25), (1.0, 0.0)]


async def test_requests_of_a_socket_end_in_any_order(embedding_server: Running) -> None:
    """The socket can be used while texts are computed."""
    async with embedding_server.v1() as socket:
        await _send(socket, id="1", texts=["a"])
        first = await _turn(embedding_server)
        await _send(socket, id="2", texts=["b"])
        second = await _turn(embedding_server)
        await socket.send('{"op": "ping", "id": "3"}')
        assert (await receive(socket, "pong"))["id"] == "3"
        _answer(second, (1.0,))
        assert (await receive(socket, "embeddings"))["id"] == "2"
        _answer(first, (1.0,))
        assert (await receive(socket, "embeddings"))["id"] == "1"


async def test_failures_are_errors_of_the_request(embedding_server: Running) -> None:
    """The error names the text."""
    async with embedding_server.v1() as socket:
        await _send(socket, id="1", texts=["a"])
        turn = await _turn(embedding_server)
        turn.on_engine_event(Failed(turn_id=turn.turn_id, code="prompt_too_long", message="too long", field="input.0"))
        error = await receive(socket, "error")
        assert (error["id"], error["code"], error["field"]) == ("1", "prompt_too_long", "input.0")


@pytest.mark.parametrize("frame", [{"texts": []}, {"texts": [""]}, {"texts": ["a"] * 257}, {"texts": "a"}])
async def test_invalid_requests_are_refused(embedding_server: Running, frame: dict[str, Any]) -> None:
    """Our own protocol takes a list of up to 256 texts that are not empty."""
    async with embedding_server.v1() as socket:
        await _send(socket, **frame)
        assert (await receive(socket, "error"))["code"] == "invalid_request"


async def test_chat_model_computes_no_embeddings(server: Running) -> None:
    """The error names the field and what to do."""
    async with server.v1() as socket:
        await _send(socket, texts=["a"], model="stub")
        error = await receive(socket, "error")
        assert (error["code"], error["field"]) == ("invalid_request", "model")


async def test_socket_has_a_limited_number_of_requests(embedding_server: Running) -> None:
    """Results are large, so that only some may wait for a slow reader."""
    async with embedding_server.v1() as socket:
        for _ in range(MAX_EMBEDDINGS):
            await _send(socket, texts=["a"])
            await _turn(embedding_server)
        await _send(socket, id="more", texts=["a"])
        error = await receive(socket, "error")
        assert (error["id"], error["code"]) == ("more", "queue_full")


async def test_requests_end_with_their_socket(embedding_server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is computed for a client that is gone."""
    aborted: list[str] = []
    monkeypatch.setattr(embedding_server.engine, "abort", aborted.append)
    async with embedding_server.v1() as socket:
        await _send(socket, texts=["a"])
        turn = await _turn(embedding_server)
    while not aborted:
        await tick()
    assert aborted == [turn.turn_id]

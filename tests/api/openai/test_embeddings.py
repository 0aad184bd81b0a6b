"""``/v1/embeddings`` and ``/v1/rerank``: inputs, encodings, errors, and requests that end early."""

from __future__ import annotations

import asyncio
import base64
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from inferencecenter.config.limits import AccessLimits
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.messages import (
    Cancelled,
    Embed,
    EmbeddingDelta,
    EmbeddingDone,
    EmbeddingInput,
    Failed,
    pack_tokens,
)
from tests.api.http_client import post, tick

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from contextlib import AbstractAsyncContextManager

    from openai import AsyncOpenAI

    from tests.api.http_client import HttpResponse
    from tests.server.harness import Running

    Serve = Callable[..., AbstractAsyncContextManager[Running]]

_Result = TypeVar("_Result")
VECTORS = {"the cat": (0.6, 0.8), "a dog": (1.0, 0.0)}


@pytest.fixture
def embedding_server(server: Running) -> Running:
    """A server with an embedding model."""
    server.engine.kind = "embedding"
    server.engine.submitted.clear()
    return server


def _spawn(asking: Coroutine[Any, Any, _Result]) -> asyncio.Future[tuple[_Result]]:
    """Start a request; the result is its answer alone."""
    return asyncio.gather(asking)


class _Asked:
    """The request that the engine has got."""

    def __init__(self, server: Running) -> None:
        ((self.turn_id, self.turn),) = server.engine.turns.items()
        self._server = server

    @property
    def embed(self) -> Embed:
        """What the request would submit now."""
        submission = self.turn.submission(lambda: None)
        assert isinstance(submission, Embed)
        return submission

    def say(self, *vectors: tuple[float, ...], n_tokens: int = 3) -> None:
        """Answer with the next vectors."""
        packed = b"".join(struct.pack(f"<{len(vector)}f", *vector) for vector in vectors)
        self.turn.on_engine_event(EmbeddingDelta(self.turn_id, packed, len(vectors), n_tokens))

    def end(self) -> None:
        """End the request well."""
        self._server.engine.turns.clear()
        self.turn.on_engine_event(EmbeddingDone(self.turn_id, 1.0, 2.0))

    def fail(self, code: str, **more: Any) -> None:
        """Fail the request."""
        self.turn.on_engine_event(Failed(turn_id=self.turn_id, code=code, message="It failed.", **more))


async def _asked(server: Running) -> _Asked:
    await asyncio.wait_for(server.engine.submitted.wait(), 60)
    return _Asked(server)


async def _answered(
    server: Running, asking: Coroutine[Any, Any, HttpResponse], *vectors: tuple[float, ...]
) -> HttpResponse:
    """Send a request and answer it with vectors."""
    task = _spawn(asking)
    asked = await _asked(server)
    asked.say(*vectors)
    asked.end()
    return (await task)[0]


async def test_vectors_come_in_openais_shape(embedding_server: Running) -> None:
    """Vectors are lists of numbers by default and come with the index of their input, the model and the usage."""
    asking = post(embedding_server, "/v1/embeddings", {"model": "stub", "input": list(VECTORS)})
    response = await _answered(embedding_server, asking, *VECTORS.values())
    assert response.status == 200
    assert response.json == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [0.6, 0.8]},
            {"object": "embedding", "index": 1, "embedding": [1.0, 0.0]},
        ],
        "model": "stub",
        "usage": {"prompt_tokens": 3, "total_tokens": 3},
    }


async def test_base64_is_little_endian_float32(embedding_server: Running) -> None:
    """The openai package decodes this format."""
    body = {"model": "stub", "input": "the cat", "encoding_format": "base64"}
    response = await _answered(embedding_server, post(embedding_server, "/v1/embeddings", body), (0.5, -2.0))
    packed = base64.b64decode(response.json["data"][0]["embedding"])
    assert struct.unpack("<2f", packed) == (0.5, -2.0)


async def test_openais_client_gets_its_vectors(embedding_server: Running, ada: AsyncOpenAI) -> None:
    """The client requests base64 by default and decodes it."""
    task = _spawn(ada.embeddings.create(model="stub", input=["the cat", "a dog"]))
    asked = await _asked(embedding_server)
    asked.say((0.25, 0.5))
    asked.say((1.0, 0.0), n_tokens=4)
    asked.end()
    found = (await task)[0]
    assert [each.embedding for each in found.data] == [[0.25, 0.5], [1.0, 0.0]]
    assert found.usage.total_tokens == 7


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("text", (EmbeddingInput("text"),)),
        (["a", "b"], (EmbeddingInput("a"), EmbeddingInput("b"))),
        ([1, 2], (EmbeddingInput(tokens=pack_tokens([1, 2])),)),
        ([[1], [2, 3]], (EmbeddingInput(tokens=pack_tokens([1])), EmbeddingInput(tokens=pack_tokens([2, 3])))),
        (["a", [5]], (EmbeddingInput("a"), EmbeddingInput(tokens=pack_tokens([5])))),
    ],
)
async def test_inputs_of_every_form(embedding_server: Running, given: Any, inputs: tuple[EmbeddingInput, ...]) -> None:
    """An input is a text, several texts, tokens, or lists of tokens."""
    task = _spawn(post(embedding_server, "/v1/embeddings", {"input": given}))
    asked = await _asked(embedding_server)
    assert asked.embed.inputs == inputs
    asked.say(*[(1.0,)] * len(inputs))
    asked.end()
    assert (await task)[0].status == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input.1"),
        ({"input": ["a", []]}, "input.1"),
        ({"input": [1, "a"]}, "input.0"),
        ({"input": [[1, -1]]}, "input.0"),
        ({"input": [[2**31]]}, "input.0"),
        ({"input": [[True]]}, "input.0"),
        ({"input": [1.5]}, "input.0"),
        ({"input": {"a": 1}}, "input"),
        ({"input": ["x"] * 2049}, "input"),
        ({"input": "x" * 1_048_577}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "model": "missing"}, "model"),
    ],
)
async def test_invalid_requests_are_refused_by_field(embedding_server: Running, body: Any, param: str) -> None:
    """The error is OpenAI's, short, and names the field."""
    response = await post(embedding_server, "/v1/embeddings", body)
    assert response.status in (400, 404)
    assert response.error["param"] == param
    assert len(response.body) < 1000
    assert not embedding_server.engine.turns


async def test_chat_model_computes_no_embeddings(server: Running) -> None:
    """The error explains how to add an embedding model."""
    named = await post(server, "/v1/embeddings", {"input": "a", "model": "stub"})
    assert (named.status, named.error["param"]) == (400, "model")
    assert named.error["message"].startswith("stub generates text and makes no embeddings")
    unnamed = await post(server, "/v1/embeddings", {"input": "a"})
    assert "there is no embedding model" in unnamed.error["message"]


async def test_token_that_may_not_use_the_model_is_refused(serve: Serve) -> None:
    """Limits of models concern embedding models too."""
    async with serve(limits=AccessLimits(models=("other",))) as server:
        server.engine.kind = "embedding"
        response = await post(server, "/v1/embeddings", {"input": "a"})
        assert (response.status, response.error["code"]) == (403, "forbidden")


async def test_foreign_fields_have_no_effect(embedding_server: Running) -> None:
    """They are named in the answer."""
    asking = post(embedding_server, "/v1/embeddings", {"input": "a", "user": "u", "input_type": "query"})
    response = await _answered(embedding_server, asking, (1.0,))
    assert [warning.split()[0] for warning in response.json["warnings"]] == ["user", "input_type"]


async def test_dimensions_reach_the_engine(embedding_server: Running) -> None:
    """The engine validates them, because it knows the length of the vectors."""
    task = _spawn(post(embedding_server, "/v1/embeddings", {"input": "a", "dimensions": 2}))
    asked = await _asked(embedding_server)
    assert (asked.embed.dimensions, asked.embed.matryoshka) == (2, False)
    asked.fail("invalid_request", field="dimensions", hint="Omit it.")
    response = (await task)[0]
    assert (response.status, response.error["param"]) == (400, "dimensions")


async def test_text_that_is_too_long_has_openais_code(embedding_server: Running) -> None:
    """Programs recognize it, and the message names the input."""
    task = _spawn(post(embedding_server, "/v1/embeddings", {"input": ["a", "b"]}))
    (await _asked(embedding_server)).fail("prompt_too_long", field="input.1")
    response = (await task)[0]
    assert (response.error["code"], response.error["param"]) == ("context_length_exceeded", "input.1")


async def test_engine_after_a_lost_one_computes_the_rest(embedding_server: Running) -> None:
    """Vectors that arrived are kept; the rest is submitted again with its place in the request."""
    task = _spawn(post(embedding_server, "/v1/embeddings", {"input": ["a", "b", "c"]}))
    asked = await _asked(embedding_server)
    asked.say((1.0, 0.0))
    asked.turn.on_engine_lost()
    assert (asked.embed.inputs, asked.embed.done) == ((EmbeddingInput("b"), EmbeddingInput("c")), 1)
    asked.say((0.0, 1.0), (0.5, 0.5))
    asked.end()
    assert [each["embedding"] for each in (await task)[0].json["data"]] == [[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]]


async def test_request_that_cannot_be_resubmitted_fails(
    embedding_server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the model's next engine refuses it, the client gets that error."""
    task = _spawn(post(embedding_server, "/v1/embeddings", {"input": "a"}))
    asked = await _asked(embedding_server)

    def refuse(_turn: object) -> int:
        raise InferenceCenterError(ErrorCode.QUEUE_FULL)

    monkeypatch.setattr(embedding_server.engine, "submit", refuse)
    asked.turn.resubmit()
    assert (await task)[0].status == 503


async def test_model_that_cannot_be_loaded_has_a_public_error(
    embedding_server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code of a defect in a file is for operators."""

    def refuse(_name: str, _client_id: str) -> None:
        raise InferenceCenterError(ErrorCode.INVALID_MODEL_FILE, "no classification head")

    engine = embedding_server.engine
    monkeypatch.setattr(engine, "status", replace(engine.status, model=None))
    monkeypatch.setattr(engine, "ensure_loaded", refuse)
    response = await post(embedding_server, "/v1/embeddings", {"input": "a"})
    assert (response.status, response.error["code"]) == (503, "engine_unavailable")
    assert "no classification head" in response.error["message"]


async def test_client_that_disconnects_ends_its_request(
    embedding_server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is told to cancel it immediately."""
    aborted: list[str] = []
    monkeypatch.setattr(embedding_server.engine, "abort", aborted.append)
    _, writer = await asyncio.open_connection("127.0.0.1", embedding_server.port)
    body = b'{"input": "a"}'
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {embedding_server.token}\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    asked = await _asked(embedding_server)
    writer.close()
    while not aborted:
        await tick()
    assert aborted == [asked.turn_id]
    asked.turn.on_engine_event(Cancelled(asked.turn_id))
    assert embedding_server.context.quotas.of("ada", embedding_server.token_id).running == 0


async def test_tokens_count_towards_the_quota(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose tokens use the day's quota up ends, and the next is refused; one at a time may be allowed."""
    async with serve(limits=AccessLimits(tokens_per_day=100, concurrent_turns=1)) as server:
        server.engine.kind = "embedding"
        task = _spawn(post(server, "/v1/embeddings", {"input": ["a", "b"]}))
        asked = await _asked(server)
        turn = asked.turn
        monkeypatch.setattr(server.engine, "abort", lambda turn_id: turn.on_engine_event(Cancelled(turn_id)))
        second = await post(server, "/v1/embeddings", {"input": "a"})
        assert (second.status, second.error["code"]) == (429, "rate_limit_exceeded")
        asked.say((1.0,), n_tokens=100)
        first = (await task)[0]
        assert (first.status, first.error["code"]) == (429, "insufficient_quota")
        third = await post(server, "/v1/embeddings", {"input": "a"})
        assert third.error["code"] == "insufficient_quota"


async def test_requests_are_counted(embedding_server: Running) -> None:
    """They are counted by model and outcome, and their tokens by client."""
    await _answered(embedding_server, post(embedding_server, "/v1/embeddings", {"input": "a"}), (1.0,))
    embedding_server.engine.submitted.clear()
    task = _spawn(post(embedding_server, "/v1/embeddings", {"input": "a"}))
    asked = await _asked(embedding_server)
    asked.fail("internal")
    await task
    registry = embedding_server.context.metrics.registry
    for finish in ("done", "internal"):
        labels = {"model": "stub", "finish": finish}
        assert registry.get_sample_value("inferencecenter_embedding_requests_total", labels) == 1
    tokens = {"client": "ada", "kind": "prompt"}
    assert registry.get_sample_value("inferencecenter_client_tokens_total", tokens) == 3


# Reranking.


@pytest.fixture
def reranking_server(server: Running) -> Running:
    """A server with a reranking model."""
    server.engine.kind = "reranking"
    return server


async def test_documents_are_returned_by_score(reranking_server: Running) -> None:
    """The best ``top_n`` documents come first, each with its index in the request and its score."""
    body = {"query": "cat", "documents": ["a", {"text": "b"}, "c"], "top_n": 2, "return_documents": True}
    task = _spawn(post(reranking_server, "/v1/rerank", body))
    asked = await _asked(reranking_server)
    assert asked.embed.query == "cat"
    assert [each.text for each in asked.embed.inputs] == ["a", "b", "c"]
    asked.say((-1.0,), (0.5,), (0.25,))
    asked.end()
    assert (await task)[0].json == {
        "object": "list",
        "model": "stub",
        "results": [
            {"index": 1, "relevance_score": 0.5, "document": {"text": "b"}},
            {"index": 2, "relevance_score": 0.25, "document": {"text": "c"}},
        ],
        "usage": {"prompt_tokens": 3, "total_tokens": 3},
    }


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"documents": ["a"]}, "query"),
        ({"query": "", "documents": ["a"]}, "query"),
        ({"query": "a"}, "documents"),
        ({"query": "a", "documents": []}, "documents"),
        ({"query": "a", "documents": ["a"], "top_n": 0}, "top_n"),
        ({"query": "a", "documents": ["a", ""]}, "documents.1"),
    ],
)
async def test_invalid_rankings_are_refused_by_field(reranking_server: Running, body: Any, param: str) -> None:
    """The error names the field."""
    response = await post(reranking_server, "/v1/rerank", body)
    assert (response.status, response.error["param"]) == (400, param)


async def test_embedding_model_ranks_nothing(embedding_server: Running) -> None:
    """Scores need a model that computes them."""
    response = await post(embedding_server, "/v1/rerank", {"query": "a", "documents": ["b"], "model": "stub"})
    assert response.error["message"].startswith("stub makes embeddings and ranks no documents")


async def test_result_of_a_model_that_is_not_loaded_has_the_width_of_its_file(
    embedding_server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is counted before the model is loaded."""
    spec = replace(embedding_server.engine.spec_of("stub"), n_embd=65_536)
    monkeypatch.setattr(embedding_server.engine, "spec_of", lambda _name: spec)
    embedding_server.engine.status = replace(embedding_server.engine.status, model=None)
    monkeypatch.setattr(embedding_server.engine, "ensure_loaded", lambda *_: None)
    body = {"input": ["a"] * 128}
    first = _spawn(post(embedding_server, "/v1/embeddings", body))
    asked = await _asked(embedding_server)
    refused = await post(embedding_server, "/v1/embeddings", body)
    assert (refused.status, refused.error["code"]) == (503, "queue_full")
    asked.fail("internal")
    await first


async def test_results_of_a_client_are_limited_together(embedding_server: Running) -> None:
    """They are counted in advance, because a few bytes of text may produce megabytes of numbers."""
    body = {"input": ["a"] * 128, "dimensions": 65_536}
    first = _spawn(post(embedding_server, "/v1/embeddings", body))
    asked = await _asked(embedding_server)
    refused = await post(embedding_server, "/v1/embeddings", body)
    assert (refused.status, refused.error["code"]) == (503, "queue_full")
    asked.fail("internal")
    await first
    embedding_server.engine.turns.clear()
    embedding_server.engine.submitted.clear()
    assert (await _answered(embedding_server, post(embedding_server, "/v1/embeddings", body), (1.0,))).status == 200

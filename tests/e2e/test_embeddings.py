"""An embedding model beside a chat model in a real daemon: vectors, lost engines, and memory for one of the two."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from openai import AsyncOpenAI

from inferencecenter.client import Client, TooLongError
from inferencecenter.client.blocking import BlockingClient
from tests.e2e.harness import run_daemon
from tests.embedding_models import write_embedding_model, write_reranking_model, write_topic_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tests.e2e.harness import Daemon

TEXTS = ["the cat", "a dog barks in the road", "bread", "x" * 90]


@pytest.fixture(scope="module")
def embedding_daemon(tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path) -> Iterator[Daemon]:
    """A daemon on the demo model with three models that generate no text, of which one is loaded at a time."""
    models = tmp_path_factory.mktemp("models")
    write_embedding_model(models / "bert.gguf")
    write_topic_model(models / "topics.gguf")
    write_reranking_model(models / "rerank.gguf")
    settings = {
        "INFERENCECENTER_MODELS_DIR": str(models),
        "INFERENCECENTER_ENGINE__RESTART_BACKOFF_MIN_S": "0.05",
        "INFERENCECENTER_ENGINE__MAX_RESIDENT": "2",
        "INFERENCECENTER_ENGINE__MIN_RESIDENCY_S": "0",
    }
    with run_daemon(tmp_path_factory.mktemp("daemon") / "state", demo_model_path, **settings) as running:
        yield running


@pytest.fixture
async def openai(embedding_daemon: Daemon) -> AsyncIterator[AsyncOpenAI]:
    """OpenAI's client."""
    url = f"http://127.0.0.1:{embedding_daemon.port}/v1"
    async with AsyncOpenAI(base_url=url, api_key=embedding_daemon.admin_token, max_retries=0) as client:
        yield client


async def _vectors(client: AsyncOpenAI, model: str, texts: list[str]) -> list[list[float]]:
    return [each.embedding for each in (await client.embeddings.create(model=model, input=texts)).data]


async def test_near_texts_are_nearer(openai: AsyncOpenAI) -> None:
    """A model of the directory is found to make embeddings, loaded on demand, and answers OpenAI's client."""
    question, near, far = await _vectors(openai, "topics", ["the cat", "dog and puppy", "the engine of the car"])
    assert len(question) == 64

    def product(other: list[float]) -> float:
        return sum(a * b for a, b in zip(question, other, strict=True))

    assert product(near) > product(far) + 0.2


async def test_models_make_room_for_each_other(openai: AsyncOpenAI) -> None:
    """More models than may be loaded take turns, with a chat model among them; documents are ranked by one."""
    chat = openai.chat.completions.create(
        model="demo", max_tokens=4, messages=[{"role": "user", "content": "Hello"}], temperature=0
    )
    ranking = openai.post(
        "/rerank", body={"model": "rerank", "query": "cat", "documents": TEXTS}, cast_to=dict[str, object]
    )
    results = await asyncio.gather(_vectors(openai, "bert", TEXTS), _vectors(openai, "topics", TEXTS), chat, ranking)
    assert len(results[0]) == len(results[1]) == len(TEXTS)
    found = results[3]["results"]
    assert isinstance(found, list)
    assert sorted(each["index"] for each in found) == [0, 1, 2, 3]


async def test_client_gets_vectors(embedding_daemon: Daemon, openai: AsyncOpenAI) -> None:
    """The client's vectors are those of HTTP, of more texts than one request has."""
    texts = TEXTS * 70
    expected = await _vectors(openai, "bert", TEXTS)
    async with Client(embedding_daemon.url, embedding_daemon.admin_token) as client:
        found = await client.embed(texts, model="bert")
        assert (found.model, len(found.vectors)) == ("bert", len(texts))
        assert found.vectors[-1] == pytest.approx(expected[-1], abs=1e-4)
        with pytest.raises(TooLongError) as refused:
            await client.embed(["short", "the " * 200], model="bert")
        assert refused.value.field == "input.1"
        kinds = {model.name: model.kind for model in await client.models()}
        assert kinds == {"demo": "chat", "bert": "embedding", "topics": "embedding", "rerank": "reranking"}


async def test_client_ranks_documents(embedding_daemon: Daemon, openai: AsyncOpenAI) -> None:
    """The scores are those of HTTP, of more documents than one request has."""
    ranked = await openai.post(
        "/rerank", body={"model": "rerank", "query": "cat", "documents": TEXTS}, cast_to=dict[str, object]
    )
    (best, *_) = cast("list[dict[str, Any]]", ranked["results"])
    documents = [*TEXTS] * 70
    async with Client(embedding_daemon.url, embedding_daemon.admin_token) as client:
        found = await client.rerank("cat", documents, top_n=70)
    assert (found.model, len(found.results)) == ("rerank", 70)
    assert {each.index % len(TEXTS) for each in found.results} == {best["index"]}
    assert max(each.index for each in found.results) > 256
    assert found.results[0].relevance_score == pytest.approx(best["relevance_score"], abs=1e-3)  # rounding


def test_command_ranks_documents(embedding_daemon: Daemon) -> None:
    """Each document is a line, the best first, with the index that the blocking client reports."""
    command = [sys.executable, "-m", "inferencecenter", "rerank", "cat", *TEXTS]
    reach = ["--url", embedding_daemon.url, "--token", embedding_daemon.admin_token]
    written = subprocess.run([*command, *reach], capture_output=True, text=True, check=True).stdout
    lines = [json.loads(line) for line in written.splitlines()]
    with BlockingClient(embedding_daemon.url, embedding_daemon.admin_token) as client:
        found = client.rerank("cat", TEXTS)
    assert [line["index"] for line in lines] == [each.index for each in found.results]
    assert [line["document"] for line in lines] == [TEXTS[line["index"]] for line in lines]
    scores = [line["relevance_score"] for line in lines]
    assert scores == sorted(scores, reverse=True)


def test_blocking_client_gets_vectors(embedding_daemon: Daemon) -> None:
    """They equal those of the asyncio client."""
    with BlockingClient(embedding_daemon.url, embedding_daemon.admin_token) as client:
        found = client.embed(["the cat", "a dog"], model="bert")
        assert len(found.vectors) == 2
        assert found.n_tokens == 8


@pytest.mark.parametrize(("arguments", "given"), [(["the cat", "a dog"], ""), ([], "the cat\n\na dog\n")])
def test_command_writes_lines_of_json(embedding_daemon: Daemon, arguments: list[str], given: str) -> None:
    """Each argument, or each line of the input that is not empty, is a line with its vector."""
    command = [sys.executable, "-m", "inferencecenter", "embed", *arguments, "--model", "bert"]
    reach = ["--url", embedding_daemon.url, "--token", embedding_daemon.admin_token]
    written = subprocess.run([*command, *reach], input=given, capture_output=True, text=True, check=True).stdout
    lines = [json.loads(line) for line in written.splitlines()]
    assert [line["text"] for line in lines] == ["the cat", "a dog"]
    assert {len(line["embedding"]) for line in lines} == {64}


def _engine_of(daemon: Daemon, model: str) -> int:
    """Return the process of a model's engine: the one that has its file open."""
    children = Path(f"/proc/{daemon.process.pid}/task/{daemon.process.pid}/children").read_text().split()
    return next(int(pid) for pid in children if f"/{model}.gguf" in Path(f"/proc/{pid}/maps").read_text())


@pytest.mark.slow
async def test_requests_outlive_their_engine(embedding_daemon: Daemon, openai: AsyncOpenAI) -> None:
    """Killed engines cost time, and no request."""
    texts = TEXTS * 100
    expected = await _vectors(openai, "bert", TEXTS)
    before = embedding_daemon.metric("engine_restarts_total", model="bert")
    requests = asyncio.gather(*(_vectors(openai, "bert", texts) for _ in range(4)))
    while not await asyncio.to_thread(embedding_daemon.metric, "running_turns", model="bert"):
        assert not requests.done()
    os.kill(_engine_of(embedding_daemon, "bert"), signal.SIGKILL)
    for found in await requests:
        assert len(found) == len(texts)
        for index, vector in enumerate(found):
            assert vector == pytest.approx(expected[index % len(TEXTS)], abs=1e-4)
    assert embedding_daemon.metric("engine_restarts_total", model="bert") == before + 1
    assert embedding_daemon.metric("embedding_requests_total", model="bert", finish="done") >= 5

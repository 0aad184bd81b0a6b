"""Ollama's lists and descriptions of models, and its embeddings."""

from __future__ import annotations

import asyncio
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from inferencecenter.api.ollama.models import NEVER, OLLAMA_VERSION, FileState
from inferencecenter.config.limits import AccessLimits
from inferencecenter.config.sections import EngineSettings
from inferencecenter.config.settings import bundled_model
from inferencecenter.ipc.messages import BufferUse, Embed, EmbeddingDelta, EmbeddingDone, InfillTokens
from inferencecenter.ipc.port import EngineState, EngineStatus
from inferencecenter.models.registry import ModelSpec
from tests.api.http_client import post, request
from tests.server.harness import MODEL

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from ollama import AsyncClient

    from inferencecenter.config.sections import ModelKind
    from tests.server.harness import Running


def spec(path: Path, *, kind: ModelKind = "chat") -> ModelSpec:
    """Return the stub model with a file."""
    params = {"temperature": 0.5, "stop": ["a b", "c"]}
    return ModelSpec(name="stub", path=path, engine=EngineSettings(), params=params, kind=kind)


@pytest.fixture
def filed(server: Running, monkeypatch: pytest.MonkeyPatch) -> Running:
    """A server whose model has the file of the bundled one."""
    monkeypatch.setattr(server.engine, "spec_of", lambda _name: spec(bundled_model()))
    return server


async def test_models_are_listed_with_a_tag(filed: Running, client: AsyncClient) -> None:
    """Their details come from the files."""
    (model,) = (await client.list()).models
    assert model.model == "stub:latest"
    assert model.size == bundled_model().stat().st_size
    assert model.digest is not None
    assert len(model.digest) == 64
    assert model.modified_at is not None
    assert model.modified_at.timestamp() == pytest.approx(bundled_model().stat().st_mtime)
    assert model.details is not None
    assert (model.details.format, model.details.families) == ("gguf", [model.details.family])
    assert model.details.family
    assert model.details.quantization_level
    assert model.details.parameter_size
    assert model.details.parameter_size[-1] in "KMB"
    assert filed.engine.default == "stub"


async def test_models_of_others_are_not_listed(
    serve: Callable[..., AbstractAsyncContextManager[Running]],
) -> None:
    """A token sees the models that it may use."""
    async with serve(limits=AccessLimits(models=("other",))) as server:
        for path in ("/api/tags", "/api/ps"):
            assert (await request(server, "GET", path)).json == {"models": []}
        assert (await post(server, "/api/show", {"model": "stub"})).status == 403


async def test_loaded_models_have_their_memory(filed: Running, client: AsyncClient) -> None:
    """The sizes include GPU memory; a model that is not in memory is not listed."""
    memory = (
        BufferUse(name="CUDA0", weight_bytes=100, kv_bytes=10),
        BufferUse(name="CUDA_Host", output_bytes=5),
        BufferUse(name="CPU_Mapped", weight_bytes=7),
    )
    loaded = msgspec.structs.replace(MODEL, memory=memory)
    filed.engine.become(EngineStatus(state=EngineState.READY, model=loaded))
    (model,) = (await client.ps()).models
    assert (model.name, model.size, model.size_vram, model.context_length) == ("stub:latest", 122, 110, 4096)
    assert model.expires_at is not None
    assert model.expires_at.isoformat().replace("+00:00", "Z") == NEVER
    filed.engine.become(EngineStatus(state=EngineState.ASLEEP, model=loaded))
    assert (await client.ps()).models == []


@pytest.mark.parametrize("field", ["model", "name"])
async def test_model_is_described(filed: Running, client: AsyncClient, field: str) -> None:
    """The description has the metadata of the file and the configured parameters; any field may name the model."""
    shown = (await post(filed, "/api/show", {field: "stub:latest"})).json
    assert shown == (await client.show("stub")).model_dump(mode="json", by_alias=True, exclude={"license"}) | {
        "modified_at": shown["modified_at"]
    }
    assert shown["parameters"] == 'num_ctx 4096\ntemperature 0.5\nstop "a b"\nstop "c"'
    assert shown["modelfile"].splitlines() == [
        "FROM stub",
        "PARAMETER num_ctx 4096",
        "PARAMETER temperature 0.5",
        'PARAMETER stop "a b"',
        'PARAMETER stop "c"',
    ]
    assert shown["model_info"]["general.architecture"] == shown["details"]["family"]
    assert shown["model_info"]["tokenizer.ggml.tokens"] is None
    assert shown["capabilities"][0] == "completion"
    assert shown["template"]


async def test_description_needs_a_name(server: Running) -> None:
    """The request must name an existing model."""
    missing = await post(server, "/api/show", {})
    assert (missing.status, missing.json) == (400, {"error": "model is required"})
    assert (await post(server, "/api/show", {"model": "missing"})).status == 404


@pytest.mark.parametrize(("kind", "capability"), [("embedding", ["embedding"]), ("reranking", [])])
async def test_kind_determines_the_operations_of_a_model(
    server: Running, monkeypatch: pytest.MonkeyPatch, kind: ModelKind, capability: list[str]
) -> None:
    """A model without a file is described by its settings."""
    monkeypatch.setattr(server.engine, "spec_of", lambda _name: spec(bundled_model() / "missing", kind=kind))
    shown = (await post(server, "/api/show", {"model": "stub"})).json
    assert (shown["capabilities"], shown["model_info"], shown["template"]) == (capability, {}, "")


def test_digest_changes_with_the_file(tmp_path: Path) -> None:
    """A file that is not a model has no details."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    first = FileState.of(spec(path))
    path.write_bytes(b"GGUF?")
    second = FileState.of(spec(path))
    assert first.digest != second.digest
    assert second == FileState.of(spec(path))
    assert (second.size_bytes, second.facts, second.details["family"]) == (5, None, "")


async def test_version_needs_no_token(server: Running) -> None:
    """Clients request it before anything else."""
    response = await request(server, "GET", "/api/version", token=None)
    assert (response.status, response.json) == (200, {"version": OLLAMA_VERSION})


@pytest.mark.parametrize("path", ["/api/version", "/api/tags"])
async def test_head_is_that_of_the_document(filed: Running, path: str) -> None:
    """Clients use HEAD to detect the server."""
    document, head = [await request(filed, method, path) for method in ("GET", "HEAD")]
    assert (head.status, head.body) == (200, b"")
    assert head.headers["content-length"] == str(len(document.body))


async def test_model_with_tokens_for_gaps_inserts(filed: Running, client: AsyncClient) -> None:
    """Editors complete text only with models that have this capability."""
    assert "insert" not in ((await client.show("stub")).capabilities or [])
    model = msgspec.structs.replace(MODEL, infill=InfillTokens("<P>", "<S>", "<M>"))
    filed.engine.become(EngineStatus(state=EngineState.READY, model=model))
    shown = await client.show("stub")
    assert "insert" in (shown.capabilities or [])
    assert (shown.template or "").startswith("{{ if .Suffix }}<P>{{ .Prompt }}<S>{{ .Suffix }}<M>{{ else }}")


# Embeddings.


async def send_vectors(server: Running, *vectors: tuple[float, ...]) -> None:
    """Answer the next request for embeddings."""
    server.engine.submitted.clear()
    async with asyncio.timeout(60):
        await server.engine.submitted.wait()
    ((turn_id, turn),) = server.engine.turns.items()
    packed = b"".join(struct.pack(f"<{len(vector)}f", *vector) for vector in vectors)
    server.engine.turns.clear()
    turn.on_engine_event(EmbeddingDelta(turn_id, packed, len(vectors), 3))
    turn.on_engine_event(EmbeddingDone(turn_id, 1.0, 2.0))


async def test_texts_become_vectors(server: Running, client: AsyncClient) -> None:
    """The vectors are in the order of the texts; the number of tokens is reported."""
    server.engine.kind = "embedding"
    answer, _ = await asyncio.gather(
        client.embed(model="stub:latest", input=["a", "b"], truncate=True),
        send_vectors(server, (0.5, 0.25), (1.0, 0.0)),
    )
    assert answer.embeddings == [[0.5, 0.25], [1.0, 0.0]]
    assert (answer.model, answer.prompt_eval_count) == ("stub", 3)
    assert answer.total_duration is not None


async def test_one_text_becomes_a_vector(server: Running, client: AsyncClient) -> None:
    """The older endpoint takes one text."""
    server.engine.kind = "embedding"
    answer, _ = await asyncio.gather(client.embeddings(model="stub", prompt="a"), send_vectors(server, (0.5, 0.25)))
    assert answer.embedding == [0.5, 0.25]


@pytest.mark.parametrize(
    ("sent", "expected", "warns"), [(2, 2, True), (9, 4, True), (4, 4, False)], ids=["shorter", "longer", "its own"]
)
async def test_vectors_of_any_model_are_cut(
    server: Running, monkeypatch: pytest.MonkeyPatch, sent: int, expected: int, warns: bool
) -> None:
    """Ollama does so, too; here with a warning. A number above that of the model has no effect."""
    server.engine.kind = "embedding"
    server.engine.status = replace(server.engine.status, model=msgspec.structs.replace(MODEL, n_embd=4))
    spec = replace(server.engine.spec_of("stub"), n_embd=4)
    monkeypatch.setattr(server.engine, "spec_of", lambda _name: spec)
    body = {"model": "stub", "input": "a", "dimensions": sent}
    embed = asyncio.get_running_loop().create_task(post(server, "/api/embed", body))
    async with asyncio.timeout(60):
        await server.engine.submitted.wait()
    ((turn_id, turn),) = server.engine.turns.items()
    asked = turn.submission(lambda: None)
    assert isinstance(asked, Embed)
    assert (asked.dimensions, asked.matryoshka) == (expected, True)
    turn.on_engine_event(EmbeddingDelta(turn_id, struct.pack("<f", 1.0), 1, 3))
    turn.on_engine_event(EmbeddingDone(turn_id, 1.0, 2.0))
    response = await embed
    assert response.json["embeddings"] == [[1.0]]
    assert ("dimensions" in response.headers.get("x-warning", "")) == warns


@pytest.mark.parametrize(("sent", "truncate"), [({}, True), ({"truncate": False}, False)])
async def test_texts_are_cut_unless_a_request_says_otherwise(
    server: Running, sent: dict[str, bool], truncate: bool
) -> None:
    """Ollama truncates long texts by default, too."""
    server.engine.kind = "embedding"
    embed = asyncio.get_running_loop().create_task(post(server, "/api/embed", {"model": "stub", "input": "a", **sent}))
    async with asyncio.timeout(60):
        await server.engine.submitted.wait()
    ((turn_id, turn),) = server.engine.turns.items()
    asked = turn.submission(lambda: None)
    assert isinstance(asked, Embed)
    assert asked.truncate == truncate
    turn.on_engine_event(EmbeddingDelta(turn_id, struct.pack("<f", 1.0), 1, 3))
    turn.on_engine_event(EmbeddingDone(turn_id, 1.0, 2.0))
    assert (await embed).json["embeddings"] == [[1.0]]


@pytest.mark.parametrize(
    ("path", "body", "empty"),
    [
        ("/api/embed", {}, {"embeddings": []}),
        ("/api/embed", {"input": ""}, {"embeddings": []}),
        ("/api/embed", {"input": []}, {"embeddings": []}),
        ("/api/embeddings", {}, {"embedding": []}),
        ("/api/embeddings", {"prompt": ""}, {"embedding": []}),
    ],
)
async def test_request_without_a_text_loads_the_model(
    server: Running, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], empty: dict[str, Any]
) -> None:
    """The vectors are none; ``keep_alive`` 0 unloads it, for operators."""
    loaded: list[str] = []
    monkeypatch.setattr(server.engine, "ensure_loaded", lambda name, _client_id: loaded.append(name))
    answer = await post(server, path, {"model": "stub", **body})
    assert (answer.status, answer.json | empty) == (200, answer.json)
    assert loaded == ["stub"]
    assert (await post(server, path, {"model": "stub", "keep_alive": 0, **body})).status == 403
    server.accounts.ensure_client("eve", max_sessions=3, priority="normal", scopes=("user", "operator"))
    token = server.accounts.create_token("eve").token
    assert (await post(server, path, {"model": "stub", "keep_alive": 0, **body}, token=token)).status == 200
    assert server.engine.unloaded == ["stub"]


async def test_chat_model_computes_no_vectors(server: Running) -> None:
    """The error is in Ollama's format."""
    response = await post(server, "/api/embed", {"model": "stub", "input": "a"})
    assert response.status == 400
    assert "makes no embeddings" in response.json["error"]

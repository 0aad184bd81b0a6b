"""Ollama's ``/api/pull`` and ``/api/delete``."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import TYPE_CHECKING, Any

import pytest
from ollama import ResponseError

from inferencecenter.config.sections import EngineSettings
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.models.files import ModelFiles
from inferencecenter.models.library import ModelLibrary
from inferencecenter.models.pull import Pulled, PullProgress
from inferencecenter.models.registry import ModelSpec
from tests.api.http_client import post, request
from tests.api.ollama.conftest import client_of
from tests.api.streaming import open_stream, requests_done

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.server.harness import Running

PULL = "/api/pull"
REFERENCE = "hf.co/ada/tiny:Q8_0"


@pytest.fixture
def operator(server: Running) -> str:
    """The token of an operator."""
    server.accounts.ensure_client("eve", max_sessions=3, priority="normal", scopes=("user", "operator"))
    return server.accounts.create_token("eve").token


class StubPull:
    """A download that reports its progress and ends when a test says so."""

    def __init__(self) -> None:
        self.references: list[str] = []
        self.released = threading.Event()
        self.aborted = threading.Event()
        self.failure: Exception | None = None

    def run(self, reference: str, report: Callable[[PullProgress], None]) -> Pulled:
        """Report until released."""
        self.references.append(reference)
        try:
            while True:
                report(PullProgress("tiny.gguf", 10, 100))
                if self.released.wait(0.01):
                    break
        except Exception:
            self.aborted.set()
            raise
        if self.failure is not None:
            raise self.failure
        return Pulled(ModelFiles(name="tiny", paths=(), missing=(), manifest=None), fetched=True)


@pytest.fixture
def pull(monkeypatch: pytest.MonkeyPatch) -> StubPull:
    """The download that takes the place of a real one."""
    stub = StubPull()
    monkeypatch.setattr(ModelLibrary, "pull", stub.run)
    return stub


async def test_progress_is_lines_up_to_success(server: Running, operator: str, pull: StubPull) -> None:
    """Each line has the bytes downloaded so far, and the last one is ``success``."""
    seen = []
    async with client_of(server, operator) as client:
        async for part in await client.pull(REFERENCE, stream=True):
            seen.append((part.status, part.completed, part.total))
            if part.completed:
                pull.released.set()
    assert seen[0] == ("pulling manifest", None, None)
    assert ("pulling tiny.gguf", 10, 100) in seen
    assert seen[-1] == ("success", None, None)
    assert pull.references == ["ada/tiny:Q8_0"]


async def test_document_is_the_last_status(server: Running, operator: str, pull: StubPull) -> None:
    """With ``stream`` false only the final status is returned."""
    pull.released.set()
    async with client_of(server, operator) as client:
        assert (await client.pull("ada/tiny:latest")).status == "success"
    assert pull.references == ["ada/tiny"]


@pytest.mark.parametrize(
    ("failure", "status"),
    [(InferenceCenterError(ErrorCode.HUB_UNREACHABLE, "no hub"), 503), (ZeroDivisionError(), 500)],
)
async def test_failed_download_is_an_error(
    server: Running, operator: str, pull: StubPull, failure: Exception, status: int
) -> None:
    """The error is the response, or the last line of the stream."""
    pull.failure = failure
    pull.released.set()
    async with client_of(server, operator) as client:
        with pytest.raises(ResponseError) as caught:
            await client.pull(REFERENCE)
    assert caught.value.status_code == status
    response = await post(server, PULL, {"model": REFERENCE}, token=operator)
    assert response.status == 200
    assert list(json.loads(response.body.splitlines()[-1])) == ["error"]


async def test_disconnect_aborts_the_download(server: Running, pull: StubPull) -> None:
    """The download ends at its next chunk."""
    server.accounts.ensure_client("ada", max_sessions=3, priority="normal", scopes=("user", "operator"))
    async with open_stream(server, {"model": REFERENCE}, PULL) as reader:
        await reader.readuntil(b'"completed":10')
    await requests_done(server)
    assert await asyncio.to_thread(pull.aborted.wait, 60)


@pytest.mark.parametrize("name", ["llama3.2", "a b/c", ""])
async def test_unknown_reference_is_refused(server: Running, operator: str, pull: StubPull, name: str) -> None:
    """No request is sent to the hub."""
    assert (await post(server, PULL, {"model": name}, token=operator)).status == 400
    assert pull.references == []


async def test_models_are_for_operators(server: Running, pull: StubPull) -> None:
    """Others neither pull nor copy nor delete."""
    assert (await post(server, PULL, {"model": REFERENCE})).status == 403
    assert (await request(server, "DELETE", "/api/delete", body={"model": "tiny"})).status == 403
    assert (await post(server, "/api/copy", {"source": "tiny", "destination": "small"})).status == 403
    assert pull.references == []


def tiny(server: Running, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of a model in the server's directory."""
    directory = server.context.library.directory
    directory.mkdir()
    path: Path = directory / "tiny.gguf"
    path.touch()
    found: Any = ModelSpec(name="tiny", path=path, engine=EngineSettings())
    monkeypatch.setattr(server.engine, "spec_of", lambda _name: found)
    return path


async def test_model_is_deleted(server: Running, operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file is deleted first, then its entry."""
    path = tiny(server, monkeypatch)
    forgotten: list[bool] = []
    monkeypatch.setattr(server.engine, "forget_removed", lambda: forgotten.append(path.exists()))
    async with client_of(server, operator) as client:
        await client.delete("tiny:latest")
    assert forgotten == [False]


async def test_copy_is_a_second_name(server: Running, operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both names have the same file; the first can be deleted."""
    path = tiny(server, monkeypatch)
    path.write_bytes(b"weights")
    async with client_of(server, operator) as client:
        await client.copy("tiny:latest", "small:latest")
        await client.delete("tiny")
    assert [each.name for each in path.parent.iterdir()] == ["small.gguf"]
    assert (path.parent / "small.gguf").read_bytes() == b"weights"


@pytest.mark.parametrize(
    ("destination", "message"),
    [
        ("stub:latest", "there is a model 'stub' already"),
        ("own/small", "destination"),
        ("small-00001-of-00002", "the name of a part"),
        ("taken", "taken.gguf exists already"),
    ],
)
async def test_copy_needs_a_name_of_its_own(
    server: Running, operator: str, monkeypatch: pytest.MonkeyPatch, destination: str, message: str
) -> None:
    """A copy replaces no existing model."""
    path = tiny(server, monkeypatch)
    (path.parent / "taken.gguf").write_bytes(b"another")
    body = {"source": "tiny", "destination": destination}
    response = await post(server, "/api/copy", body, token=operator)
    assert (response.status, message in response.json["error"]) == (400, True), response.json
    assert sorted(each.name for each in path.parent.iterdir()) == ["taken.gguf", "tiny.gguf"]
    assert (path.parent / "taken.gguf").read_bytes() == b"another"


async def test_model_elsewhere_is_not_copied(
    server: Running, operator: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The error says how to give the model another name."""
    found: Any = ModelSpec(name="tiny", path=tmp_path / "tiny.gguf", engine=EngineSettings())
    monkeypatch.setattr(server.engine, "spec_of", lambda _name: found)
    response = await post(server, "/api/copy", {"source": "tiny", "destination": "small"}, token=operator)
    assert (response.status, "aliases" in response.json["error"]) == (400, True)


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/api/create", "[models.NAME]"),
        ("/api/push", "models_dir"),
        ("/api/blobs/sha256:0a", "models_dir"),
    ],
)
async def test_unsupported_request_is_refused_with_an_alternative(server: Running, path: str, hint: str) -> None:
    """The error has Ollama's format, for any body."""
    response = await post(server, path, {"model": "mario", "from": "stub", "system": "You are Mario."})
    assert (response.status, list(response.json)) == (400, ["error"])
    assert hint in response.json["error"]


async def test_default_model_is_not_deleted(server: Running, operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions that name no model use it."""
    path = tiny(server, monkeypatch)
    server.engine.default = "tiny"
    response = await request(server, "DELETE", "/api/delete", body={"name": "tiny"}, token=operator)
    assert (response.status, "default" in response.json["error"]) == (400, True)
    assert path.exists()

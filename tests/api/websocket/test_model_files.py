"""The operations that download and delete models."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.models import library
from inferencecenter.models.library import ModelLibrary
from tests.api.ollama.test_library import StubPull, tiny
from tests.api.websocket.test_administration import audit_entries, connect
from tests.server.harness import Running, ask, receive

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

REFERENCE = "ada/tiny:Q8_0"


@pytest.fixture
def pull(monkeypatch: pytest.MonkeyPatch) -> StubPull:
    """The download that takes the place of a real one."""
    stub = StubPull()
    monkeypatch.setattr(ModelLibrary, "pull", stub.run)
    return stub


async def until(socket: ClientConnection, **wanted: Any) -> dict[str, Any]:
    """List the downloads until the last has these values, and return it."""
    async with asyncio.timeout(60):
        while True:
            last: dict[str, Any] = (await ask(socket, op="list_pulls"))["pulls"][-1]
            if last.items() >= wanted.items():
                return last
            await asyncio.sleep(0.01)


async def test_download_reports_progress_until_it_is_done(server: Running, pull: StubPull) -> None:
    """Another socket can read it, too; the audit log names the operator."""
    async with connect(server, "eve", "user", "operator") as eve:
        await receive(eve)
        started = await ask(eve, op="pull_model", reference=REFERENCE, id="p")
        assert (started["op"], started["id"], started["pull"]["phase"]) == ("pull", "p", "running")
        again = await ask(eve, op="pull_model", reference=REFERENCE)
        assert (again["code"], again["field"]) == ("invalid_request", "reference")
    async with connect(server, "bob", "user", "operator") as bob:
        await receive(bob)
        running = await until(bob, phase="running", done_bytes=10)
        assert running == {
            "reference": REFERENCE,
            "phase": "running",
            "requested_by": "eve",
            "file": "tiny.gguf",
            "done_bytes": 10,
            "total_bytes": 100,
            "detail": "",
        }
        pull.released.set()
        assert (await until(bob, phase="done"))["model"] == "tiny"
    assert audit_entries(server, "model_pulled") == [("eve", "127.0.0.1", REFERENCE)]


async def test_download_is_cancelled(server: Running, pull: StubPull) -> None:
    """It ends at its next chunk, and can be started again."""
    async with connect(server, "eve", "user", "operator") as eve:
        await receive(eve)
        await ask(eve, op="pull_model", reference=REFERENCE)
        assert (await ask(eve, op="cancel_pull", reference=REFERENCE))["op"] == "pull"
        assert await asyncio.to_thread(pull.aborted.wait, 60)
        await until(eve, phase="cancelled")
        refused = await ask(eve, op="cancel_pull", reference=REFERENCE)
        assert (refused["code"], refused["field"]) == ("invalid_request", "reference")
        pull.released.set()
        assert (await ask(eve, op="pull_model", reference=REFERENCE))["op"] == "pull"
        await until(eve, phase="done")
        assert len((await ask(eve, op="list_pulls"))["pulls"]) == 1
    assert audit_entries(server, "pull_cancelled") == [("eve", "127.0.0.1", REFERENCE)]


@pytest.mark.parametrize(
    ("failure", "detail"),
    [(InferenceCenterError(ErrorCode.HUB_UNREACHABLE, "no hub", hint="Wait."), "no hub. Wait."), (ValueError(), "")],
)
async def test_failed_download_has_its_reason(server: Running, pull: StubPull, failure: Exception, detail: str) -> None:
    """A defect is not taken for success."""
    pull.failure = failure
    pull.released.set()
    async with connect(server, "eve", "user", "operator") as eve:
        await receive(eve)
        await ask(eve, op="pull_model", reference=REFERENCE)
        assert detail in (await until(eve, phase="failed"))["detail"]


async def test_downloads_are_bounded(server: Running, pull: StubPull, monkeypatch: pytest.MonkeyPatch) -> None:
    """Running ones are refused, ended ones forgotten; Ollama's requests count."""
    monkeypatch.setattr(library, "MAX_ENDED_DOWNLOADS", 2)
    async with connect(server, "eve", "user", "operator") as eve:
        await receive(eve)
        for number in range(library.MAX_DOWNLOADS):
            assert (await ask(eve, op="pull_model", reference=f"ada/tiny{number}"))["op"] == "pull"
        refused = await ask(eve, op="pull_model", reference="ada/more")
        assert (refused["code"], refused["retryable"]) == ("queue_full", True)
        pull.released.set()
        await until(eve, phase="done")
        for number in range(5):
            reference = f"ada/small{number}"
            await ask(eve, op="pull_model", reference=reference)
            await until(eve, phase="done", reference=reference)
        names = [each["reference"] for each in (await ask(eve, op="list_pulls"))["pulls"]]
        assert names[-2:] == ["ada/small3", "ada/small4"]
        assert len(names) <= 3


@pytest.mark.parametrize("reference", ["tiny", "a b/c"])
async def test_malformed_reference_is_refused(server: Running, pull: StubPull, reference: str) -> None:
    """No request is sent to the hub, and nothing is logged."""
    async with connect(server, "eve", "user", "operator") as eve:
        await receive(eve)
        assert (await ask(eve, op="pull_model", reference=reference))["code"] == "invalid_request"
    assert pull.references == []
    assert audit_entries(server, "model_pulled") == []


async def test_model_is_removed(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file is deleted before the model is forgotten, and the audit log names the model."""
    path = tiny(server, monkeypatch)
    forgotten: list[bool] = []
    monkeypatch.setattr(server.engine, "forget_removed", lambda: forgotten.append(path.exists()))
    async with connect(server, "eve", "user", "operator") as eve:
        await receive(eve)
        removed = await ask(eve, op="remove_model", name="tiny", id="r")
    assert removed == {"op": "model_removed", "id": "r", "model": "tiny"}
    assert forgotten == [False]
    assert audit_entries(server, "model_removed") == [("eve", "127.0.0.1", "tiny")]


async def test_default_model_is_not_removed(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the field, and nothing is logged."""
    path = tiny(server, monkeypatch)
    server.engine.default = "tiny"
    async with connect(server, "eve", "user", "operator") as eve:
        await receive(eve)
        refused = await ask(eve, op="remove_model", name="tiny")
        assert (refused["code"], refused["field"]) == ("invalid_request", "name")
    assert path.exists()
    assert audit_entries(server, "model_removed") == []

"""The operations that list, load and unload models."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from inferencecenter.auth.audit import AuditEvent
from inferencecenter.config.limits import AccessLimits
from inferencecenter.ipc.port import EngineState
from inferencecenter.protocol.events import Swap
from inferencecenter.protocol.values import ModelSummary
from tests.server.harness import Running, ask, ready, receive

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

OPERATOR = {"X-Client-ID": "desk", "X-API-Key": "desk-key"}
OTHER = ModelSummary(name="other", default=False, state="unloaded")


@pytest.fixture
def two_models(server: Running, monkeypatch: pytest.MonkeyPatch) -> Running:
    """A server with a second model."""
    one = server.engine.describe()
    monkeypatch.setattr(server.engine, "describe", lambda: (OTHER, *one))
    return server


async def upgrade_to_v1(socket: ClientConnection) -> None:
    """Send hello and receive the welcome."""
    await receive(socket)
    await ask(socket, op="hello", protocol=1)


def limited(server: Running, client_id: str, *scopes: str, models: tuple[str, ...]) -> dict[str, str]:
    """Create a client limited to these models, and return its authorization header."""
    server.accounts.ensure_client(client_id, max_sessions=1, priority="normal", scopes=list(scopes) or ["user"])
    token = server.accounts.create_token(client_id, limits=AccessLimits(models=models)).token
    return {"Authorization": f"Bearer {token}"}


async def model_names(server: Running, headers: dict[str, str]) -> list[str]:
    """Return the models that a client sees."""
    async with server.connect(additional_headers=headers) as socket:
        await upgrade_to_v1(socket)
        answer = await ask(socket, op="list_models", id="1")
    assert (answer["op"], answer["id"]) == ("models", "1")
    return [model["name"] for model in answer["models"]]


async def test_models_are_filtered_by_permission(two_models: Running) -> None:
    """A token without a limit sees all models, others those of their limit that exist."""
    assert await model_names(two_models, {"Authorization": f"Bearer {two_models.token}"}) == ["other", "stub"]
    assert await model_names(two_models, limited(two_models, "eve", models=("stub", "gone"))) == ["stub"]
    assert await model_names(two_models, limited(two_models, "bob", models=())) == []


async def test_operators_see_all_models(two_models: Running) -> None:
    """They load and unload them whatever models their own turns may use."""
    headers = limited(two_models, "ops", "user", "operator", models=("stub",))
    assert await model_names(two_models, headers) == ["other", "stub"]


async def test_model_in_the_list(two_models: Running) -> None:
    """Unknown values are absent."""
    async with two_models.v1() as socket:
        await receive(socket)
        models = (await ask(socket, op="list_models"))["models"]
    known = {"name": "other", "default": False, "kind": "chat", "state": "unloaded", "detail": "", "vision": False}
    assert models[0] == known


@pytest.mark.parametrize("op", ["load_model", "unload_model"])
async def test_only_operators_may_swap(server: Running, op: str) -> None:
    """Others are refused, also for an unknown model, and nothing is logged."""
    async with server.v1() as socket:
        await receive(socket)
        for name in ("stub", "missing"):
            error = await ask(socket, op=op, name=name, id="1")
            assert (error["code"], error["message"], error["id"]) == (
                "forbidden",
                "this requires the scope operator",
                "1",
            )
    assert (server.engine.swaps, server.engine.unloaded) == ([], [])
    assert audit_entries(server) == []


def audit_entries(server: Running) -> list[tuple[str, str | None, str]]:
    """Return the audit log's entries about models."""
    server.accounts.flush_audit()
    kinds = (AuditEvent.MODEL_SWAPPED, AuditEvent.MODEL_UNLOADED)
    lines = [line for line in server.accounts.audit_lines(last=100) if line.event in kinds]
    return [(line.event.value, line.client_id, line.detail) for line in lines]


@pytest.mark.parametrize("op", ["load_model", "unload_model"])
@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"name": "missing"}, "model_not_found", "model"),
        ({"name": ""}, "invalid_request", "name"),
        ({}, "invalid_request", "name"),
        ({"name": ["stub"]}, "invalid_request", "name"),
        ({"name": "stub", "force": True}, "invalid_request", "force"),
    ],
)
async def test_unknown_model_is_refused(
    server: Running, op: str, fields: dict[str, Any], code: str, field: str
) -> None:
    """The error names the field and echoes the id, and nothing is logged."""
    async with server.connect(additional_headers=OPERATOR) as socket:
        await upgrade_to_v1(socket)
        error = await ask(socket, op=op, id="7", **fields)
    assert (error["code"], error["field"], error["id"]) == (code, field, "7")
    assert audit_entries(server) == []


async def test_load_progress_is_sent_to_the_requester_only(server: Running) -> None:
    """The audit log has the client and the requested model."""
    async with server.connect(additional_headers=OPERATOR) as asker, server.v1() as other:
        await upgrade_to_v1(asker)
        await receive(other)
        await asker.send('{"op": "load_model", "id": "swap-1", "name": "phi"}')
        await ask(asker, op="ping")
        ((name, tell),) = server.engine.swaps
        assert name == "phi"
        for swap in (
            Swap(model="phi", phase="draining"),
            Swap(model="phi", phase="loading", done=0.25),
            Swap(model="phi", phase="failed", detail="no such file"),
        ):
            tell(swap)
            assert await receive(asker) == {
                "op": "swap",
                "id": "swap-1",
                "model": "phi",
                "phase": swap.phase,
                "done": swap.done,
                "detail": swap.detail,
            }
        assert (await ask(other, op="ping"))["op"] == "pong"
    assert audit_entries(server) == [("model_swapped", "desk", "phi")]


async def test_default_change_is_broadcast(server: Running) -> None:
    """Sockets of the first protocol and unauthenticated ones receive nothing."""
    async with (
        server.v1() as user,
        server.connect(additional_headers=OPERATOR) as operator,
        server.connect(additional_headers={"Authorization": f"Bearer {server.token}"}) as old,
        server.connect() as stranger,
    ):
        await receive(user)
        await upgrade_to_v1(operator)
        await receive(old)
        await receive(stranger)
        server.engine.swapped("phi")
        for socket in (user, operator):
            assert await receive(socket) == {"op": "model_changed", "model": "phi", "n_ctx": 4096}
        assert (await ask(old, op="metrics"))["op"] == "metrics"
        assert (await ask(stranger, op="hello"))["op"] == "hello"


async def test_legacy_socket_receives_no_model_events(server: Running) -> None:
    """Neither their frames nor their requests are part of the first protocol."""
    async with server.connect(additional_headers=OPERATOR) as old:
        await receive(old)
        assert (await ask(old, op="load_model", name="phi"))["op"] == "error"
        assert server.engine.swaps == []
        server.engine.swapped("phi")
        server.engine.become(ready(state=EngineState.ASLEEP))
        assert (await ask(old, op="metrics"))["op"] == "metrics"


async def test_load_continues_after_the_requester_disconnects(server: Running) -> None:
    """The swap completes."""
    async with server.connect(additional_headers=OPERATOR) as socket:
        await upgrade_to_v1(socket)
        await socket.send('{"op": "load_model", "name": "phi"}')
        await ask(socket, op="ping")
    async with server.v1() as other:
        await receive(other)
        server.engine.swaps[0][1](Swap(model="phi", phase="done", done=1.0))
        server.engine.swapped("phi")
        assert (await receive(other, "model_changed"))["model"] == "phi"


async def test_model_is_unloaded(server: Running) -> None:
    """The answer is immediate, and the unload is logged."""
    async with server.connect(additional_headers=OPERATOR) as socket:
        await upgrade_to_v1(socket)
        answer = await ask(socket, op="unload_model", id="u", name="stub")
        assert answer == {"op": "model_unloaded", "id": "u", "model": "stub"}
    assert server.engine.unloaded == ["stub"]
    assert audit_entries(server) == [("model_unloaded", "desk", "stub")]


async def test_engine_events_name_other_models(server: Running) -> None:
    """Events of the default model have no name; an unused model that sleeps causes no event."""
    async with server.v1() as socket:
        await receive(socket)
        for state, detail in ((EngineState.ASLEEP, ""), (EngineState.STARTING, "")):
            server.context.engine_changed("phi", replace(ready(), state=state, detail=detail, model=None))
        assert await receive(socket) == {"op": "engine", "state": "starting", "detail": "", "model": "phi"}
        server.engine.become(ready(state=EngineState.ASLEEP))
        assert "model" not in await receive(socket, "engine")

"""Listing, loading and unloading models through the client."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from inferencecenter.client import Client, Connected, Timing
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.values import ModelSummary

if TYPE_CHECKING:
    from inferencecenter.client import Notice
    from inferencecenter.protocol.events import Swap
    from tests.client.peer import Peer, Start

DEMO = {"name": "demo", "default": True, "state": "loaded", "n_ctx": 1024, "slots": 4}
PHI = {"name": "phi", "default": False, "state": "unloaded"}


async def no_sleep(_seconds: float) -> None:
    """Return at once instead of waiting for the next attempt."""


async def swap(peer: Peer, *frames: dict[str, Any]) -> dict[str, Any]:
    """Receive a ``load_model``, answer it with these frames and return it."""
    request = await peer.receive()
    assert request["op"] == "load_model", request
    for frame in frames:
        await peer.send(op="swap", id=request["id"], model=request["name"], **frame)
    return request


async def test_models_are_listed(scripted: Start) -> None:
    """Unknown values are absent."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        request = await peer.receive()
        await peer.send(op="models", id=request["id"], models=[DEMO, PHI])

    async with Client(await scripted(daemon), token="ic_a_b") as client:
        assert await client.models() == tuple(ModelSummary.model_validate(each) for each in (DEMO, PHI))


async def test_model_is_loaded(scripted: Start) -> None:
    """The callback receives the progress; the call returns the last event of its own swap."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        await peer.send(op="swap", id="another", model="phi", phase="failed", detail="not ours")
        await swap(peer, {"phase": "draining"}, {"phase": "loading", "done": 0.5}, {"phase": "done", "done": 1.0})
        await peer.send(op="model_changed", model="phi", n_ctx=2048)
        await swap(peer, {"phase": "loading"}, {"phase": "done", "done": 1.0})

    received: list[Swap] = []
    async with Client(await scripted(daemon), token="ic_a_b") as client:
        await client.load_model("phi", on_progress=received.append)
        assert [(each.phase, each.done) for each in received] == [("draining", 0.0), ("loading", 0.5)]
        await client.load_model("phi")
        assert client.hello.model == "phi"


async def test_model_load_failure_is_raised(scripted: Start) -> None:
    """The daemon's reason is raised, and the connection stays open."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        await swap(peer, {"phase": "loading"}, {"phase": "failed", "detail": "phi.gguf ends too early"})
        await peer.refuse(await peer.receive(), "model_not_found", message="no model is named 'psi'")
        await peer.refuse(await peer.receive(), "model_loading", retryable=True, retry_after_ms=1000)

    async with Client(await scripted(daemon), token="ic_a_b") as client:
        with pytest.raises(InferenceCenterError, match=r"phi cannot be loaded: phi\.gguf ends") as failed:
            await client.load_model("phi")
        assert failed.value.code is ErrorCode.ENGINE_UNAVAILABLE
        with pytest.raises(InferenceCenterError, match="psi") as missing:
            await client.load_model("psi")
        assert missing.value.code is ErrorCode.MODEL_NOT_FOUND
        with pytest.raises(InferenceCenterError) as other:
            await client.load_model("phi")
        assert (other.value.code, other.value.retry_after_ms) == (ErrorCode.MODEL_LOADING, 1000)


async def test_connection_lost_during_load_is_not_retried(scripted: Start) -> None:
    """The outcome is unknown; a read is retried."""

    async def disconnect(peer: Peer) -> None:
        await peer.welcome()
        await swap(peer, {"phase": "loading"})
        await peer.receive()
        peer.socket.transport.abort()

    async def reconnect(peer: Peer) -> None:
        await peer.welcome()
        request = await peer.receive()
        assert request["op"] == "list_models"
        await peer.send(op="models", id=request["id"], models=[DEMO])

    notices: list[Notice] = []
    url = await scripted(disconnect, reconnect)
    async with Client(url, token="ic_a_b", on_notice=notices.append, timing=Timing(sleep=no_sleep)) as client:
        load, models = asyncio.create_task(client.load_model("phi")), asyncio.create_task(client.models())  # noqa: TID251
        with pytest.raises(InferenceCenterError, match="load_model") as lost:
            await load
        assert lost.value.code is ErrorCode.DAEMON_UNREACHABLE
        assert [each.name for each in await models] == ["demo"]
        assert any(isinstance(notice, Connected) for notice in notices)


async def test_model_is_unloaded(scripted: Start) -> None:
    """The call returns on the daemon's answer, and raises its refusal."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        request = await peer.receive()
        assert (request["op"], request["name"]) == ("unload_model", "phi")
        await peer.send(op="model_unloaded", id=request["id"], model="phi")
        await peer.refuse(await peer.receive(), "forbidden")

    async with Client(await scripted(daemon), token="ic_a_b") as client:
        await client.unload_model("phi")
        with pytest.raises(InferenceCenterError) as refused:
            await client.unload_model("phi")
        assert refused.value.code is ErrorCode.FORBIDDEN

"""Clients of protocol version 0 work unchanged and receive only what they know."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from inferencecenter.protocol.events import AnyEvent
from tests.e2e.harness import ENDLESS, run_daemon

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from websockets.asyncio.client import ClientConnection

    from tests.e2e.harness import Daemon

CLIENTS = """
[[client]]
client_id = "desk"
api_key = "a-key-of-the-first-protocol"
max_sessions = 3
"""
CREDENTIALS = {"client_id": "desk", "api_key": "a-key-of-the-first-protocol"}
KNOWN_OPS = {kind.model_fields["op"].default for kind in AnyEvent.__args__ if kind.first_protocol}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path) -> Iterator[Daemon]:
    """A daemon with a static client file."""
    folder = tmp_path_factory.mktemp("first")
    (folder / "clients.toml").write_text(CLIENTS)
    settings = {"INFERENCECENTER_AUTH__CLIENTS_FILE": str(folder / "clients.toml")}
    with run_daemon(folder / "state", demo_model_path, **settings) as running:
        yield running


async def _receive(websocket: ClientConnection) -> dict[str, Any]:
    message: dict[str, Any] = json.loads(await websocket.recv())
    assert message["op"] in KNOWN_OPS, f"an old client does not know {message}"
    assert not {"seq", "turn_id", "finish_reason", "code", "epoch", "protocol"} & message.keys(), message
    return message


async def _send(websocket: ClientConnection, **message: Any) -> None:
    await websocket.send(json.dumps(message))


@pytest.mark.parametrize("path", ["/", "/ws", "/api/inference", "/api/inference/"])
async def test_complete_exchange_on_every_path(daemon: Daemon, path: str) -> None:
    """Runs hello, hello again, auth, create_session, infer with params.temp, tokens and end with stats."""
    async with connect(f"ws://127.0.0.1:{daemon.port}{path}") as websocket:
        assert (await _receive(websocket))["op"] == "hello"
        await _send(websocket, op="hello")
        hello = await _receive(websocket)
        assert hello["status"] == "ready"
        assert hello["requires_auth"] is True
        await _send(websocket, op="auth", **CREDENTIALS)
        assert await _receive(websocket) == {"op": "auth_success", "client_id": "desk", "max_sessions": 3}
        await _send(websocket, op="create_session")
        session_id = (await _receive(websocket))["session_id"]
        await _send(
            websocket, op="infer", session_id=session_id, prompt="Hello!", params={"temp": 0.2, "max_tokens": 40}
        )
        text = ""
        while (message := await _receive(websocket))["op"] == "token":
            text += message["content"]
        assert text
        assert message["op"] == "end"
        assert set(message["stats"]) == {"ttft_ms", "total_ms", "tokens", "tps"}
        await _send(websocket, op="close_session", session_id=session_id)
        assert await _receive(websocket) == {"op": "session_closed", "session_id": session_id}


async def test_sessions_of_one_socket_generate_concurrently(daemon: Daemon) -> None:
    """Tokens of three sessions interleave on one socket, each labeled with its session."""
    headers = {"X-Client-ID": "desk", "X-API-Key": CREDENTIALS["api_key"]}
    async with connect(daemon.url, additional_headers=headers) as websocket:
        assert (await _receive(websocket))["op"] == "auth_success"
        sessions = []
        for _ in range(3):
            await _send(websocket, op="create_session")
            sessions.append((await _receive(websocket))["session_id"])
        for session_id in sessions:
            await _send(
                websocket,
                op="infer",
                session_id=session_id,
                prompt="Count from 1 to 30.",
                params={**ENDLESS, "max_tokens": 200},
            )
        order, ends = [], 0
        while ends < 3:
            message = await _receive(websocket)
            order.append(message["session_id"])
            ends += message["op"] == "end"
    assert set(order[: len(order) // 2]) == set(sessions)


async def test_abort_reports_its_status(daemon: Daemon) -> None:
    """``abort`` answers aborted while a turn runs and not_found otherwise."""
    async with connect(daemon.url) as websocket:
        await _receive(websocket)
        await _send(websocket, op="AUTH", **CREDENTIALS)
        await _receive(websocket)
        await _send(websocket, op="CREATE_SESSION")
        session_id = (await _receive(websocket))["session_id"]
        await _send(websocket, op="INFER", session_id=session_id, prompt="Count from 1 to 100.", params=ENDLESS)
        assert (await _receive(websocket))["op"] == "token"
        await _send(websocket, op="ABORT", session_id=session_id)
        rest: list[dict[str, Any]] = []
        while {"abort", "end"} - {message["op"] for message in rest}:
            rest.append(await _receive(websocket))
        assert {"op": "abort", "session_id": session_id, "status": "aborted"} in rest
        await _send(websocket, op="ABORT", session_id=session_id)
        reply = await _receive(websocket)
        if reply["op"] == "error":
            reply = await _receive(websocket)
        assert reply == {"op": "abort", "session_id": session_id, "status": "not_found"}


async def test_metrics_frames_require_a_subscription(daemon: Daemon) -> None:
    """No metrics frame comes before or after a subscription; ``gpu.temp`` is present without a GPU."""
    async with connect(daemon.url) as websocket:
        await _receive(websocket)
        await _send(websocket, op="auth", **CREDENTIALS)
        await _receive(websocket)
        await _send(websocket, op="subscribe_metrics", interval_ms=100)
        assert await _receive(websocket) == {"op": "metrics_subscribed"}
        for _ in range(2):
            metrics = await _receive(websocket)
            assert metrics["op"] == "metrics"
            assert "temp" in metrics["gpu"]
            assert {"active_generations", "total_sessions", "last_tps"} <= metrics["inference"].keys()
        await _send(websocket, op="unsubscribe_metrics")
        while (message := await _receive(websocket))["op"] == "metrics":
            pass
        assert message == {"op": "metrics_unsubscribed"}
        await _send(websocket, op="hello")
        assert (await _receive(websocket))["op"] == "hello"


async def test_wrong_credentials_are_refused(daemon: Daemon) -> None:
    """A wrong key fails on the frame with a reason and on the upgrade with 401 and a JSON body."""
    async with connect(daemon.url) as websocket:
        await _receive(websocket)
        await _send(websocket, op="auth", client_id="desk", api_key="wrong")
        failed = await _receive(websocket)
        assert failed["op"] == "auth_failed"
        assert failed["reason"]
    with pytest.raises(InvalidStatus) as refused:
        await connect(daemon.url, additional_headers={"Authorization": "Bearer ic_no_no"})
    assert refused.value.response.status_code == 401
    assert json.loads(refused.value.response.body or b"")["code"] == "not_authenticated"

"""A daemon whose model is on an RPC server that ends, is used by another program, or comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.e2e.harness import connect_client, run_daemon
from tests.gpu.daemons import GREEDY, QUESTION, SETTINGS, plan_of, told_name, unload
from tests.rpc.server import serving, settings_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.rpc.server import RpcServer

pytestmark = pytest.mark.slow


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[RpcServer]:
    """A server that daemons use."""
    with serving(monkeypatch) as running:
        yield running


async def test_server_that_ends_and_comes_back(tmp_path: Path, server: RpcServer, demo_model_path: Path) -> None:
    """A server that is killed in mid-answer costs no turn: the host ends it, and the next start uses the server."""
    settings = SETTINGS | settings_for(server.address)
    params = {"temperature": 0.0, "max_tokens": 60}
    prompt = "Count from 1 to 15."
    with run_daemon(tmp_path / "state", demo_model_path, **settings) as daemon:
        async with connect_client(daemon) as client:
            expected, _ = await client.turn(await client.create(), prompt, **params)
            recorder = await told_name(client)
            plan = await plan_of(client)
            assert plan["n_gpu_layers"] == plan["layers"]
            assert plan["devices"][0]["id"] == f"RPC0[{server.address}]"
            session, seen = await client.create(), len(client.seen)
            await client.send(op="infer", session_id=session, prompt=prompt, params=params)
            await client.until(lambda message: message["op"] == "token")
            server.kill()
            end = await client.until(lambda message: message["op"] in ("error", "end"))
            text = "".join(message["content"] for message in client.seen[seen:] if message["op"] == "token")
            assert (end["op"], text) == ("end", expected)
            assert (await plan_of(client))["n_gpu_layers"] == 0
            assert "Ada" in await recorder.turn(QUESTION, **GREEDY)
            await unload(client)
            server.start()
            assert "Ada" in await recorder.turn(QUESTION, **GREEDY)
            assert (await plan_of(client))["n_gpu_layers"] == plan["layers"]
            await recorder.described()


async def test_server_that_another_program_uses(tmp_path: Path, server: RpcServer, demo_model_path: Path) -> None:
    """The model is loaded without it, and with it at the next start."""
    settings = SETTINGS | settings_for(server.address)
    with server.connected() as other, run_daemon(tmp_path / "state", demo_model_path, **settings) as daemon:
        assert "rpc_server_unavailable" in daemon.log.read_text()
        async with connect_client(daemon) as client:
            recorder = await told_name(client)
            assert (await plan_of(client))["n_gpu_layers"] == 0
            await unload(client)
            other.close()
            assert "Ada" in await recorder.turn(QUESTION, **GREEDY)
            assert (plan := await plan_of(client))["n_gpu_layers"] == plan["layers"]

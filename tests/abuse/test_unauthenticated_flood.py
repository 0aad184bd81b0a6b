"""Unauthenticated sockets above the rate limit are refused while authenticated clients connect and keep working."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest
from websockets.asyncio.client import connect

from inferencecenter.client import Client
from inferencecenter.client.errors import TryLaterError
from tests.abuse.conftest import attack
from tests.e2e.harness import REPLY_TIMEOUT_S, connect_client, run_daemon

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.harness import Daemon

pytestmark = pytest.mark.slow

SETTINGS = {"INFERENCECENTER_ENGINE__BACKEND": "echo", "INFERENCECENTER_SERVER__UNAUTHENTICATED_PER_S": "2"}


async def connect_with_retry(daemon: Daemon) -> Client:
    """Return a client that authenticates in a frame and retries after the delay the daemon asks for."""
    client = Client(daemon.url, daemon.admin_token)
    async with asyncio.timeout(REPLY_TIMEOUT_S):
        while True:
            try:
                await client.open()
            except TryLaterError as error:
                await asyncio.sleep((error.retry_after_ms or 0) / 1000)
            else:
                return client


async def test_unauthenticated_flood_does_not_lock_out_clients(tmp_path: Path, demo_model_path: Path) -> None:
    """A token in the header connects at once; a token in a frame connects after the daemon's retry delay."""
    with run_daemon(tmp_path / "state", demo_model_path, **SETTINGS) as daemon:
        async with connect_client(daemon) as inside:
            outcomes = await attack(daemon, daemon.admin_token, "sockets without a token", 30, at_once=True)
            assert outcomes["upgraded"] >= 30
            assert outcomes["429"] >= 30
            async with connect(
                daemon.url, additional_headers={"Authorization": f"Bearer {daemon.admin_token}"}
            ) as socket:
                assert json.loads(await socket.recv())["op"] == "auth_success"
            client = await connect_with_retry(daemon)
            assert client.connected
            await client.close()
            assert (await inside.ask(op="ping"))["op"] == "pong"
        assert daemon.metric("refused_handshakes_total") >= outcomes["429"]

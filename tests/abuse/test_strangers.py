"""Sockets without a token that come too often are refused: clients still get in, and those inside go on."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest
from websockets.asyncio.client import connect

from inferencecenter.client import Client
from inferencecenter.client.errors import TryLaterError
from tests.abuse.conftest import attack
from tests.e2e.harness import REPLY_TIMEOUT_S, run_daemon, talk

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.harness import Daemon

pytestmark = pytest.mark.slow

SETTINGS = {"INFERENCECENTER_ENGINE__BACKEND": "echo", "INFERENCECENTER_SERVER__UNAUTHENTICATED_PER_S": "2"}


async def let_in(daemon: Daemon) -> Client:
    """Return a client that authenticates after the upgrade, and tries again when it is told to."""
    client = Client(daemon.url, daemon.admin_token)
    async with asyncio.timeout(REPLY_TIMEOUT_S):
        while True:
            try:
                await client.open()
            except TryLaterError as error:
                await asyncio.sleep((error.retry_after_ms or 0) / 1000)
            else:
                return client


async def test_strangers_are_refused_and_clients_get_in(tmp_path: Path, demo_model_path: Path) -> None:
    """With a token in the head at once, with one after the upgrade as soon as the daemon said that it may come."""
    with run_daemon(tmp_path / "state", demo_model_path, **SETTINGS) as daemon:
        async with talk(daemon) as inside:
            outcomes = await attack(daemon, daemon.admin_token, "sockets without a token", 30, at_once=True)
            assert outcomes["upgraded"] >= 30
            assert outcomes["429"] >= 30
            async with connect(
                daemon.url, additional_headers={"Authorization": f"Bearer {daemon.admin_token}"}
            ) as socket:
                assert json.loads(await socket.recv())["op"] == "auth_success"
            client = await let_in(daemon)
            assert client.connected
            await client.close()
            assert (await inside.ask(op="ping"))["op"] == "pong"
        assert daemon.figure("refused_handshakes_total") >= outcomes["429"]

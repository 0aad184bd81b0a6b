"""Work of aborted turns is cancelled, so another client's first request does not wait for it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from benchmarks.abuse.actions import ACTIONS
from inferencecenter.auth.rate_limits import FREE_REFUSALS
from tests.abuse.conftest import attack
from tests.e2e.harness import Daemon, command_line, connect_client, run_daemon

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path) -> Iterator[Daemon]:
    """A daemon on the demo model, which tokenizes and compiles grammars."""
    with run_daemon(tmp_path_factory.mktemp("withdrawn") / "state", demo_model_path) as running:
        yield running


@pytest.mark.parametrize("name", ["long prompts, aborted", "new schemas, aborted", "look-ups, hung up"])
async def test_new_schema_does_not_wait_for_cancelled_requests(daemon: Daemon, name: str) -> None:
    """A new schema compiles while hundreds of cancelled requests are still queued.

    Processing the cancelled work would take minutes; the answer must come within one minute.
    """
    assert name in {action.name for action in ACTIONS}
    token = await asyncio.to_thread(lambda: command_line(daemon, "token", "create", f"noisy-{len(name)}")["token"])
    outcomes = await attack(daemon, token, name, 100, at_once=True)
    assert sum(outcomes.values()) > 2 * FREE_REFUSALS, "the attack ended before its refusals were paced"
    async with connect_client(daemon) as client:
        session_id = await client.create()
        await client.send(op="infer", session_id=session_id, prompt="What is 2 + 3?", json_schema=SCHEMA)
        last = await client.until(lambda message: message["op"] in ("end", "error"))
    assert last["op"] == "end", last

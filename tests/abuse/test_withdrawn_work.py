"""Work of turns that were aborted is withdrawn: another client's first request does not wait for what is left of it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from benchmarks.abuse.acts import ACTS
from inferencecenter.auth.rate_limits import FREE_REFUSALS
from tests.abuse.conftest import attack
from tests.e2e.harness import Daemon, command_line, run_daemon, talk

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path) -> Iterator[Daemon]:
    """A daemon on the demo model: it tokenizes and compiles grammars."""
    with run_daemon(tmp_path_factory.mktemp("withdrawn") / "state", demo_model_path) as running:
        yield running


@pytest.mark.parametrize("name", ["long prompts, aborted", "new schemas, aborted", "look-ups, hung up"])
async def test_a_first_schema_waits_for_no_withdrawn_work(daemon: Daemon, name: str) -> None:
    """Hundreds of requests that were taken back are left; a schema that another client asks for is compiled at once.

    Done one after the other, what was taken back would take minutes; an answer is waited for a minute at most.
    """
    assert name in {act.name for act in ACTS}
    token = await asyncio.to_thread(lambda: command_line(daemon, "token", "create", f"noisy-{len(name)}")["token"])
    outcomes = await attack(daemon, token, name, 100, at_once=True)
    assert sum(outcomes.values()) > 2 * FREE_REFUSALS, "the attack ended before its refusals were paced"
    async with talk(daemon) as client:
        session_id = await client.create()
        await client.send(op="infer", session_id=session_id, prompt="What is 2 + 3?", json_schema=SCHEMA)
        last = await client.until(lambda message: message["op"] in ("end", "error"))
    assert last["op"] == "end", last

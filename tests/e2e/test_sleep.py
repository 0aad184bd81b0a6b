"""A daemon that nobody asks anything keeps its sockets and sessions, and nothing else."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.harness import Daemon, run_daemon, talk
from tests.e2e.witness import Witness

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.harness import Talk

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24}
TOLD = "My name is Ada. I live in Vienna."
ASKED = "What is my name?"
SETTINGS = {
    "INFERENCECENTER_ENGINE__SLEEP_AFTER_S": "0.5",
    "INFERENCECENTER_ENGINE__PREFILL_GRID_TOKENS": "16",  # what is shorter is not worth parking
}


@pytest.fixture
def sleepy(tmp_path: Path, demo_model_path: Path) -> Iterator[Daemon]:
    """A daemon whose engine falls asleep after half a second."""
    with run_daemon(tmp_path / "state", demo_model_path, **SETTINGS) as running:
        yield running


async def hears(client: Talk, state: str) -> None:
    """Wait until the engine's state is told."""
    await client.until(lambda message: message["op"] == "engine" and message["state"] == state)


def engines(daemon: Daemon) -> list[str]:
    """Return the ids of the daemon's child processes but for those of templates.

    One that has ended counts until it is waited for.
    """
    children = Path(f"/proc/{daemon.process.pid}/task/{daemon.process.pid}/children").read_text().split()
    return [pid for pid in children if b"template_worker" not in Path(f"/proc/{pid}/cmdline").read_bytes()]


async def test_it_knows_what_it_was_told_before_it_slept(sleepy: Daemon, record_property: Any) -> None:
    """No engine is left meanwhile, and the daemon is ready; the next question finds its KV, over the same socket."""
    async with talk(sleepy) as client:
        stored, private = await Witness.open(client), await Witness.open(client, store=False)
        for witness in (stored, private):
            await witness.turn(TOLD, **GREEDY)
        await hears(client, "asleep")
        assert engines(sleepy) == []
        status, body = sleepy.get("/readyz")
        assert (status, json.loads(body)["state"]) == (200, "asleep")
        assert sleepy.figure("engine_state", state="asleep") == 1
        assert (sleepy.figure("engine_ready"), sleepy.figure("parked_sessions")) == (1, 2)
        assert (await client.ask(op="hello"))["status"] == "ready"
        created = await Witness.open(client)
        begin, asked_at = len(client.seen), time.monotonic()
        await stored.infer(ASKED, **GREEDY)
        await client.until(lambda message: message["op"] == "token")
        record_property("wake_to_first_token_s", round(time.monotonic() - asked_at, 3))
        assert "Ada" in await stored.finish()
        assert stored.end["stats"]["cached_tokens"] > 0
        assert "Ada" in await private.turn(ASKED, **GREEDY)
        assert private.end["stats"]["cached_tokens"] > 0
        assert await created.turn("What is 7 plus 8?", **GREEDY)
        told = [message["state"] for message in client.seen[begin:] if message["op"] == "engine"]
        assert list(dict.fromkeys(told))[:2] == ["starting", "ready"]
        assert "restarting" not in told
        assert sleepy.figure("engine_restarts_total") == 0
        for witness in (stored, private, created):
            await witness.described()


async def test_one_that_sleeps_is_stopped_and_the_next_daemon_finds_its_sessions(
    tmp_path: Path, demo_model_path: Path
) -> None:
    """It ends at once and in order; what was on disk is there still, and what was in memory is not."""
    with run_daemon(tmp_path / "state", demo_model_path, **SETTINGS) as sleeping:
        async with talk(sleeping) as client:
            witness = await Witness.open(client)
            await witness.turn(TOLD, **GREEDY)
            await hears(client, "asleep")
        assert sleeping.stop() == 0
    assert "engine_not_suspended" not in sleeping.log.read_text(), "it waited for an engine that is not there"
    assert not any((tmp_path / "ram").iterdir())
    with run_daemon(tmp_path / "state", demo_model_path, **SETTINGS) as following:
        async with talk(following) as client:
            assert (await witness.resume(client))["resumed"] is True
            assert "Ada" in await witness.turn(ASKED, **GREEDY)
            assert witness.end["stats"]["cached_tokens"] > 0
            await witness.described()

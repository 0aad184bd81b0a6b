"""An idle daemon unloads its engine and keeps its sockets and sessions."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.harness import Daemon, connect_client, run_daemon
from tests.e2e.recording_client import RecordingClient

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.harness import SocketClient

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24}
STATEMENT = "My name is Ada. I live in Vienna."
QUESTION = "What is my name?"
SETTINGS = {
    "INFERENCECENTER_ENGINE__SLEEP_AFTER_S": "0.5",
    "INFERENCECENTER_ENGINE__PREFILL_GRID_TOKENS": "16",  # shorter sessions are not offloaded
}


@pytest.fixture
def sleepy(tmp_path: Path, demo_model_path: Path) -> Iterator[Daemon]:
    """A daemon whose engine sleeps after half a second of idleness."""
    with run_daemon(tmp_path / "state", demo_model_path, **SETTINGS) as running:
        yield running


async def wait_for_engine_state(client: SocketClient, state: str) -> None:
    """Wait until the engine reports a state."""
    await client.until(lambda message: message["op"] == "engine" and message["state"] == state)


def engine_pids(daemon: Daemon) -> list[str]:
    """Return the pids of the daemon's children, without template workers and the process that forks engines.

    An exited child counts until it is reaped.
    """
    children = Path(f"/proc/{daemon.process.pid}/task/{daemon.process.pid}/children").read_text().split()
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
    return [pid for pid, command in commands.items() if not re.search(b"template_worker|prefork", command)]


@pytest.mark.slow
async def test_session_survives_engine_sleep(sleepy: Daemon, record_property: Any) -> None:
    """The engine exits and the daemon stays ready; the next turn on the same socket reuses KV."""
    async with connect_client(sleepy) as client:
        stored, private = await RecordingClient.open(client), await RecordingClient.open(client, store=False)
        for recorder in (stored, private):
            await recorder.turn(STATEMENT, **GREEDY)
        await wait_for_engine_state(client, "asleep")
        assert engine_pids(sleepy) == []
        status, body = sleepy.get("/readyz")
        assert (status, json.loads(body)["state"]) == (200, "asleep")
        assert sleepy.metric("engine_state", state="asleep") == 1
        assert (sleepy.metric("engine_ready"), sleepy.metric("parked_sessions")) == (1, 2)
        assert (await client.ask(op="hello"))["status"] == "ready"
        created = await RecordingClient.open(client)
        begin, asked_at = len(client.seen), time.monotonic()
        await stored.infer(QUESTION, **GREEDY)
        await client.until(lambda message: message["op"] == "token")
        record_property("wake_to_first_token_s", round(time.monotonic() - asked_at, 3))
        assert "Ada" in await stored.finish()
        assert stored.end["stats"]["cached_tokens"] > 0
        assert "Ada" in await private.turn(QUESTION, **GREEDY)
        assert private.end["stats"]["cached_tokens"] > 0
        assert await created.turn("What is 7 plus 8?", **GREEDY)
        told = [message["state"] for message in client.seen[begin:] if message["op"] == "engine"]
        assert list(dict.fromkeys(told))[:2] == ["starting", "ready"]
        assert "restarting" not in told
        assert sleepy.metric("engine_restarts_total") == 0
        for recorder in (stored, private, created):
            await recorder.described()


@pytest.mark.slow
async def test_restart_while_asleep_keeps_sessions(tmp_path: Path, demo_model_path: Path) -> None:
    """A sleeping daemon stops in order; KV on disk survives, KV in RAM does not."""
    with run_daemon(tmp_path / "state", demo_model_path, **SETTINGS) as sleeping:
        async with connect_client(sleeping) as client:
            recorder = await RecordingClient.open(client)
            await recorder.turn(STATEMENT, **GREEDY)
            await wait_for_engine_state(client, "asleep")
        assert sleeping.stop() == 0
    assert "engine_not_suspended" not in sleeping.log.read_text(), "it waited for an engine that is not there"
    assert not any((tmp_path / "ram").iterdir())
    with run_daemon(tmp_path / "state", demo_model_path, **SETTINGS) as following:
        async with connect_client(following) as client:
            assert (await recorder.resume(client))["resumed"] is True
            assert "Ada" in await recorder.turn(QUESTION, **GREEDY)
            assert recorder.end["stats"]["cached_tokens"] > 0
            await recorder.described()

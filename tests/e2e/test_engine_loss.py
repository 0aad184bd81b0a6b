"""The daemon survives the loss of its engine process, and the next turn works."""

from __future__ import annotations

import os
import select
import signal
from typing import TYPE_CHECKING

import pytest

from tests.e2e.harness import ENDLESS, connect_client, run_daemon

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.harness import Daemon

GREEDY = {"temperature": 0.0, "max_tokens": 60}


@pytest.fixture
def daemon(tmp_path: Path, demo_model_path: Path) -> Iterator[Daemon]:
    """A daemon for this module, whose engine is killed."""
    with run_daemon(
        tmp_path / "state", demo_model_path, INFERENCECENTER_ENGINE__RESTART_BACKOFF_MIN_S="0.1"
    ) as running:
        yield running


async def test_turn_and_session_survive_an_engine_kill(daemon: Daemon) -> None:
    """After SIGKILL mid-answer the turn ends on the same socket, and the session keeps its history."""
    async with connect_client(daemon) as client:
        session = await client.create()
        await client.turn(session, "My name is Ada.", **GREEDY)
        first_pid = daemon.engine_pid()
        params = {**ENDLESS, "max_tokens": 400}
        await client.send(op="infer", session_id=session, prompt="Count from 1 to 100.", params=params)
        await client.until(lambda message: message["op"] == "token")
        os.kill(first_pid, signal.SIGKILL)
        end = await client.until(lambda message: message["op"] in ("error", "end"))
        assert (end["op"], end["finish_reason"]) == ("end", "length")
        assert end["usage"]["completion_tokens"] == 400
        told = [message["state"] for message in client.seen if message["op"] == "engine"]
        assert told[-2:] == ["restarting", "ready"]
        assert daemon.engine_pid() != first_pid
        text, _ = await client.turn(session, "What is my name?", **GREEDY)
    assert "Ada" in text


async def test_engine_exits_when_the_daemon_is_killed(daemon: Daemon) -> None:
    """SIGKILL of the daemon leaves no engine behind."""
    pid = daemon.engine_pid()
    engine = os.pidfd_open(pid)
    try:
        daemon.process.kill()
        daemon.process.wait()
        ended = _ends_within(engine, seconds=10)
    finally:
        os.close(engine)
    assert ended, f"engine {pid} outlived its daemon"


def _ends_within(pidfd: int, *, seconds: float) -> bool:
    """Wait for a process through its pidfd, which becomes readable when it exits."""
    return bool(select.select([pidfd], [], [], seconds)[0])

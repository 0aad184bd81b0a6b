"""A token quota on a real daemon ends an answer, and survives restarts and crashes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.harness import Daemon, connect_client, start_daemon

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.harness import SocketClient

ECHO = {"INFERENCECENTER_ENGINE__BACKEND": "echo", "INFERENCECENTER_ENGINE__ECHO_DELAY_MS": "1"}
ENDLESS = {"ignore_eos": True, "max_tokens": 4000}


def set_limit(daemon: Daemon, assignment: str) -> None:
    """Set a limit of the administrator's token with the command line."""
    token_id = daemon.admin_token.split("_")[1]
    done = subprocess.run(
        [sys.executable, "-m", "inferencecenter", "token", "limits", token_id, assignment, "--json"],
        env={"INFERENCECENTER_STATE_DIR": str(daemon.state_dir), "PATH": "/usr/bin:/bin"},
        check=True,
        capture_output=True,
    )
    assert json.loads(done.stdout)["daemon_notified"] is True


async def counted_tokens(client: SocketClient) -> int:
    """Return the tokens counted today, which equal the stored usage while no turn runs."""
    report = await client.ask(op="usage", days=1)
    left: dict[str, Any] = report["left"]
    if not left["turns"]:
        kept = [day["prompt_tokens"] - day["cached_tokens"] + day["completion_tokens"] for day in report["days"]]
        assert sum(kept) == left["tokens_today"]
    return int(left["tokens_today"])


async def exhaust_quota(daemon: Daemon) -> tuple[str, int]:
    """Let an answer exhaust the quota; return its session and the tokens used."""
    async with connect_client(daemon) as client:
        session_id = await client.create()
        await client.turn(session_id, "one two three", max_tokens=5)
        quota = await counted_tokens(client) + 100
        await asyncio.to_thread(set_limit, daemon, f"tokens_per_day={quota}")
        text, end = await client.turn(session_id, "four five six", **ENDLESS)
        assert end["finish_reason"] == "quota_exceeded"
        assert 0 < end["usage"]["completion_tokens"] <= 150
        transcript = (await client.ask(op="get_session", session_id=session_id))["transcript"]
        assert (transcript[-1]["content"], bool(text)) == (text, True)
        total = await counted_tokens(client)
        assert quota <= total <= quota + 50, "work in flight at exhaustion is counted"
        await assert_refused(client, session_id)
        return session_id, total


async def assert_refused(client: SocketClient, session_id: str) -> None:
    """Assert that another turn is refused."""
    error = await client.ask(op="infer", session_id=session_id, prompt="more")
    assert error["code"] == "quota_exceeded"
    assert 0 < error["retry_after_ms"] <= 86_400_000


async def start_turn_under_new_quota(daemon: Daemon, session_id: str, *, total: int) -> int:
    """Assert that the usage survived, raise the quota and start a turn; return the quota."""
    async with connect_client(daemon) as client:
        assert await counted_tokens(client) == total
        await assert_refused(client, session_id)
        quota = total + 500
        await asyncio.to_thread(set_limit, daemon, f"tokens_per_day={quota}")
        await client.send(op="infer", session_id=session_id, prompt="seven eight nine", params=ENDLESS)
        while await counted_tokens(client) < total + 50:
            pass
        return quota


async def assert_turn_ends_at_quota(daemon: Daemon, session_id: str, *, quota: int) -> None:
    """Assert that the interrupted turn resumes and ends when the quota is used up."""
    async with connect_client(daemon) as client:
        resumed = await client.ask(op="resume_session", session_id=session_id)
        if "turn_id" in resumed:
            end = await client.until(lambda message: message["op"] == "end")
        else:  # on a busy machine it has ended before this socket is attached
            end = resumed["turns"][-1]
        assert end["finish_reason"] == "quota_exceeded"
        assert quota <= await counted_tokens(client) <= quota + 100
        await assert_refused(client, session_id)


@pytest.mark.slow
def test_quota_survives_restart_and_crash(tmp_path: Path, demo_model_path: Path) -> None:
    """Usage survives a stop and a kill, and a turn interrupted by a kill resumes within its quota."""
    daemon = start_daemon(tmp_path / "state", demo_model_path, **ECHO)
    try:
        daemon.wait_ready()
        session_id, total = asyncio.run(exhaust_quota(daemon))
        assert daemon.stop() == 0
        daemon = start_daemon(tmp_path / "state", demo_model_path, **ECHO)
        daemon.wait_ready()
        quota = asyncio.run(start_turn_under_new_quota(daemon, session_id, total=total))
        daemon.process.kill()
        daemon.process.wait()
        daemon = start_daemon(tmp_path / "state", demo_model_path, **ECHO)
        daemon.wait_ready()
        asyncio.run(assert_turn_ends_at_quota(daemon, session_id, quota=quota))
    finally:
        if daemon.process.poll() is None:
            daemon.stop()

"""A token's quota on a real daemon: it runs out in the middle of an answer, and no restart or crash forgets it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.harness import Daemon, start_daemon, talk

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.harness import Talk

ECHO = {"INFERENCECENTER_ENGINE__BACKEND": "echo", "INFERENCECENTER_ENGINE__ECHO_DELAY_MS": "1"}
ENDLESS = {"ignore_eos": True, "max_tokens": 4000}


def limit(daemon: Daemon, assignment: str) -> None:
    """Limit the administrator's token as the command line does."""
    token_id = daemon.admin_token.split("_")[1]
    done = subprocess.run(
        [sys.executable, "-m", "inferencecenter", "token", "limits", token_id, assignment, "--json"],
        env={"INFERENCECENTER_STATE_DIR": str(daemon.state_dir), "PATH": "/usr/bin:/bin"},
        check=True,
        capture_output=True,
    )
    assert json.loads(done.stdout)["daemon_notified"] is True


async def used(client: Talk) -> int:
    """Tokens that count, as the daemon says; today's sum of what it has written down is the same while nothing runs."""
    report = await client.ask(op="usage", days=1)
    left: dict[str, Any] = report["left"]
    if not left["turns"]:
        kept = [day["prompt_tokens"] - day["cached_tokens"] + day["completion_tokens"] for day in report["days"]]
        assert sum(kept) == left["tokens_today"]
    return int(left["tokens_today"])


async def until_exhausted(daemon: Daemon) -> tuple[str, int]:
    """Let an answer run into the quota; return its session and what was used."""
    async with talk(daemon) as client:
        session_id = await client.create()
        await client.turn(session_id, "one two three", max_tokens=5)
        quota = await used(client) + 100
        await asyncio.to_thread(limit, daemon, f"tokens_per_day={quota}")
        text, end = await client.turn(session_id, "four five six", **ENDLESS)
        assert end["finish_reason"] == "quota_exceeded"
        assert 0 < end["usage"]["completion_tokens"] <= 150
        transcript = (await client.ask(op="get_session", session_id=session_id))["transcript"]
        assert (transcript[-1]["content"], bool(text)) == (text, True)
        total = await used(client)
        assert quota <= total <= quota + 50, "what was under way when the last token was used is taken"
        await refused(client, session_id)
        return session_id, total


async def refused(client: Talk, session_id: str) -> None:
    """Ask for a turn that there may not be."""
    error = await client.ask(op="infer", session_id=session_id, prompt="more")
    assert error["code"] == "quota_exceeded"
    assert 0 < error["retry_after_ms"] <= 86_400_000


async def begin(daemon: Daemon, session_id: str, *, total: int) -> int:
    """See that nothing is forgotten, and let another answer begin; return the quota of now."""
    async with talk(daemon) as client:
        assert await used(client) == total
        await refused(client, session_id)
        quota = total + 500
        await asyncio.to_thread(limit, daemon, f"tokens_per_day={quota}")
        await client.send(op="infer", session_id=session_id, prompt="seven eight nine", params=ENDLESS)
        while await used(client) < total + 50:
            pass
        return quota


async def go_on(daemon: Daemon, session_id: str, *, quota: int) -> None:
    """See the answer that was cut off go on until its quota is used up, no later than if nothing had happened."""
    async with talk(daemon) as client:
        await client.ask(op="resume_session", session_id=session_id)
        end = await client.until(lambda message: message["op"] == "end")
        assert end["finish_reason"] == "quota_exceeded"
        assert quota <= await used(client) <= quota + 100
        await refused(client, session_id)


@pytest.mark.slow
def test_a_quota_outlives_the_daemon(tmp_path: Path, demo_model_path: Path) -> None:
    """What was used today is known after an orderly stop, and a turn that a crash cut off goes on within its quota."""
    daemon = start_daemon(tmp_path / "state", demo_model_path, **ECHO)
    try:
        daemon.wait_ready()
        session_id, total = asyncio.run(until_exhausted(daemon))
        assert daemon.stop() == 0
        daemon = start_daemon(tmp_path / "state", demo_model_path, **ECHO)
        daemon.wait_ready()
        quota = asyncio.run(begin(daemon, session_id, total=total))
        daemon.process.kill()
        daemon.process.wait()
        daemon = start_daemon(tmp_path / "state", demo_model_path, **ECHO)
        daemon.wait_ready()
        asyncio.run(go_on(daemon, session_id, quota=quota))
    finally:
        if daemon.process.poll() is None:
            daemon.stop()

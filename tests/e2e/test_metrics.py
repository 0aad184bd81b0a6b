"""The metrics page after turns of real clients with the demo model."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING, cast

import pytest

from tests.e2e.harness import Daemon, connect_client

if TYPE_CHECKING:
    from pathlib import Path
    from subprocess import Popen

QUESTION = "What can you tell me about rivers? " * 4


async def test_metrics_agree_with_what_the_client_received(daemon: Daemon) -> None:
    """Tokens, cached prompts, steps, times and processes agree with the client's events."""
    async with connect_client(daemon) as client:
        session = await client.create()
        await client.turn(session, "Hello!", temperature=0.0, max_tokens=8)
        before = daemon.metrics()
        _, end = await client.turn(session, QUESTION, temperature=0.0, max_tokens=8)
    after, stats = daemon.metrics(), end["stats"]

    def rise(name: str, **labels: str) -> float:
        return after.value(name, **labels) - before.value(name, **labels)

    assert rise("generated_tokens_total") == stats["tokens"]
    assert rise("time_to_first_token_seconds_count") == 1
    assert rise("step_seconds_count") >= stats["tokens"]
    assert rise("batch_turns_sum") == rise("inter_token_seconds_count") == stats["tokens"] - 1
    assert rise("prompt_tokens_total", source="slot") == stats["cached_tokens"] > 0
    assert rise("prompt_tokens_total", source="computed") == stats["prompt_tokens"] - stats["cached_tokens"] > 0
    assert rise("prefill_tokens_total") == stats["prompt_tokens"] - stats["cached_tokens"]
    assert rise("decode_seconds_total") > 0
    assert rise("prefill_seconds_total") > 0
    for process in ("front", "engine"):
        assert after.value("process_cpu_seconds_total", process=process) > 0
        assert after.value("process_resident_memory_bytes", process=process) > 2**20
    assert after.value("slots") > 0
    assert after.value("engine_state", state="ready") == 1


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not on PATH")
def test_promtool_accepts_the_metrics_page(daemon: Daemon) -> None:
    """Names, types and help follow Prometheus's conventions."""
    page = daemon.get("/metrics")[1]
    done = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_blocked_loop_is_warned_of(tmp_path: Path) -> None:
    """Steps of the event loop are judged by CPU time, so that a stall of the machine is no warning."""
    log = tmp_path / "daemon.log"
    log.write_text('{"event": "loop_blocked", "lag_ms": 4000, "cpu_ms": 249}\n')
    daemon = Daemon(process=cast("Popen[bytes]", None), port=0, state_dir=tmp_path, log=log)
    daemon.warn_of_blocked_loop()
    log.write_text('{"event": "loop_blocked", "lag_ms": 300, "cpu_ms": 250, "line": "server/hub.py:1 walk"}\n')
    with pytest.warns(UserWarning, match=r"blocked.*hub\.py"):
        daemon.warn_of_blocked_loop()

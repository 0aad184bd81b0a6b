"""What the page of metrics says of turns that real clients had with the demo model."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING, cast

import pytest

from tests.e2e.harness import Daemon, talk

if TYPE_CHECKING:
    from pathlib import Path
    from subprocess import Popen

QUESTION = "What can you tell me about rivers? " * 4


async def test_turns_are_measured_from_both_processes(daemon: Daemon) -> None:
    """Tokens, prompts by where they were found, steps, times and processes agree with what the client was told."""
    async with talk(daemon) as client:
        session = await client.create()
        await client.turn(session, "Hello!", temperature=0.0, max_tokens=8)
        before = daemon.figures()
        _, end = await client.turn(session, QUESTION, temperature=0.0, max_tokens=8)
    after, stats = daemon.figures(), end["stats"]

    def rise(name: str, **labels: str) -> float:
        return after.of(name, **labels) - before.of(name, **labels)

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
        assert after.of("process_cpu_seconds_total", process=process) > 0
        assert after.of("process_resident_memory_bytes", process=process) > 2**20
    assert after.of("slots") > 0
    assert after.of("engine_state", state="ready") == 1


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not on PATH")
def test_promtool_has_nothing_to_say_against_the_page(daemon: Daemon) -> None:
    """Names, types and help are as Prometheus wants them."""
    page = daemon.get("/metrics")[1]
    done = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_a_daemon_whose_loop_was_blocked_fails_its_test(tmp_path: Path) -> None:
    """The check at the end of each daemon can fail: on CPU time, and not on a stall of the machine."""
    log = tmp_path / "daemon.log"
    log.write_text('{"event": "loop_blocked", "lag_ms": 4000, "cpu_ms": 249}\n')
    daemon = Daemon(process=cast("Popen[bytes]", None), port=0, state_dir=tmp_path, log=log)
    daemon.assert_loop_was_free()
    log.write_text('{"event": "loop_blocked", "lag_ms": 300, "cpu_ms": 250, "line": "server/hub.py:1 walk"}\n')
    with pytest.raises(AssertionError, match=r"hub\.py"):
        daemon.assert_loop_was_free()

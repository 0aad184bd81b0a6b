"""Turns that wait and turns that leave, and what an engine leaves to the next one."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

from structlog.testing import capture_logs

from inferencecenter.ipc.messages import Delta, Finished, Overflowed
from inferencecenter.ipc.port import EngineState
from tests.supervisor.harness import TIMEOUT_S, Heard, Watched

if TYPE_CHECKING:
    from pathlib import Path

LONG = "a text that is long enough to be worth parking, which a few words would not be"


async def ready(**options: object) -> Watched:
    """Return a supervisor whose engine is ready."""
    watched = Watched(**options)  # type: ignore[arg-type]
    await watched.supervisor.start()
    await watched.until(EngineState.READY)
    return watched


async def end_of(heard: Heard) -> Finished:
    """Wait until a turn has finished and return how."""
    await asyncio.wait_for(heard.ended.wait(), TIMEOUT_S)
    (end,) = heard.terminal
    assert isinstance(end, Finished)
    return end


def files(directory: Path) -> list[str]:
    """Return what is in a directory."""
    return [path.name for path in directory.iterdir()]


async def test_a_long_queue_is_logged_once() -> None:
    """Four turns that wait for one slot are one line, which says how many."""
    watched = await ready(slots=1, queue_warning=3, echo_delay_ms=5, quantum_tokens=1_000_000)
    with capture_logs() as logs:
        for turn in [watched.submit(f"t{n}") for n in range(5)]:
            await end_of(turn)
    await watched.supervisor.stop()
    (line,) = [line for line in logs if line["event"] == "queue_long"]
    assert (line["log_level"], line["waiting"] >= 3) == ("warning", True)


async def test_a_turn_that_overflowed_can_be_submitted_again() -> None:
    """Its event is the last of the submission, and the name is free for the next one."""
    watched = await ready(n_ctx=64)
    first = watched.submit("t", LONG[:20], may_shift=True, params_json=b'{"ignore_eos":true,"max_tokens":30}')
    await asyncio.wait_for(first.ended.wait(), TIMEOUT_S)
    (overflowed,) = first.terminal
    assert isinstance(overflowed, Overflowed)
    assert "turns=0" in repr(watched.supervisor)
    said = b"".join(event.tokens for event in first.events if isinstance(event, Delta))
    again = watched.submit("t", "x", answer=said, params_json=b'{"ignore_eos":true,"max_tokens":30}')
    assert (await end_of(again)).generated_tokens == 30
    await watched.supervisor.stop()


async def test_what_is_parked_outlives_the_engine_and_not_the_daemon(tmp_path: Path) -> None:
    """The next engine takes it over; the first engine of another daemon deletes it."""
    options = {"slots": 1, "kv_ram_dir": str(tmp_path), "kv_ram_bytes": 2**20}
    watched = await ready(**options)
    for name in ("s1", "s2"):
        await end_of(watched.submit(name, LONG))
    before = watched.supervisor.status
    assert before.parked_sessions == 1
    assert before.parked_bytes > 0
    assert before.pid is not None
    os.kill(before.pid, signal.SIGKILL)
    await watched.until(EngineState.READY)
    assert (await end_of(watched.submit("s1", LONG))).cached_tokens > 0
    await watched.supervisor.stop()
    assert files(tmp_path)
    watched = await ready(**options)
    assert not files(tmp_path)
    assert (await end_of(watched.submit("s1", LONG))).cached_tokens == 0
    await watched.supervisor.stop()

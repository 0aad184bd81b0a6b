"""Waiting and leaving turns, and KV recovered by the next engine."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from inferencecenter.ipc.engine_options import KvCachePaths
from inferencecenter.ipc.messages import ContextFull, TokenDelta
from inferencecenter.ipc.port import EngineState
from tests.supervisor.harness import TIMEOUT_S, ObservedSupervisor, end_of

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("stopped")
LONG = "a text that is long enough to be worth parking, which a few words would not be"


async def ready(**options: object) -> ObservedSupervisor:
    """Return a supervisor whose engine is ready."""
    watched = ObservedSupervisor(**options)  # type: ignore[arg-type]
    watched.supervisor.start()
    await watched.until(EngineState.READY)
    return watched


async def test_long_queue_is_logged_once() -> None:
    """Four turns that wait for one slot are one line, with their number."""
    watched = await ready(slots=1, queue_warning=3, echo_delay_ms=5, quantum_tokens=1_000_000)
    with capture_logs() as logs:
        for turn in [watched.submit(f"t{n}") for n in range(5)]:
            await end_of(turn)
    await watched.supervisor.stop()
    (line,) = [line for line in logs if line["event"] == "queue_long"]
    assert (line["log_level"], line["waiting"] >= 3) == ("warning", True)


async def test_overflowed_turn_can_be_resubmitted() -> None:
    """The overflow is the last event of the submission, and the turn's id is free again."""
    watched = await ready(n_ctx=64)
    first = watched.submit("t", LONG[:20], may_shift=True, params_json=b'{"ignore_eos":true,"max_tokens":30}')
    await asyncio.wait_for(first.ended.wait(), TIMEOUT_S)
    (overflowed,) = first.terminal
    assert isinstance(overflowed, ContextFull)
    assert "turns=0" in repr(watched.supervisor)
    said = b"".join(event.tokens for event in first.events if isinstance(event, TokenDelta))
    again = watched.submit("t", "x", answer=said, params_json=b'{"ignore_eos":true,"max_tokens":30}')
    assert (await end_of(again)).generated_tokens == 30
    await watched.supervisor.stop()


async def cached(watched: ObservedSupervisor, session: str, *, durable: bool = True) -> int:
    """Run a turn in a session with its own client, and return the number of cached tokens."""
    return (await end_of(watched.submit(session, LONG, client_id=session, durable=durable))).cached_tokens


def wait_until_sealed(directory: Path, n_files: int) -> None:
    """Wait until this many entries have their header, which a worker writes; without it a file is invalid."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while sum(any(path.read_bytes()[:8]) for path in directory.rglob("*") if path.is_file()) < n_files:
        assert time.monotonic() < deadline_s, "too few sequences were sealed"
        time.sleep(0.01)


async def test_offloaded_kv_survives_the_engine(tmp_path: Path) -> None:
    """The next engine recovers all of it; the first engine of another daemon what may be on a disk."""
    options = {"slots": 1, "kv": KvCachePaths(ram_dir=tmp_path, ram_bytes=2**20)}
    watched = await ready(**options)
    for name in ("kept", "secret", "last"):
        assert await cached(watched, name, durable=name != "secret") == 0
    before = watched.supervisor.status
    assert before.parked_sessions == 2
    assert before.parked_bytes > 0
    await asyncio.to_thread(wait_until_sealed, tmp_path, 2)
    watched.kill()
    await watched.until(EngineState.READY)
    assert await cached(watched, "secret", durable=False) > 0
    assert await cached(watched, "kept") > 0
    assert await cached(watched, "last") == 0
    await watched.supervisor.stop()
    watched = await ready(**options)
    assert await cached(watched, "secret", durable=False) == 0
    assert await cached(watched, "kept") > 0
    await watched.supervisor.stop()


async def test_new_engine_keeps_kv_of_open_sessions(tmp_path: Path) -> None:
    """They are listed each time an engine is ready; other entries are dropped."""
    live = {"open", "closed"}
    options = {"slots": 1, "kv": KvCachePaths(ram_dir=tmp_path, ram_bytes=2**20)}
    watched = await ready(**options, live_sessions=lambda: live)
    for name in ("open", "closed", "last"):
        await cached(watched, name)
    live.remove("closed")
    await asyncio.to_thread(wait_until_sealed, tmp_path, 2)
    watched.kill()
    await watched.until(EngineState.READY)
    assert await cached(watched, "closed") == 0
    assert await cached(watched, "open") > 0
    await watched.supervisor.stop()

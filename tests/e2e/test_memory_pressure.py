"""Memory pressure while turns run, as a client sees it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from tests.e2e.full_daemon import USED_VARIABLE
from tests.e2e.harness import Daemon, Message, connect_client, run_daemon, start_daemon, stopped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.e2e.harness import SocketClient

ECHO = {
    "INFERENCECENTER_ENGINE__BACKEND": "echo",
    "INFERENCECENTER_ENGINE__ECHO_DELAY_MS": "2",
    "INFERENCECENTER_ENGINE__SLOTS": "1",
    "INFERENCECENTER_ENGINE__PREFILL_GRID_TOKENS": "16",  # shorter sessions are not offloaded
    "INFERENCECENTER_ENGINE__QUANTUM_TOKENS": "1000000",
    "INFERENCECENTER_KV__DISK_MIB": "0",
}
LONG = "a story about the sea and the old harbour " * 6


@contextlib.contextmanager
def daemon_under_pressure(tmp_path: Path, model: Path) -> Iterator[tuple[Daemon, Callable[[int], None]]]:
    """Run a daemon of one slot; yield it with a function that sets the machine's memory use."""
    gauge = tmp_path / "memory"

    def fill(percent: int) -> None:
        (tmp_path / "next").write_text(str(percent))
        (tmp_path / "next").rename(gauge)  # written atomically

    fill(50)
    settings = ECHO | {USED_VARIABLE: str(gauge)}
    daemon = start_daemon(tmp_path / "state", model, program="tests.e2e.full_daemon", **settings)
    try:
        daemon.wait_ready()
        yield daemon, fill
    finally:
        if daemon.process.poll() is None:
            daemon.stop()


async def wait_pressure(client: SocketClient, state: str) -> dict[str, Any]:
    """Poll the status until memory pressure has a level, and return it."""
    while True:
        values: dict[str, Any] = (await client.ask(op="status", type="memory"))["values"]
        if values["pressure"] == state:
            return values


def is_memory_refusal(message: Message) -> bool:
    """Whether a frame refuses a turn for lack of memory."""
    return (message["op"], message.get("code")) == ("error", "overloaded")


def ends_turn(session_id: str) -> Callable[[Message], bool]:
    """Return a predicate for the end of a session's turn."""
    return lambda message: message["op"] == "end" and message["session_id"] == session_id


async def test_memory_pressure_evicts_kv_then_refuses_turns(tmp_path: Path, demo_model_path: Path) -> None:
    """Pressure evicts offloaded KV, then new turns are refused while running and queued ones go on.

    With memory free again turns start, and evicted KV is recomputed.
    """
    with daemon_under_pressure(tmp_path, demo_model_path) as (daemon, fill):
        async with connect_client(daemon) as client:
            old, running, waiting = [await client.create() for _ in range(3)]
            await client.turn(old, "some words to remember")
            await client.send(op="infer", session_id=running, prompt=LONG)
            await client.until(lambda message: message["op"] == "token" and message["session_id"] == running)
            await client.send(op="infer", session_id=waiting, prompt="and who am I?")
            assert (await wait_pressure(client, "easy"))["parked_ram_bytes"] > 0
            with stopped(daemon.engine_pid()):  # its turns must still run
                fill(96)
                metrics = await wait_pressure(client, "full")
                refusal = await client.ask(op="infer", session_id=old, prompt="may I?")
            assert (metrics["memory_used_bytes"], metrics["memory_limit_bytes"]) == (
                2**30 * 96 // 100,
                2**30 * 95 // 100,
            )
            assert is_memory_refusal(refusal)
            assert (refusal["retryable"], refusal["retry_after_ms"]) == (True, 5000)
            assert not any(map(ends_turn(running), client.seen))
            assert 'inferencecenter_memory_pressure{state="full"} 1.0' in daemon.get("/metrics")[1]
            texts = {running: LONG, waiting: "and who am I?"}
            for session_id, text in texts.items():
                await client.until(ends_turn(session_id))
                tokens = [m["content"] for m in client.seen if m["op"] == "token" and m["session_id"] == session_id]
                assert "".join(tokens) == text
            assert (await wait_pressure(client, "full"))["parked_ram_bytes"] == 0
            fill(50)
            await wait_pressure(client, "shedding")
            text, end = await client.turn(old, "now?")
            assert (text, end["stats"]["cached_tokens"]) == ("now?", 0)
    log = daemon.log.read_text()
    assert "no turn begins" in log
    assert "memory: 983 of 972 MiB" in log


async def test_rss_ceiling_refuses_turns(tmp_path: Path, demo_model_path: Path) -> None:
    """A ceiling below the processes' real RSS refuses every turn; sessions can be created and read."""
    settings = ECHO | {"INFERENCECENTER_MEMORY__RAM_CEILING_MIB": "1"}
    with run_daemon(tmp_path / "state", demo_model_path, **settings) as daemon:
        async with connect_client(daemon) as client:
            session_id = await client.create()
            metrics = await wait_pressure(client, "full")
            assert metrics["memory_used_bytes"] > 20 * 2**20
            assert metrics["memory_limit_bytes"] == 2**20
            assert is_memory_refusal(await client.ask(op="infer", session_id=session_id, prompt="may I?"))
            assert (await client.ask(op="get_session", session_id=session_id))["state"] == "idle"


async def test_memory_monitor_can_be_disabled(tmp_path: Path, demo_model_path: Path) -> None:
    """Without the monitor no ceiling applies."""
    settings = ECHO | {"INFERENCECENTER_MEMORY__RAM_CEILING_MIB": "1", "INFERENCECENTER_MEMORY__GUARD": "false"}
    with run_daemon(tmp_path / "state", demo_model_path, **settings) as daemon:
        async with connect_client(daemon) as client:
            assert (await client.turn(await client.create(), "may I?"))[0] == "may I?"
            assert (await wait_pressure(client, "easy"))["memory_used_bytes"] is None

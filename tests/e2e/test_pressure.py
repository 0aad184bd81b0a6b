"""Memory that gets short while turns run, seen from a client."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from tests.e2e.full_daemon import USED_VARIABLE
from tests.e2e.harness import Daemon, Message, run_daemon, start_daemon, stopped, talk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.e2e.harness import Talk

ECHO = {
    "INFERENCECENTER_ENGINE__BACKEND": "echo",
    "INFERENCECENTER_ENGINE__ECHO_DELAY_MS": "2",
    "INFERENCECENTER_ENGINE__SLOTS": "1",
    "INFERENCECENTER_ENGINE__PREFILL_GRID_TOKENS": "16",  # what is shorter is not worth parking
    "INFERENCECENTER_ENGINE__QUANTUM_TOKENS": "1000000",
    "INFERENCECENTER_KV__DISK_MIB": "0",
}
LONG = "a story about the sea and the old harbour " * 6


@contextlib.contextmanager
def filled(tmp_path: Path, model: Path) -> Iterator[tuple[Daemon, Callable[[int], None]]]:
    """Run a daemon of one slot, with what fills the machine's memory."""
    gauge = tmp_path / "memory"

    def fill(percent: int) -> None:
        (tmp_path / "next").write_text(str(percent))
        (tmp_path / "next").rename(gauge)  # whole or not at all

    fill(50)
    settings = ECHO | {USED_VARIABLE: str(gauge)}
    daemon = start_daemon(tmp_path / "state", model, program="tests.e2e.full_daemon", **settings)
    try:
        daemon.wait_ready()
        yield daemon, fill
    finally:
        if daemon.process.poll() is None:
            daemon.stop()


async def memory(client: Talk, state: str) -> dict[str, Any]:
    """Ask until memory is so short, and return the figures."""
    while True:
        values: dict[str, Any] = (await client.ask(op="status", type="memory"))["values"]
        if values["pressure"] == state:
            return values


def is_refusal(message: Message) -> bool:
    """Recognise the answer to a turn that may not begin."""
    return (message["op"], message.get("code")) == ("error", "overloaded")


def ends(session_id: str) -> Callable[[Message], bool]:
    """Return what recognises the end of a session's turn."""
    return lambda message: message["op"] == "end" and message["session_id"] == session_id


async def test_parked_kv_goes_then_no_turn_begins_and_what_runs_goes_on(tmp_path: Path, demo_model_path: Path) -> None:
    """Turns that wait have begun as well. With memory free again turns begin, and what was given up is read again."""
    with filled(tmp_path, demo_model_path) as (daemon, fill):
        async with talk(daemon) as client:
            old, running, waiting = [await client.create() for _ in range(3)]
            await client.turn(old, "some words to remember")
            await client.send(op="infer", session_id=running, prompt=LONG)
            await client.until(lambda message: message["op"] == "token" and message["session_id"] == running)
            await client.send(op="infer", session_id=waiting, prompt="and who am I?")
            assert (await memory(client, "easy"))["parked_ram_bytes"] > 0
            with stopped(daemon.engine_pid()):  # so that its turns are not over before
                fill(96)
                figures = await memory(client, "full")
                refusal = await client.ask(op="infer", session_id=old, prompt="may I?")
            assert (figures["memory_used_bytes"], figures["memory_limit_bytes"]) == (
                2**30 * 96 // 100,
                2**30 * 95 // 100,
            )
            assert is_refusal(refusal)
            assert (refusal["retryable"], refusal["retry_after_ms"]) == (True, 5000)
            assert not any(map(ends(running), client.seen))
            assert 'inferencecenter_memory_pressure{state="full"} 1.0' in daemon.get("/metrics")[1]
            texts = {running: LONG, waiting: "and who am I?"}
            for session_id, text in texts.items():
                await client.until(ends(session_id))
                tokens = [m["content"] for m in client.seen if m["op"] == "token" and m["session_id"] == session_id]
                assert "".join(tokens) == text
            assert (await memory(client, "full"))["parked_ram_bytes"] == 0
            fill(50)
            await memory(client, "shedding")
            text, end = await client.turn(old, "now?")
            assert (text, end["stats"]["cached_tokens"]) == ("now?", 0)
    log = daemon.log.read_text()
    assert "no turn begins" in log
    assert "memory: 983 of 972 MiB" in log


async def test_a_ceiling_below_what_a_daemon_needs_refuses_every_turn(tmp_path: Path, demo_model_path: Path) -> None:
    """By what the kernel really says of the processes; sessions are opened and read all the same."""
    settings = ECHO | {"INFERENCECENTER_MEMORY__RAM_CEILING_MIB": "1"}
    with run_daemon(tmp_path / "state", demo_model_path, **settings) as daemon:
        async with talk(daemon) as client:
            session_id = await client.create()
            figures = await memory(client, "full")
            assert figures["memory_used_bytes"] > 20 * 2**20
            assert figures["memory_limit_bytes"] == 2**20
            assert is_refusal(await client.ask(op="infer", session_id=session_id, prompt="may I?"))
            assert (await client.ask(op="get_session", session_id=session_id))["state"] == "idle"


async def test_the_guard_can_be_turned_off(tmp_path: Path, demo_model_path: Path) -> None:
    """Then no ceiling counts."""
    settings = ECHO | {"INFERENCECENTER_MEMORY__RAM_CEILING_MIB": "1", "INFERENCECENTER_MEMORY__GUARD": "false"}
    with run_daemon(tmp_path / "state", demo_model_path, **settings) as daemon:
        async with talk(daemon) as client:
            assert (await client.turn(await client.create(), "may I?"))[0] == "may I?"
            assert (await memory(client, "easy"))["memory_used_bytes"] is None

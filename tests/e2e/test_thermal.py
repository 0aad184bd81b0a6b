"""A GPU that gets hot while a client's turns run, seen from the client."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING

from tests.e2e.harness import ENDLESS, Daemon, Message, start_daemon, stopped, talk
from tests.e2e.hot_daemon import TEMPERATURE_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

ECHO = {"INFERENCECENTER_ENGINE__BACKEND": "echo", "INFERENCECENTER_ENGINE__ECHO_DELAY_MS": "2"}
LONG = "a story about the sea and the old harbour " * 20


@contextlib.contextmanager
def heated(tmp_path: Path, model: Path, **settings: str) -> Iterator[tuple[Daemon, Callable[[int], None]]]:
    """Run a daemon on a GPU, with what sets its temperature."""
    sensor = tmp_path / "temperature"

    def heat(temperature_c: int) -> None:
        (tmp_path / "next").write_text(str(temperature_c))
        (tmp_path / "next").rename(sensor)  # whole or not at all

    heat(50)
    daemon = start_daemon(
        tmp_path / "state",
        model,
        program="tests.e2e.hot_daemon",
        INFERENCECENTER_ENGINE__SLOTS="4",
        INFERENCECENTER_ENGINE__QUANTUM_TOKENS="16",
        INFERENCECENTER_ENGINE__RESTART_BACKOFF_MIN_S="0.01",
        INFERENCECENTER_GPU__COOLING_S="0.1",
        INFERENCECENTER_GPU__HOT_PAUSE_MS="1",
        **{TEMPERATURE_VARIABLE: str(sensor)},
        **settings,
    )
    try:
        daemon.wait_ready()
        yield daemon, heat
    finally:
        if daemon.process.poll() is None:
            daemon.stop()


def thermal(state: str) -> Callable[[Message], bool]:
    """Return what recognises the frame that tells of a state."""
    return lambda message: message["op"] == "thermal" and message["state"] == state


def ends(session_id: str) -> Callable[[Message], bool]:
    """Return what recognises the end of a session's turn."""
    return lambda message: message["op"] == "end" and message["session_id"] == session_id


async def test_a_hot_gpu_leaves_slots_to_interactive_turns_only(tmp_path: Path, demo_model_path: Path) -> None:
    """Clients hear of it; turns of other classes rest, and say the rest when it is cool again."""
    with heated(tmp_path, demo_model_path, **ECHO) as (daemon, heat):
        async with talk(daemon) as client:
            patient = await client.create(priority="batch")
            urgent = await client.create(priority="interactive")
            await client.send(op="infer", session_id=patient, prompt=LONG)
            await client.until(lambda message: message["op"] == "token")
            with stopped(daemon.engine_pid()):  # so that its turn is not over before
                heat(88)
                hot = await client.until(thermal("hot"))
            assert hot["temp"] == 88
            assert "1 of 4 slots" in hot["action"]
            assert "interactive turns only" in hot["action"]
            for _ in range(3):
                text, _ = await client.turn(urgent, "who is there?")
                assert text == "who is there?"
            assert not any(message["op"] == "end" and message["session_id"] == patient for message in client.seen)
            assert daemon.figure("thermal_state", state="hot") == 1
            heat(50)
            await client.until(thermal("warm"))
            await client.until(thermal("cool"))
            end = await client.until(ends(patient))
            assert end["finish_reason"] == "stop"
            tokens = [m["content"] for m in client.seen if m["op"] == "token" and m["session_id"] == patient]
            assert "".join(tokens) == LONG


async def test_an_engine_that_is_started_while_it_is_hot_is_limited(tmp_path: Path, demo_model_path: Path) -> None:
    """The one before was killed; its batch turn goes on when it is cool, and an interactive one before."""
    with heated(tmp_path, demo_model_path, **ECHO) as (daemon, heat):
        async with talk(daemon) as client:
            patient = await client.create(priority="batch")
            urgent = await client.create(priority="interactive")
            heat(90)
            await client.until(thermal("hot"))
            await client.send(op="infer", session_id=patient, prompt=LONG)
            os.kill(daemon.engine_pid(), signal.SIGKILL)
            await client.until(lambda message: message["op"] == "engine" and message["state"] == "ready")
            assert (await client.turn(urgent, "still there?"))[0] == "still there?"
            assert not any(message["op"] == "token" and message["session_id"] == patient for message in client.seen)
            heat(50)
            assert (await client.until(ends(patient)))["finish_reason"] == "stop"


async def test_an_answer_that_rested_is_the_same(tmp_path: Path, demo_model_path: Path) -> None:
    """With the real backend, for a greedy turn that rests in the middle while others use what is left."""
    with heated(tmp_path, demo_model_path) as (daemon, heat):
        async with talk(daemon) as client:
            params = ENDLESS | {"max_tokens": 200}
            undisturbed, _ = await client.turn(await client.create(priority="batch"), "Hello!", **params)
            patient, urgent = await client.create(priority="batch"), await client.create(priority="interactive")
            before = len(client.seen)
            await client.send(op="infer", session_id=patient, prompt="Hello!", params=params)
            await client.until(lambda message: message["op"] == "token")
            with stopped(daemon.engine_pid()):
                heat(88)
                await client.until(thermal("hot"))
            for _ in range(2):
                await client.turn(urgent, "Who are you?")
            assert not any(ends(patient)(message) for message in client.seen), "it was over before it could rest"
            heat(50)
            await client.until(ends(patient))
            tokens = [m["content"] for m in client.seen[before:] if m["op"] == "token" and m["session_id"] == patient]
            assert "".join(tokens) == undisturbed
            assert daemon.figure("preemptions_total") == 1

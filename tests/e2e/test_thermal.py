"""A GPU that overheats while turns run, as a client sees it."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING, TypeAlias

import pytest

from tests.e2e.harness import ENDLESS, Daemon, Message, connect_client, start_daemon, stopped
from tests.e2e.hot_daemon import TEMPERATURE_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

ECHO = {"INFERENCECENTER_ENGINE__BACKEND": "echo", "INFERENCECENTER_ENGINE__ECHO_DELAY_MS": "2"}
LONG = "a story about the sea and the old harbour " * 20
HotDaemon: TypeAlias = "tuple[Daemon, Callable[[int], None]]"


@contextlib.contextmanager
def hot_daemon(tmp_path: Path, model: Path, **settings: str) -> Iterator[HotDaemon]:
    """Run a daemon on a GPU; yield it with a function that sets the temperature."""
    sensor = tmp_path / "temperature"

    def heat(temperature_c: int) -> None:
        (tmp_path / "next").write_text(str(temperature_c))
        (tmp_path / "next").rename(sensor)  # written atomically

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


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path) -> Iterator[HotDaemon]:
    """A daemon on the echo backend, which each test leaves on a cool GPU."""
    with hot_daemon(tmp_path_factory.mktemp("hot"), demo_model_path, **ECHO) as found:
        yield found


def is_thermal_state(state: str) -> Callable[[Message], bool]:
    """Return a predicate for the frame that reports a thermal state."""
    return lambda message: message["op"] == "thermal" and message["state"] == state


def ends_turn(session_id: str) -> Callable[[Message], bool]:
    """Return a predicate for the end of a session's turn."""
    return lambda message: message["op"] == "end" and message["session_id"] == session_id


@pytest.mark.slow
async def test_hot_gpu_pauses_background_turns(echo: HotDaemon) -> None:
    """Clients are notified; turns of other classes pause, and resume when the GPU is cool."""
    daemon, heat = echo
    async with connect_client(daemon) as client:
        patient = await client.create(priority="batch")
        urgent = await client.create(priority="interactive")
        await client.send(op="infer", session_id=patient, prompt=LONG)
        await client.until(lambda message: message["op"] == "token")
        with stopped(daemon.engine_pid()):  # its turn must still run
            heat(88)
            hot = await client.until(is_thermal_state("hot"))
        assert hot["temp"] == 88
        assert "1 of 4 slots" in hot["action"]
        assert "interactive turns only" in hot["action"]
        for _ in range(3):
            text, _ = await client.turn(urgent, "who is there?")
            assert text == "who is there?"
        assert not any(message["op"] == "end" and message["session_id"] == patient for message in client.seen)
        assert daemon.metric("thermal_state", state="hot") == 1
        heat(50)
        await client.until(is_thermal_state("warm"))
        await client.until(is_thermal_state("cool"))
        end = await client.until(ends_turn(patient))
        assert end["finish_reason"] == "stop"
        tokens = [m["content"] for m in client.seen if m["op"] == "token" and m["session_id"] == patient]
        assert "".join(tokens) == LONG


@pytest.mark.slow
async def test_engine_started_while_hot_is_throttled(echo: HotDaemon) -> None:
    """After an engine kill the batch turn resumes when it is cool, and an interactive one before."""
    daemon, heat = echo
    async with connect_client(daemon) as client:
        patient = await client.create(priority="batch")
        urgent = await client.create(priority="interactive")
        heat(90)
        await client.until(is_thermal_state("hot"))
        await client.send(op="infer", session_id=patient, prompt=LONG)
        os.kill(daemon.engine_pid(), signal.SIGKILL)
        await client.until(lambda message: message["op"] == "engine" and message["state"] == "ready")
        assert (await client.turn(urgent, "still there?"))[0] == "still there?"
        assert not any(message["op"] == "token" and message["session_id"] == patient for message in client.seen)
        heat(50)
        await client.until(is_thermal_state("cool"))
        assert (await client.until(ends_turn(patient)))["finish_reason"] == "stop"


async def test_paused_answer_is_unchanged(tmp_path: Path, demo_model_path: Path) -> None:
    """On the real backend a greedy turn paused midway equals an undisturbed one."""
    with hot_daemon(tmp_path, demo_model_path) as (daemon, heat):
        async with connect_client(daemon) as client:
            params = ENDLESS | {"max_tokens": 200}
            undisturbed, _ = await client.turn(await client.create(priority="batch"), "Hello!", **params)
            patient, urgent = await client.create(priority="batch"), await client.create(priority="interactive")
            before = len(client.seen)
            await client.send(op="infer", session_id=patient, prompt="Hello!", params=params)
            await client.until(lambda message: message["op"] == "token")
            with stopped(daemon.engine_pid()):
                heat(88)
                await client.until(is_thermal_state("hot"))
            for _ in range(2):
                await client.turn(urgent, "Who are you?")
            assert not any(ends_turn(patient)(message) for message in client.seen), "it was over before it could rest"
            heat(50)
            await client.until(ends_turn(patient))
            tokens = [m["content"] for m in client.seen[before:] if m["op"] == "token" and m["session_id"] == patient]
            assert "".join(tokens) == undisturbed
            assert daemon.metric("preemptions_total") == 1

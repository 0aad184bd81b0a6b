"""Tests of the notifications to the service manager; tests of the whole daemon are in tests/service."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import pytest
from structlog.testing import capture_logs

from inferencecenter import systemd_notifier
from inferencecenter.core import tasks
from inferencecenter.hardware.nvml import NO_GPU, GpuReading
from inferencecenter.ipc.port import EngineState, EngineStatus
from inferencecenter.sessions.observability import Totals
from inferencecenter.systemd_notifier import KILLED_ENGINE_S, SystemdNotifier, describe, kill_is_pending

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from inferencecenter.ipc.port import EnginePort
    from inferencecenter.systemd_notifier import Notifier

LOADING = EngineStatus(state=EngineState.STARTING, load_fraction=0.4)
READY = EngineStatus(state=EngineState.READY, pid=77)
NO_SESSIONS = Totals(
    active_generations=0,
    total_sessions=0,
    last_tps=0.0,
    last_ttft_ms=0.0,
    total_tokens_generated=0,
    tokens_per_s=0.0,
)


@dataclass
class Heard:
    """A service manager, and what it was told."""

    watchdog_s: float | None = None
    words: list[dict[str, str | int]] = field(default_factory=list)

    def send(self, **words: str | int) -> None:
        """Take note."""
        self.words.append(words)

    def all(self, name: str) -> list[str | int]:
        """Return each value that a word had."""
        return [words[name] for words in self.words if name in words]


@dataclass
class World:
    """A reporter with everything around it."""

    heard: Heard = field(default_factory=Heard)
    status: EngineStatus = LOADING
    totals: Totals = NO_SESSIONS
    gave_up: bool = False
    killed: bool = False
    now_s: float = 0.0
    gpu: GpuReading = NO_GPU
    gpu_looks: int = 0
    listeners: list[Callable[[EngineStatus], None]] = field(default_factory=list)

    def subscribe(self, listener: Callable[[EngineStatus], None]) -> None:
        """Tell ``listener`` of each state."""
        self.listeners.append(listener)

    def become(self, status: EngineStatus) -> None:
        """Have the engine change."""
        self.status = status
        for listener in self.listeners:
            listener(status)

    def read_gpu(self) -> GpuReading:
        """Look at the GPU."""
        self.gpu_looks += 1
        return self.gpu

    def reporter(self, *, silent: bool = False) -> SystemdNotifier:
        """Return the reporter."""
        return SystemdNotifier(
            None if silent else cast("Notifier", self.heard),
            engine=cast("EnginePort", self),
            totals=lambda: self.totals,
            read_gpu=self.read_gpu,
            settled=lambda: self.gave_up,
            stop_s=33.0,
            kill_pending=lambda _pid: self.killed,
            monotonic=lambda: self.now_s,
        )


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """A daemon whose status is told without waiting."""
    monkeypatch.setattr(systemd_notifier, "STATUS_EVERY_S", 0.0)
    return World()


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop run until something is so."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - a step of the loop, without any time
            await asyncio.sleep(0)


async def test_without_a_manager_nothing_runs(world: World) -> None:
    """No subscription, no timer, no task, whatever happens."""
    reporter = world.reporter(silent=True)
    drained: list[int] = []

    async def drain() -> None:
        drained.append(1)

    reporter.begin()
    with reporter.reloading():
        pass
    await reporter.drain_and_stop(drain)
    assert (world.listeners, world.heard.words, drained) == ([], [], [1])
    await reporter.close()


async def test_ready_is_said_once(world: World) -> None:
    """At the first time that the engine is ready, and not when another is."""
    reporter = world.reporter()
    reporter.begin()
    world.become(LOADING)
    assert world.heard.all("READY") == []
    for status in (READY, replace(READY, state=EngineState.BACKOFF), LOADING, READY):
        world.become(status)
    assert world.heard.all("READY") == [1]
    await reporter.close()


async def test_a_daemon_that_goes_on_without_an_engine_has_started(world: World) -> None:
    """It would be said to start forever, and be ended, although it was told to go on."""
    reporter = world.reporter()
    reporter.begin()
    world.become(replace(LOADING, state=EngineState.FAILED, detail="the engine ended"))
    assert world.heard.all("READY") == []
    world.gave_up = True
    world.become(replace(LOADING, state=EngineState.FAILED, detail="the engine ended"))
    assert world.heard.all("READY") == [1]
    await until(lambda: "the engine ended" in str(world.heard.all("STATUS")))
    await reporter.close()


async def test_a_start_is_extended_until_it_is_done(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the event loop runs, and no longer."""
    monkeypatch.setattr(systemd_notifier, "_EXTEND_EVERY_S", 0.0)
    reporter = world.reporter()
    reporter.begin()
    await until(lambda: len(world.heard.all("EXTEND_TIMEOUT_USEC")) > 3)
    world.become(READY)
    said = len(world.heard.all("EXTEND_TIMEOUT_USEC"))
    await until(lambda: bool(world.heard.all("STATUS")))
    assert len(world.heard.all("EXTEND_TIMEOUT_USEC")) == said
    await reporter.close()


async def test_a_reload_before_readiness_does_not_say_it(world: World) -> None:
    """READY would end the start, though no turn can run."""
    reporter = world.reporter()
    reporter.begin()
    with reporter.reloading():
        pass
    assert world.heard.all("READY") == world.heard.all("RELOADING") == []
    world.become(READY)
    with reporter.reloading():
        assert world.heard.words[-1] == {"RELOADING": 1, "MONOTONIC_USEC": 0}
    assert world.heard.words[-1] == {"READY": 1}
    await reporter.close()


async def test_a_status_that_cannot_be_told_is_told_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reading that fails once is a line of the log, and the next change is told."""
    monkeypatch.setattr(tasks, "RESTART_MIN_S", 0.0)
    faults = iter([ValueError("a reading that was not expected")])
    read = world.read_gpu

    def fail_once() -> GpuReading:
        for fault in faults:
            raise fault
        return read()

    monkeypatch.setattr(world, "read_gpu", fail_once)
    reporter = world.reporter()
    reporter.begin()
    with capture_logs() as logs:
        world.become(READY)
        await until(lambda: bool(logs) and not reporter._status_task_runs)
    assert ("task_restarts", "reporter:status") in [(line["event"], line["task"]) for line in logs]
    world.become(replace(READY, running=1))
    await until(lambda: "1 turns running" in str(world.heard.all("STATUS")))
    await reporter.close()


async def test_an_unchanged_status_is_not_told_again(world: World) -> None:
    """And when nothing runs, the status is not polled."""
    reporter = world.reporter()
    reporter.begin()
    for _ in range(3):
        world.become(READY)
        await until(lambda: not reporter._status_task_runs)
    assert len(world.heard.all("STATUS")) == 1
    looks = world.gpu_looks
    for _ in range(100):
        await asyncio.sleep(0)
    assert world.gpu_looks == looks
    await reporter.close()


async def test_while_turns_run_the_status_follows(world: World) -> None:
    """Until the last has ended."""
    reporter = world.reporter()
    reporter.begin()
    world.become(replace(READY, running=2, waiting=1))
    await until(lambda: "2 turns running, 1 waiting" in str(world.heard.all("STATUS")))
    world.status = replace(READY, running=1)
    await until(lambda: "1 turns running, 0 waiting" in str(world.heard.all("STATUS")))
    world.status = READY
    await until(lambda: not reporter._status_task_runs)
    assert "0 turns running" in str(world.heard.all("STATUS")[-1])
    await reporter.close()


async def test_the_watchdog_looks_for_what_has_changed(world: World) -> None:
    """A session that came between two beats is seen without a timer of its own."""
    world.heard.watchdog_s = 0.0
    reporter = world.reporter()
    reporter.begin()
    world.become(READY)
    await until(lambda: len(world.heard.all("WATCHDOG")) > 3)
    world.totals = replace(NO_SESSIONS, total_sessions=5)
    await until(lambda: "5 sessions" in str(world.heard.all("STATUS")))
    await reporter.close()
    said = len(world.heard.words)
    await asyncio.sleep(0)
    assert len(world.heard.words) == said


async def test_an_engine_that_outlives_its_kill_ends_the_feeding(world: World) -> None:
    """Not before it has had its time, and only while it is there."""
    world.heard.watchdog_s = 0.0
    reporter = world.reporter()
    reporter.begin()
    world.become(READY)
    world.killed = True
    await until(lambda: reporter._killed is not None)
    world.now_s = KILLED_ENGINE_S - 1
    fed = len(world.heard.all("WATCHDOG"))
    await until(lambda: len(world.heard.all("WATCHDOG")) > fed + 2)
    world.now_s = KILLED_ENGINE_S
    fed = len(world.heard.all("WATCHDOG"))
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(world.heard.all("WATCHDOG")) == fed
    world.killed = False
    await until(lambda: len(world.heard.all("WATCHDOG")) > fed)
    await reporter.close()


async def test_stopping_is_said_before_anything_is_drained(world: World) -> None:
    """With the time that it may take."""
    reporter = world.reporter()
    reporter.begin()
    world.become(READY)
    seen: list[Any] = []

    async def drain() -> None:
        seen.append(world.heard.words[-1])

    await reporter.drain_and_stop(drain)
    assert seen == [{"STOPPING": 1, "STATUS": "stopping", "EXTEND_TIMEOUT_USEC": 33_000_000}]
    await reporter.close()


@pytest.mark.parametrize(
    ("status", "gpu", "stopping", "expected"),
    [
        (LOADING, NO_GPU, False, "loading the model, 40%: 0 sessions, 0 turns running, 0 waiting"),
        (READY, NO_GPU, True, "stopping: 0 sessions, 0 turns running, 0 waiting"),
        (
            replace(READY, running=2, waiting=3),
            GpuReading(vram_used_bytes=2**31, vram_total_bytes=3 * 2**30),
            False,
            "engine ready: 0 sessions, 2 turns running, 3 waiting, VRAM 2048 of 3072 MiB",
        ),
        (
            EngineStatus(state=EngineState.BACKOFF, detail="the engine was killed by SIGKILL"),
            NO_GPU,
            False,
            "engine backoff (the engine was killed by SIGKILL): 0 sessions, 0 turns running, 0 waiting",
        ),
    ],
)
def test_the_status_is_a_line(status: EngineStatus, gpu: GpuReading, *, stopping: bool, expected: str) -> None:
    """State first, then who is there, then the GPU where there is one."""
    assert describe(status, NO_SESSIONS, gpu, stopping=stopping) == expected


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("State:\tD (disk sleep)\nSigPnd:\t0000000000000100\nShdPnd:\t0000000000000000\n", True),
        ("State:\tD (disk sleep)\nSigPnd:\t0000000000000000\nShdPnd:\t0000000000000100\n", True),
        ("State:\tZ (zombie)\nSigPnd:\t0000000000000000\n", True),
        ("State:\tD (disk sleep)\nSigPnd:\t0000000000004000\nShdPnd:\t0000000000000000\n", False),
        ("State:\tR (running)\n", False),
        ("", False),
    ],
)
def test_a_kill_that_the_kernel_holds_back_is_seen(tmp_path: Path, content: str, *, expected: bool) -> None:
    """Among the signals of the process or of its first thread, or as an end that is not over."""
    (tmp_path / "77").mkdir()
    (tmp_path / "77" / "status").write_text(content)
    assert kill_is_pending(77, proc=tmp_path) is expected


def test_a_process_that_lives_or_is_gone_has_no_kill_pending(tmp_path: Path) -> None:
    """The kernel's own file of this process is understood."""
    assert not kill_is_pending(os.getpid())
    assert not kill_is_pending(77, proc=tmp_path)

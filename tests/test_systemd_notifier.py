"""Notifications to the service manager; tests/service covers the whole daemon."""

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
    archived_sessions=0,
    last_tps=0.0,
    last_ttft_ms=0.0,
    total_tokens_generated=0,
    tokens_per_s=0.0,
)


@dataclass
class RecordingManager:
    """A service manager that records notifications."""

    watchdog_s: float | None = None
    words: list[dict[str, str | int]] = field(default_factory=list)

    def send(self, **words: str | int) -> None:
        """Record it."""
        self.words.append(words)

    def all(self, name: str) -> list[str | int]:
        """Return each value of a field."""
        return [words[name] for words in self.words if name in words]


@dataclass
class NotifierHarness:
    """A notifier with stubs of its dependencies."""

    manager: RecordingManager = field(default_factory=RecordingManager)
    status: EngineStatus = LOADING
    totals: Totals = NO_SESSIONS
    gave_up: bool = False
    killed: bool = False
    now_s: float = 0.0
    gpu: GpuReading = NO_GPU
    gpu_looks: int = 0
    listeners: list[Callable[[EngineStatus], None]] = field(default_factory=list)

    def subscribe(self, listener: Callable[[EngineStatus], None]) -> None:
        """Register ``listener`` for each state."""
        self.listeners.append(listener)

    def set_status(self, status: EngineStatus) -> None:
        """Change the engine's status."""
        self.status = status
        for listener in self.listeners:
            listener(status)

    def read_gpu(self) -> GpuReading:
        """Return the GPU's reading."""
        self.gpu_looks += 1
        return self.gpu

    def reporter(self, *, silent: bool = False) -> SystemdNotifier:
        """Return the notifier."""
        return SystemdNotifier(
            None if silent else cast("Notifier", self.manager),
            engine=cast("EnginePort", self),
            totals=lambda: self.totals,
            read_gpu=self.read_gpu,
            settled=lambda: self.gave_up,
            stop_s=33.0,
            kill_pending=lambda _pid: self.killed,
            monotonic=lambda: self.now_s,
        )


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> NotifierHarness:
    """A daemon whose status is published without delay."""
    monkeypatch.setattr(systemd_notifier, "STATUS_EVERY_S", 0.0)
    return NotifierHarness()


async def wait_until(condition: Callable[[], bool]) -> None:
    """Run the event loop until a condition is true."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - a step of the loop, without any time
            await asyncio.sleep(0)


async def test_without_a_manager_nothing_runs(harness: NotifierHarness) -> None:
    """There is no subscription, timer or message."""
    reporter = harness.reporter(silent=True)
    drained: list[int] = []

    async def drain() -> None:
        drained.append(1)

    reporter.begin()
    with reporter.reloading():
        pass
    await reporter.drain_and_stop(drain)
    assert (harness.listeners, harness.manager.words, drained) == ([], [], [1])
    await reporter.close()


async def test_ready_is_sent_once(harness: NotifierHarness) -> None:
    """It is sent when the engine is ready for the first time."""
    reporter = harness.reporter()
    reporter.begin()
    harness.set_status(LOADING)
    assert harness.manager.all("READY") == []
    for status in (READY, replace(READY, state=EngineState.BACKOFF), LOADING, READY):
        harness.set_status(status)
    assert harness.manager.all("READY") == [1]
    await reporter.close()


async def test_daemon_without_an_engine_is_ready(harness: NotifierHarness) -> None:
    """A configured start without an engine must not time out."""
    reporter = harness.reporter()
    reporter.begin()
    harness.set_status(replace(LOADING, state=EngineState.FAILED, detail="the engine ended"))
    assert harness.manager.all("READY") == []
    harness.gave_up = True
    harness.set_status(replace(LOADING, state=EngineState.FAILED, detail="the engine ended"))
    assert harness.manager.all("READY") == [1]
    await wait_until(lambda: "the engine ended" in str(harness.manager.all("STATUS")))
    await reporter.close()


async def test_start_timeout_is_extended_while_loading(
    harness: NotifierHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop must be running."""
    monkeypatch.setattr(systemd_notifier, "_EXTEND_EVERY_S", 0.0)
    reporter = harness.reporter()
    reporter.begin()
    await wait_until(lambda: len(harness.manager.all("EXTEND_TIMEOUT_USEC")) > 3)
    harness.set_status(READY)
    said = len(harness.manager.all("EXTEND_TIMEOUT_USEC"))
    await wait_until(lambda: bool(harness.manager.all("STATUS")))
    assert len(harness.manager.all("EXTEND_TIMEOUT_USEC")) == said
    await reporter.close()


async def test_reload_before_readiness_sends_no_ready(harness: NotifierHarness) -> None:
    """READY would end the start before a turn can run."""
    reporter = harness.reporter()
    reporter.begin()
    with reporter.reloading():
        pass
    assert harness.manager.all("READY") == harness.manager.all("RELOADING") == []
    harness.set_status(READY)
    with reporter.reloading():
        assert harness.manager.words[-1] == {"RELOADING": 1, "MONOTONIC_USEC": 0}
    assert harness.manager.words[-1] == {"READY": 1}
    await reporter.close()


async def test_failed_status_is_sent_again(harness: NotifierHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed reading is one log line, and the next change is sent."""
    monkeypatch.setattr(tasks, "RESTART_MIN_S", 0.0)
    faults = iter([ValueError("a reading that was not expected")])
    read = harness.read_gpu

    def fail_once() -> GpuReading:
        for fault in faults:
            raise fault
        return read()

    monkeypatch.setattr(harness, "read_gpu", fail_once)
    reporter = harness.reporter()
    reporter.begin()
    with capture_logs() as logs:
        harness.set_status(READY)
        await wait_until(lambda: bool(logs) and not reporter._status_task_runs)
    assert ("task_restarts", "reporter:status") in [(line["event"], line["task"]) for line in logs]
    harness.set_status(replace(READY, running=1))
    await wait_until(lambda: "1 turns running" in str(harness.manager.all("STATUS")))
    await reporter.close()


async def test_unchanged_status_is_not_sent_again(harness: NotifierHarness) -> None:
    """An idle daemon's status is not polled."""
    reporter = harness.reporter()
    reporter.begin()
    for _ in range(3):
        harness.set_status(READY)
        await wait_until(lambda: not reporter._status_task_runs)
    assert len(harness.manager.all("STATUS")) == 1
    looks = harness.gpu_looks
    for _ in range(100):
        await asyncio.sleep(0)
    assert harness.gpu_looks == looks
    await reporter.close()


async def test_status_is_updated_while_turns_run(harness: NotifierHarness) -> None:
    """The updates end with the last turn."""
    reporter = harness.reporter()
    reporter.begin()
    harness.set_status(replace(READY, running=2, waiting=1))
    await wait_until(lambda: "2 turns running, 1 waiting" in str(harness.manager.all("STATUS")))
    harness.status = replace(READY, running=1)
    await wait_until(lambda: "1 turns running, 0 waiting" in str(harness.manager.all("STATUS")))
    harness.status = READY
    await wait_until(lambda: not reporter._status_task_runs)
    assert "0 turns running" in str(harness.manager.all("STATUS")[-1])
    await reporter.close()


async def test_watchdog_tick_updates_the_status(harness: NotifierHarness) -> None:
    """A new session between two ticks needs no timer."""
    harness.manager.watchdog_s = 0.0
    reporter = harness.reporter()
    reporter.begin()
    harness.set_status(READY)
    await wait_until(lambda: len(harness.manager.all("WATCHDOG")) > 3)
    harness.totals = replace(NO_SESSIONS, total_sessions=5)
    await wait_until(lambda: "5 sessions" in str(harness.manager.all("STATUS")))
    await reporter.close()
    said = len(harness.manager.words)
    await asyncio.sleep(0)
    assert len(harness.manager.words) == said


async def test_unkillable_engine_stops_the_watchdog(harness: NotifierHarness) -> None:
    """It stops after the grace period, while the process exists."""
    harness.manager.watchdog_s = 0.0
    reporter = harness.reporter()
    reporter.begin()
    harness.set_status(READY)
    harness.killed = True
    await wait_until(lambda: reporter._killed is not None)
    harness.now_s = KILLED_ENGINE_S - 1
    fed = len(harness.manager.all("WATCHDOG"))
    await wait_until(lambda: len(harness.manager.all("WATCHDOG")) > fed + 2)
    harness.now_s = KILLED_ENGINE_S
    fed = len(harness.manager.all("WATCHDOG"))
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(harness.manager.all("WATCHDOG")) == fed
    harness.killed = False
    await wait_until(lambda: len(harness.manager.all("WATCHDOG")) > fed)
    await reporter.close()


async def test_stopping_is_sent_before_draining(harness: NotifierHarness) -> None:
    """It has the time limit of the drain."""
    reporter = harness.reporter()
    reporter.begin()
    harness.set_status(READY)
    seen: list[Any] = []

    async def drain() -> None:
        seen.append(harness.manager.words[-1])

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
def test_status_line(status: EngineStatus, gpu: GpuReading, *, stopping: bool, expected: str) -> None:
    """It has the state, then the sessions and turns, then the GPU if there is one."""
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
def test_pending_kill_is_detected(tmp_path: Path, content: str, *, expected: bool) -> None:
    """It shows in the signals of the process or of its first thread, or as an exit in progress."""
    (tmp_path / "77").mkdir()
    (tmp_path / "77" / "status").write_text(content)
    assert kill_is_pending(77, proc=tmp_path) is expected


def test_live_or_absent_process_has_no_pending_kill(tmp_path: Path) -> None:
    """The kernel's own file of this process is parsed."""
    assert not kill_is_pending(os.getpid())
    assert not kill_is_pending(77, proc=tmp_path)

"""The memory pressure monitor: when it measures, what engines are sent, and which turns are admitted."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.core.tasks import RESTART_MIN_S
from inferencecenter.hardware.pressure import SETTLED_S, MemoryUsage, PressureState
from inferencecenter.ipc.messages import KvRamLimit
from inferencecenter.ipc.port import EngineState, EngineStatus
from inferencecenter.supervisor.memory_pressure import (
    BUSY_EVERY_S,
    IDLE_EVERY_S,
    MemoryPressureMonitor,
    describe,
    kept_by,
)
from inferencecenter.telemetry.metrics import DaemonMetrics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

MIB = 2**20
LIMIT, CALM = 100 * MIB, 90 * MIB


@dataclass
class FakeEngine:
    """An engine that records the messages it is sent."""

    status: EngineStatus = field(default_factory=lambda: EngineStatus(EngineState.READY))
    sent: list[KvRamLimit] = field(default_factory=list)

    def send(self, message: KvRamLimit) -> None:
        """Record the message."""
        self.sent.append(message)

    def become(self, state: EngineState = EngineState.READY, *, parked_mib: int = 0, running: int = 0) -> None:
        """Change the state."""
        self.status = replace(self.status, state=state, parked_ram_bytes=parked_mib * MIB, running=running)


@dataclass
class MonitorHarness:
    """A monitor with engines, memory and a clock that the test sets; it samples on request."""

    engines: list[FakeEngine] = field(default_factory=lambda: [FakeEngine()])
    used_mib: int | None = 50
    gpu_used_mib: int = 0
    sleeps_s: list[float] = field(default_factory=list)
    looks: int = 0
    now: float = 0.0
    fault: Exception | None = None
    metrics: DaemonMetrics = field(default_factory=DaemonMetrics)

    def __post_init__(self) -> None:
        self.wake = asyncio.Event()
        self.slept = asyncio.Event()
        self.guard = MemoryPressureMonitor(
            engines=lambda: self.engines,
            measure=self.measure,
            metrics=self.metrics,
            sleep=self.sleep,
            monotonic=lambda: self.now,
        )

    @property
    def engine(self) -> FakeEngine:
        """The first of them."""
        return self.engines[0]

    def measure(self, engines: Sequence[EngineStatus]) -> list[MemoryUsage]:
        """Count a measurement, and return what the test has set."""
        self.looks += 1
        if self.fault is not None:
            raise self.fault
        gpu = MemoryUsage(name="GPU 0", used_bytes=self.gpu_used_mib * MIB, limit_bytes=LIMIT, calm_bytes=CALM)
        if self.used_mib is None:
            return [gpu]
        parked_bytes = sum(each.parked_ram_bytes for each in engines)
        main = MemoryUsage(
            name="memory",
            used_bytes=self.used_mib * MIB,
            limit_bytes=LIMIT,
            calm_bytes=CALM,
            parked_bytes=parked_bytes,
        )
        return [main, gpu]

    async def sleep(self, seconds: float) -> None:
        """Sleep until the test continues."""
        self.sleeps_s.append(seconds)
        self.slept.set()
        await self.wake.wait()
        self.wake.clear()

    async def looked(self) -> None:
        """Wait until the monitor has sampled and sleeps again."""
        async with asyncio.timeout(60):
            await self.slept.wait()
        self.slept.clear()

    async def look(self, used_mib: int | None, *, now: float, gpu_used_mib: int = 0) -> PressureState:
        """Sample with this memory use at this second, and return the state."""
        self.now, self.used_mib, self.gpu_used_mib = now, used_mib, gpu_used_mib
        self.wake.set()
        await self.looked()
        return self.guard.pressure.state

    def shown(self, name: str, **labels: str) -> float | None:
        """Return a metric."""
        return self.metrics.registry.get_sample_value(f"inferencecenter_memory_{name}", labels)

    def tell(self) -> None:
        """Notify the monitor that an engine has changed."""
        self.guard.engine_changed(self.engine.status)


@pytest.fixture
async def monitor() -> AsyncIterator[MonitorHarness]:
    """A monitor of one ready engine, with 50 of 100 MiB in use."""
    monitor = MonitorHarness()
    monitor.tell()
    await monitor.looked()
    yield monitor
    await monitor.guard.close()


def refused(guard: MemoryPressureMonitor) -> bool:
    """Whether new turns are refused, with a time to retry."""
    refusal = None
    try:
        guard.admit()
    except InferenceCenterError as error:
        refusal = error
    assert refusal is None or (refusal.code, refusal.retry_after_ms) == (ErrorCode.OVERLOADED, 5000)
    return refusal is not None


async def test_normal_memory_is_not_logged(monitor: MonitorHarness) -> None:
    """The metrics have the figures."""
    assert await monitor.look(100, now=2.0) is PressureState.EASY
    assert (monitor.engine.sent, refused(monitor.guard)) == ([], False)
    assert monitor.shown("pressure", state="easy") == 1
    assert monitor.shown("pressure", state="full") == 0
    assert (monitor.shown("used_bytes"), monitor.shown("limit_bytes")) == (LIMIT, LIMIT)


async def test_offloaded_kv_is_evicted_before_turns_are_refused(monitor: MonitorHarness) -> None:
    """KV is evicted down to the low mark; offloading resumes after a calm period, and the log has the figures."""
    monitor.engine.become(parked_mib=40)
    with capture_logs() as logs:
        assert await monitor.look(105, now=2.0) is PressureState.SHEDDING
        assert monitor.engine.sent == [KvRamLimit(25 * MIB)]
        monitor.engine.become(parked_mib=25)
        assert await monitor.look(90, now=4.0) is PressureState.SHEDDING
        assert await monitor.look(50, now=2.0 + SETTLED_S) is PressureState.EASY
    assert monitor.engine.sent == [KvRamLimit(25 * MIB), KvRamLimit(None)]
    assert not refused(monitor.guard)
    lines = [(line["log_level"], line["state"], line["reason"], line["action"]) for line in logs]
    assert lines == [
        (
            "warning",
            "shedding",
            "memory: 105 of 100 MiB, 40 of them parked, GPU 0: 0 of 100 MiB",
            "parked KV takes 25 MiB at most, turns begin",
        ),
        (
            "info",
            "easy",
            "memory: 50 of 100 MiB, 25 of them parked, GPU 0: 0 of 100 MiB",
            "KV is parked as usual, turns begin",
        ),
    ]


async def test_turns_are_refused_if_eviction_does_not_help(monitor: MonitorHarness) -> None:
    """The next measurement decides; they are accepted as soon as memory use is normal."""
    monitor.engine.become(parked_mib=10)
    assert await monitor.look(120, now=2.0) is PressureState.SHEDDING
    assert not refused(monitor.guard)
    monitor.engine.become()
    assert await monitor.look(110, now=4.0) is PressureState.FULL
    assert refused(monitor.guard)
    assert monitor.shown("pressure", state="full") == 1
    assert await monitor.look(95, now=6.0) is PressureState.FULL
    assert await monitor.look(90, now=8.0) is PressureState.SHEDDING
    assert not refused(monitor.guard)
    assert monitor.engine.sent == [KvRamLimit(0), KvRamLimit(0)]


async def test_without_offloaded_kv_turns_are_refused_at_once(monitor: MonitorHarness) -> None:
    """No KV may be offloaded, either."""
    assert await monitor.look(101, now=2.0) is PressureState.FULL
    assert refused(monitor.guard)
    assert monitor.engine.sent == [KvRamLimit(0)]


async def test_full_gpu_refuses_turns_without_eviction(monitor: MonitorHarness) -> None:
    """Eviction frees no GPU memory."""
    monitor.engine.become(parked_mib=40)
    assert await monitor.look(50, now=2.0, gpu_used_mib=101) is PressureState.FULL
    assert refused(monitor.guard)
    assert monitor.engine.sent == []
    assert await monitor.look(50, now=4.0, gpu_used_mib=90) is PressureState.SHEDDING
    assert not refused(monitor.guard)


async def test_failed_measurement_is_retried(monitor: MonitorHarness) -> None:
    """It is retried after a wait; until then the state is unknown, and earlier refusals end."""
    monitor.engine.become(parked_mib=10)
    await monitor.look(120, now=2.0)
    monitor.fault = ValueError("a line of /proc that was not expected")
    monitor.wake.set()
    with capture_logs() as logs:
        await monitor.looked()
    assert [line["event"] for line in logs] == ["task_restarts"]
    assert monitor.sleeps_s[-1] == RESTART_MIN_S
    monitor.fault = None
    assert await monitor.look(120, now=6.0) is PressureState.SHEDDING
    assert monitor.engine.sent == [KvRamLimit(0), KvRamLimit(None), KvRamLimit(0)]


async def test_engines_keep_equal_shares() -> None:
    """An engine releases its offloaded KV above its share; one that is not ready gets no message."""
    monitor = MonitorHarness(engines=[FakeEngine(), FakeEngine(), FakeEngine()])
    for engine, parked_mib in zip(monitor.engines, (30, 10, 0), strict=True):
        engine.become(parked_mib=parked_mib)
    monitor.tell()
    await monitor.looked()
    await monitor.look(110, now=2.0)
    assert [engine.sent for engine in monitor.engines] == [
        [KvRamLimit(15 * MIB)],
        [KvRamLimit(5 * MIB)],
        [KvRamLimit(0)],
    ]
    await monitor.guard.close()


async def test_measurement_interval_is_shorter_under_pressure(monitor: MonitorHarness) -> None:
    """Otherwise memory is measured at the long interval."""
    monitor.engine.become(running=1)
    await monitor.look(50, now=2.0)
    monitor.engine.become(running=0)
    await monitor.look(50, now=4.0)
    await monitor.look(101, now=34.0)
    assert monitor.sleeps_s == [IDLE_EVERY_S, BUSY_EVERY_S, IDLE_EVERY_S, BUSY_EVERY_S]


@pytest.mark.parametrize("state", [state for state in EngineState if state is not EngineState.READY])
async def test_without_a_ready_engine_nothing_is_measured(monitor: MonitorHarness, state: EngineState) -> None:
    """Its memory is free; a turn that would wake it must be admitted. The next engine is measured at once."""
    await monitor.look(101, now=2.0)
    assert refused(monitor.guard)
    monitor.engine.become(state)
    monitor.tell()
    assert not refused(monitor.guard)
    assert monitor.shown("pressure", state="easy") == 1
    looks = monitor.looks
    monitor.wake.set()
    for _ in range(10):
        await asyncio.sleep(0)
    assert monitor.looks == looks
    assert "watching=False" in repr(monitor.guard)
    monitor.wake.clear()
    monitor.engine.become()
    monitor.tell()
    await monitor.looked()
    assert refused(monitor.guard)


async def test_measures_while_any_engine_is_ready() -> None:
    """Any of the engines suffices."""
    monitor = MonitorHarness(engines=[FakeEngine(), FakeEngine()])
    monitor.tell()
    await monitor.looked()
    await monitor.look(101, now=2.0)
    monitor.engine.become(EngineState.ASLEEP)
    monitor.tell()
    assert refused(monitor.guard)
    monitor.engines[1].become(EngineState.BACKOFF)
    monitor.tell()
    assert not refused(monitor.guard)
    await monitor.guard.close()


async def test_vanished_engine_is_detected(monitor: MonitorHarness) -> None:
    """The next measurement detects it; an engine that was replaced is not notified."""
    await monitor.look(101, now=2.0)
    monitor.engine.become(EngineState.STOPPED)
    monitor.wake.set()
    async with asyncio.timeout(60):
        while "watching=True" in repr(monitor.guard):  # noqa: ASYNC110 - it ends without an event
            await asyncio.sleep(0)
    assert (monitor.looks, refused(monitor.guard)) == (2, False)


async def test_unreadable_memory_refuses_nothing(monitor: MonitorHarness) -> None:
    """The metrics show no figures."""
    assert await monitor.look(None, now=2.0) is PressureState.EASY
    used_bytes = monitor.shown("used_bytes")
    assert used_bytes is not None
    assert used_bytes != used_bytes  # noqa: PLR0124 - NaN


def test_kept_share_is_at_most_what_an_engine_has() -> None:
    """Without offloaded KV there is no share."""
    engine = EngineStatus(EngineState.READY, parked_ram_bytes=7)
    main = MemoryUsage(name="memory", used_bytes=100, limit_bytes=10, calm_bytes=95, parked_bytes=21)
    assert kept_by(engine, main) == 7 * 16 // 21
    assert kept_by(engine, replace(main, parked_bytes=0)) == 0


def test_figures_are_readable() -> None:
    """They are in MiB; offloaded KV is shown only if there is some."""
    assert describe([]) == ""
    usage = MemoryUsage(name="GPU 0", used_bytes=3 * MIB + 5, limit_bytes=4 * MIB, calm_bytes=0)
    assert describe([usage]) == "GPU 0: 3 of 4 MiB"

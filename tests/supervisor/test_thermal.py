"""The thermal throttler: when it reads, what it sends to engine and clients, and what survives an engine."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest
from msgspec import structs
from pydantic import ValidationError
from structlog.testing import capture_logs

from inferencecenter.config.settings import GpuSettings
from inferencecenter.core.tasks import RESTART_MIN_S
from inferencecenter.hardware.nvml import GpuReading, Gpus
from inferencecenter.hardware.thermal import ThermalState
from inferencecenter.ipc.messages import EngineLimits
from inferencecenter.ipc.port import EngineState, EngineStatus
from inferencecenter.protocol.events import Thermal
from inferencecenter.supervisor.thermal import BUSY_EVERY_S, IDLE_EVERY_S, ThermalThrottler, describe, limit_for
from inferencecenter.telemetry.metrics import DaemonMetrics
from tests.supervisor.stub_engine import MODEL

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

SLOTS = 8
UNLIMITED = EngineLimits(active_slots=8, prefill_share=1.0, lowest_class=2, pause_ms=0)
WARM = EngineLimits(active_slots=4, prefill_share=0.5, lowest_class=2, pause_ms=0)
HOT = EngineLimits(active_slots=2, prefill_share=0.25, lowest_class=0, pause_ms=200)
SETTINGS = GpuSettings(warm_c=80, hot_c=87, hysteresis_c=5, cooling_s=10)


@dataclass
class Bench:
    """A throttler with a GPU, an engine and a clock that the test advances; it reads on request."""

    settings: GpuSettings = SETTINGS
    gpus: Gpus = field(default_factory=Gpus)
    status: EngineStatus = field(default_factory=lambda: EngineStatus(EngineState.STOPPED))
    sent: list[EngineLimits] = field(default_factory=list)
    told: list[Thermal] = field(default_factory=list)
    sleeps_s: list[float] = field(default_factory=list)
    looks: int = 0
    now: float = 0.0
    fault: Exception | None = None
    metrics: DaemonMetrics = field(default_factory=DaemonMetrics)
    listeners: list[Callable[[str, EngineStatus], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.wake = asyncio.Event()
        self.slept = asyncio.Event()
        self.guard = ThermalThrottler(
            self.settings,
            engines=self,
            limit=self.limit,
            notify=self.told.append,
            metrics=self.metrics,
            read=self.read,
            sleep=self.sleep,
            monotonic=lambda: self.now,
        )

    @property
    def statuses(self) -> dict[str, EngineStatus]:
        """The one engine there is."""
        return {"model": self.status}

    def subscribe_models(self, listener: Callable[[str, EngineStatus], None]) -> None:
        """Subscribe to the engine."""
        self.listeners.append(listener)

    def limit(self, limit_for: Callable[[int], EngineLimits]) -> None:
        """Record the limits for an engine of this many slots."""
        assert self.status.model is not None
        self.sent.append(limit_for(self.status.model.slots))

    def engine(self, state: EngineState, *, slots: int = SLOTS, running: int = 0) -> None:
        """Change the engine's state."""
        self.status = EngineStatus(state, model=structs.replace(MODEL, slots=slots), running=running)
        for listener in self.listeners:
            listener("model", self.status)

    def gpu(self, *temperatures_c: float | None, slowdowns: tuple[str, ...] = ()) -> None:
        """Set the GPUs' temperatures."""
        self.gpus = Gpus(
            tuple(
                GpuReading(index=index, temperature_c=temperature_c, slowdowns=slowdowns)
                for index, temperature_c in enumerate(temperatures_c)
            )
        )

    def read(self) -> Gpus:
        """Count a reading."""
        self.looks += 1
        if self.fault is not None:
            raise self.fault
        return self.gpus

    async def sleep(self, seconds: float) -> None:
        """Sleep until the test continues."""
        self.sleeps_s.append(seconds)
        self.slept.set()
        await self.wake.wait()
        self.wake.clear()

    async def looked(self) -> None:
        """Wait until the throttler has read and sleeps again."""
        async with asyncio.timeout(60):
            await self.slept.wait()
        self.slept.clear()

    async def look(self, *temperatures_c: float | None, now: float, slowdowns: tuple[str, ...] = ()) -> None:
        """Let it read these temperatures at this second."""
        self.now = now
        self.gpu(*temperatures_c, slowdowns=slowdowns)
        self.wake.set()
        await self.looked()

    def shown(self, name: str, **labels: str) -> float | None:
        """Return a metric."""
        return self.metrics.registry.get_sample_value(name, labels)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    """A throttler of a ready engine's GPU, at 50 °C."""
    bench = Bench()
    bench.guard.begin()
    bench.gpu(50.0)
    bench.engine(EngineState.READY)
    await bench.looked()
    yield bench
    await bench.guard.close()


async def test_failed_reading_does_not_end_the_monitoring(bench: Bench) -> None:
    """The last state holds meanwhile, and it is read again after a wait."""
    await bench.look(90.0, now=2.0)
    assert bench.sent == [HOT]
    bench.fault = ValueError("a reading that was not expected")
    bench.wake.set()
    with capture_logs() as logs:
        await bench.looked()
    assert [line["event"] for line in logs] == ["task_restarts"]
    assert bench.sleeps_s[-1] == RESTART_MIN_S
    bench.fault = None
    await bench.look(50.0, now=100.0)
    assert bench.sent == [HOT, WARM]


async def test_cool_gpu_publishes_nothing(bench: Bench) -> None:
    """Neither the engine nor clients are notified; the metrics have the state."""
    await bench.look(60.0, now=2.0)
    assert (bench.sent, bench.told, bench.looks) == ([], [], 2)
    assert bench.shown("inferencecenter_thermal_state", state="cool") == 1
    assert bench.shown("inferencecenter_thermal_state", state="hot") == 0


async def test_heat_limits_the_engine_and_is_published(bench: Bench) -> None:
    """The state rises at once and falls in steps, each published once, with the reason in the log."""
    with capture_logs() as logs:
        await bench.look(88.0, now=2.0)
        await bench.look(88.0, now=4.0)
        await bench.look(70.0, now=14.0)
        await bench.look(70.0, now=24.0)
    assert bench.sent == [HOT, WARM, UNLIMITED]
    assert bench.told == [
        Thermal(
            state="hot",
            temp=88.0,
            action="2 of 8 slots, prompts read at 25%, interactive turns only, a pause of 200 ms after each step",
        ),
        Thermal(state="warm", temp=70.0, action="4 of 8 slots, prompts read at 50%"),
        Thermal(state="cool", temp=70.0, action="8 of 8 slots"),
    ]
    lines = [(line["log_level"], line["state"], line["reason"]) for line in logs if line["event"] == "thermal"]
    assert lines == [
        ("warning", "hot", "88 °C, hot from 87 °C on"),
        ("warning", "warm", "70 °C"),
        ("info", "cool", "70 °C"),
    ]


async def test_throttling_gpu_counts_as_warm(bench: Bench) -> None:
    """Its temperature does not matter."""
    await bench.look(60.0, now=2.0, slowdowns=("sw_thermal", "power_cap"))
    assert bench.sent == [WARM]
    assert bench.shown("inferencecenter_thermal_state", state="warm") == 1


async def test_readings_are_frequent_only_with_turns(bench: Bench) -> None:
    """A turn that waits because of the heat counts as well."""
    for running, waiting in ((1, 0), (0, 1), (0, 0)):
        bench.status = replace(bench.status, running=running, waiting=waiting)
        await bench.look(50.0, now=2.0)
    assert bench.sleeps_s == [IDLE_EVERY_S, BUSY_EVERY_S, BUSY_EVERY_S, IDLE_EVERY_S]


@pytest.mark.parametrize("state", [state for state in EngineState if state is not EngineState.READY])
async def test_no_readings_without_a_ready_engine(bench: Bench, state: EngineState) -> None:
    """An engine that sleeps, starts, is lost or stopped has no timer until the next one is ready."""
    bench.engine(state)
    bench.wake.set()
    for _ in range(10):
        await asyncio.sleep(0)
    assert bench.looks == 1
    assert "watching=False" in repr(bench.guard)
    bench.wake.clear()
    bench.engine(EngineState.READY)
    await bench.looked()
    assert bench.looks == 2


async def test_next_engine_is_limited_at_once(bench: Bench) -> None:
    """The limit depends on its number of slots, and applies before the next reading."""
    await bench.look(88.0, now=2.0)
    bench.engine(EngineState.BACKOFF)
    bench.engine(EngineState.STARTING)
    bench.engine(EngineState.READY, slots=2)
    assert bench.sent == [HOT, EngineLimits(active_slots=1, prefill_share=0.25, lowest_class=0, pause_ms=200)]
    assert len(bench.told) == 1, "nothing has changed for clients"


async def test_gpu_lost_while_hot_is_no_longer_read(bench: Bench) -> None:
    """Its limits are lifted step by step, and then the timer ends."""
    await bench.look(88.0, now=2.0)
    await bench.look(now=12.0)
    bench.now = 22.0
    bench.wake.set()
    async with asyncio.timeout(60):
        while bench.sent[-1] != UNLIMITED:  # noqa: ASYNC110 - it ends without an event
            await asyncio.sleep(0)
    assert bench.sent == [HOT, WARM, UNLIMITED]
    assert bench.told[-1].temp is None


async def test_no_timer_without_a_gpu() -> None:
    """Each engine is checked once."""
    bench = Bench()
    bench.guard.begin()
    for looks in (1, 2):
        bench.engine(EngineState.STARTING)
        bench.engine(EngineState.READY)
        async with asyncio.timeout(60):
            while bench.looks < looks or "watching=True" in repr(bench.guard):  # noqa: ASYNC110 - likewise
                await asyncio.sleep(0)
    assert (bench.sleeps_s, bench.sent, bench.told) == ([], [], [])
    await bench.guard.close()


async def test_disabled_throttler_reads_nothing() -> None:
    """It has no timer either."""
    bench = Bench(settings=GpuSettings(thermal_guard=False))
    bench.guard.begin()
    assert bench.listeners == []


async def test_unused_gpus_do_not_count() -> None:
    """Their heat is ignored."""
    bench = Bench(settings=SETTINGS.model_copy(update={"devices": ("1",)}))
    bench.guard.begin()
    bench.gpu(99.0, 50.0)
    bench.engine(EngineState.READY)
    await bench.looked()
    assert bench.sent == []
    await bench.look(50.0, 81.0, now=2.0)
    assert bench.sent == [WARM]
    await bench.guard.close()


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 5, 8, 256])
def test_limits_leave_at_least_one_slot(slots: int) -> None:
    """The hotter the GPU, the fewer slots."""
    limits = [limit_for(state, slots=slots, hot_pause_ms=0) for state in ThermalState]
    assert [limit.active_slots for limit in limits] == sorted([limit.active_slots for limit in limits], reverse=True)
    assert limits[0].active_slots == slots
    assert all(limit.active_slots >= 1 for limit in limits)
    assert all("pause" not in describe(limit, slots=slots) for limit in limits)


@pytest.mark.parametrize(
    "wrong",
    [{"warm_c": 90.0, "hot_c": 90.0}, {"warm_c": 0.0}, {"hot_c": 151.0}, {"hysteresis_c": -1.0}, {"warm_c": 88}],
)
def test_inconsistent_thresholds_are_refused(wrong: dict[str, Any]) -> None:
    """The error has the values; no engine is started."""
    with pytest.raises(ValidationError):
        GpuSettings(**wrong)

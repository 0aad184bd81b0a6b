"""Monitors memory while an engine is ready: when it is short, parked KV is released, then new turns are refused."""

from __future__ import annotations

import asyncio
import os
import time
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

import structlog

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.core.tasks import TaskGroup
from inferencecenter.hardware.memory import cgroup_memory, machine_memory, resident_memory
from inferencecenter.hardware.nvml import read_gpus
from inferencecenter.hardware.placement import MIB
from inferencecenter.hardware.pressure import MAIN_MEMORY, MemoryUsage, Pressure, PressureState, next_pressure
from inferencecenter.hardware.thermal import select_gpus
from inferencecenter.ipc.messages import KvRamLimit
from inferencecenter.ipc.port import EngineState

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from inferencecenter.config.settings import GpuSettings, MemorySettings
    from inferencecenter.hardware.nvml import GpuReading
    from inferencecenter.ipc.port import EngineStatus
    from inferencecenter.telemetry.metrics import DaemonMetrics

BUSY_EVERY_S: Final = 2.0
IDLE_EVERY_S: Final = 30.0

_log = structlog.get_logger(__name__)
_OF_CGROUP: Final = 0.90
_OF_MACHINE: Final = 0.95


class MonitoredEngine(Protocol):
    """An engine as the monitor sees it."""

    @property
    def status(self) -> EngineStatus:
        """The engine's current status."""

    def send(self, message: KvRamLimit) -> None:
        """Send a message if the engine is ready."""


class MemoryPressureMonitor:
    """Measures memory every 2 s while turns run or memory is short, else every 30 s, and not without a ready engine.

    Above a limit the engines release parked KV until usage is calm, and may park no more than is left. If it is still
    above the limit at the next measurement, no turn is admitted until it is calm; running turns continue. When the last
    engine is gone the pressure is reset: most memory was the engine's, and the next turn may start another.

    Args:
        engines: All engines, whatever their state.
        measure: Measures memory given the engines' statuses; called off the event loop.
        metrics: Where the state is recorded.
        sleep: Waits for seconds.
        monotonic: Monotonic clock in seconds.
    """

    def __init__(
        self,
        *,
        engines: Callable[[], Iterable[MonitoredEngine]],
        measure: Callable[[Sequence[EngineStatus]], Sequence[MemoryUsage]],
        metrics: DaemonMetrics,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engines = engines
        self._measure = measure
        self._metrics = metrics
        self._sleep = sleep
        self._monotonic = monotonic
        self._pressure = Pressure()
        self._tasks = TaskGroup("memory")
        self._watching: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._pressure.state.value}, watching={self._watching is not None})"

    @property
    def pressure(self) -> Pressure:
        """The pressure at the last measurement."""
        return self._pressure

    def admit(self) -> None:
        """Raise if a turn that has not begun may not begin now.

        Raises:
            InferenceCenterError: ``overloaded``.
        """
        if self._pressure.state is PressureState.FULL:
            raise InferenceCenterError(
                ErrorCode.OVERLOADED,
                "memory is short, no turn can begin",
                hint="Retry later; running turns continue.",
            )

    def engine_changed(self, _status: EngineStatus) -> None:
        """Start or stop monitoring; to be subscribed to every engine."""
        if self._any_ready and self._watching is None:
            self._watching = self._tasks.keep_running(self._watch, name="watch", pause=self._sleep)
        elif not self._any_ready and self._watching is not None:
            self._watching.cancel()
            self._rest()

    async def close(self) -> None:
        await self._tasks.cancel()

    @property
    def _any_ready(self) -> bool:
        return any(engine.status.state is EngineState.READY for engine in self._engines())

    async def _watch(self) -> None:
        # Reset after a fault: memory that cannot be measured refuses no turn.
        self._become(Pressure(), action=self._act(Pressure()))
        while self._any_ready:
            usages = await asyncio.to_thread(self._measure, [engine.status for engine in self._engines()])
            pressure = next_pressure(self._pressure, usages, now=self._monotonic())
            self._become(pressure, action=self._act(pressure))
            states = [engine.status for engine in self._engines()]
            busy = any(state.running or state.waiting for state in states)
            short = pressure.state is not PressureState.EASY
            await self._sleep(BUSY_EVERY_S if busy or short else IDLE_EVERY_S)
        self._rest()

    def _rest(self) -> None:
        self._watching = None
        self._become(Pressure(), action="no engine is ready")

    def _become(self, pressure: Pressure, *, action: str) -> None:
        before, self._pressure = self._pressure, pressure
        main = pressure.usage(MAIN_MEMORY)
        self._metrics.set_memory(
            pressure.state,
            used_bytes=main.used_bytes if main else None,
            limit_bytes=main.limit_bytes if main else None,
            states=PressureState,
        )
        if pressure.state is before.state:
            return
        level = _log.info if pressure.state is PressureState.EASY else _log.warning
        level("memory_pressure", state=pressure.state.value, reason=describe(pressure.usages), action=action)

    def _act(self, pressure: Pressure) -> str:
        """Send the engines the limits of their parked KV; return what was done as text."""
        main = pressure.usage(MAIN_MEMORY)
        words = "no turn begins" if pressure.state is PressureState.FULL else "turns begin"
        if main is not None and main.is_over:
            for engine in self._engines():
                engine.send(KvRamLimit(kept_by(engine.status, main)))
            return f"parked KV takes {main.kept_bytes // MIB} MiB at most, {words}"
        if pressure.state is PressureState.EASY and self._pressure.state is not PressureState.EASY:
            for engine in self._engines():
                engine.send(KvRamLimit(None))
            return f"KV is parked as usual, {words}"
        return words


def kept_by(engine: EngineStatus, main: MemoryUsage) -> int:
    """Return the bytes that an engine's parked KV may keep: the same fraction for every engine."""
    return engine.parked_ram_bytes * main.kept_bytes // main.parked_bytes if main.parked_bytes else 0


def describe(usages: Iterable[MemoryUsage]) -> str:
    """Return memory usages as text for people."""
    return ", ".join(
        f"{each.name}: {each.used_bytes // MIB} of {each.limit_bytes // MIB} MiB"
        + (f", {each.parked_bytes // MIB} of them parked" if each.parked_bytes else "")
        for each in usages
    )


def reader(memory: MemorySettings, gpu: GpuSettings) -> Callable[[Sequence[EngineStatus]], list[MemoryUsage]]:
    """Return a function that measures memory around engines in given states; it blocks for some milliseconds."""
    return partial(_read, memory, gpu)


def _read(memory: MemorySettings, gpu: GpuSettings, engines: Sequence[EngineStatus]) -> list[MemoryUsage]:
    main = main_memory(memory, engines)
    usages = [] if main is None else [main]
    if memory.vram_floor_mib is not None:
        floor_bytes = memory.vram_floor_mib * MIB
        readings = select_gpus(read_gpus().readings, gpu.devices)
        usages += gpu_memory(readings, floor_bytes=floor_bytes, hysteresis=memory.hysteresis_percent / 100)
    return usages


def main_memory(memory: MemorySettings, engines: Sequence[EngineStatus]) -> MemoryUsage | None:
    """Return the usage of main memory: this daemon's if a ceiling is set, else its cgroup's or the machine's.

    The daemon's is ``RssAnon + RssShmem`` of its processes. Parked KV counts once: as shared memory of the engine that
    has touched it, or as files that it has not.
    """
    parked_bytes = sum(each.parked_ram_bytes for each in engines)
    if memory.ram_ceiling_mib is not None:
        used_bytes, limit_bytes = _own_bytes(engines), memory.ram_ceiling_mib * MIB
    elif (group := cgroup_memory()) is not None:
        used_bytes, limit_bytes = group.used_bytes, int(group.total_bytes * _OF_CGROUP)
    elif (machine := machine_memory()) is not None:
        used_bytes, limit_bytes = machine.used_bytes, int(machine.total_bytes * _OF_MACHINE)
    else:
        return None
    return MemoryUsage(
        name=MAIN_MEMORY,
        used_bytes=used_bytes,
        limit_bytes=limit_bytes,
        calm_bytes=int(limit_bytes * (1 - memory.hysteresis_percent / 100)),
        parked_bytes=parked_bytes,
    )


def gpu_memory(readings: Iterable[GpuReading], *, floor_bytes: int, hysteresis: float) -> list[MemoryUsage]:
    """Return each GPU's usage: at the limit ``floor_bytes`` are free, when calm by ``hysteresis`` more."""
    return [
        MemoryUsage(
            name=f"GPU {reading.index}",
            used_bytes=reading.vram_total_bytes - reading.vram_free_bytes,
            limit_bytes=reading.vram_total_bytes - floor_bytes,
            calm_bytes=reading.vram_total_bytes - int(floor_bytes * (1 + hysteresis)),
        )
        for reading in readings
        if reading.vram_total_bytes is not None and reading.vram_free_bytes is not None
    ]


def _own_bytes(engines: Iterable[EngineStatus]) -> int:
    front = resident_memory(os.getpid())
    total = front.own_bytes + front.shared_bytes
    for each in engines:
        engine = resident_memory(each.pid) if each.pid is not None else None
        own, shared = (engine.own_bytes, engine.shared_bytes) if engine else (0, 0)
        total += own + max(shared, each.parked_ram_bytes)
    return total

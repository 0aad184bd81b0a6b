"""Keeps the GPUs cool: looks at them while an engine is ready, and has it do less when they are hot."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

import structlog

from inferencecenter.hardware.nvml import SLOWDOWN_NAMES, read_gpus
from inferencecenter.hardware.thermal import Heat, ThermalState, Thresholds, felt, watched
from inferencecenter.ipc.messages import Limit
from inferencecenter.ipc.port import EngineState
from inferencecenter.protocol.events import Thermal
from inferencecenter.tasks import TaskGroup

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from inferencecenter.hardware.nvml import GpuReading, Gpus
    from inferencecenter.ipc.port import EnginePort, EngineStatus
    from inferencecenter.settings import GpuSettings
    from inferencecenter.telemetry.metrics import Metrics

BUSY_EVERY_S: Final = 2.0
IDLE_EVERY_S: Final = 30.0
_INTERACTIVE: Final = 0
_BATCH: Final = 2

_log = structlog.get_logger(__name__)


class ThermalGuard:
    """Reads the GPUs every 2 s while turns run, every 30 s while none does, and not at all without a ready engine.

    Where there is no GPU it looks once for each engine that gets ready, and keeps no timer. A limit outlives the engine
    that it was made for: the next one is told before its first turn.

    Args:
        gpu: Which GPUs are watched, from when on they are warm and hot, and whether anything is done about it.
        engine: Whose turns heat them.
        limit: Tells a ready engine what it may do.
        tell: Tells all clients.
        metrics: Where it is shown how they are.
        read: Readings of all GPUs; called off the event loop.
        sleep: Waits for seconds.
        monotonic: Seconds that only rise.
    """

    def __init__(  # noqa: PLR0913 - keyword-only; the last two have defaults
        self,
        gpu: GpuSettings,
        *,
        engine: EnginePort,
        limit: Callable[[Limit], None],
        tell: Callable[[Thermal], None],
        metrics: Metrics,
        read: Callable[[], Gpus] = read_gpus,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gpu = gpu
        self._thresholds = Thresholds(
            warm_c=gpu.warm_c, hot_c=gpu.hot_c, hysteresis_c=gpu.hysteresis_c, dwell_s=gpu.cooling_s
        )
        self._engine = engine
        self._limit = limit
        self._tell = tell
        self._metrics = metrics
        self._read = read
        self._sleep = sleep
        self._monotonic = monotonic
        self._heat = Heat()
        self._tasks = TaskGroup("thermal")
        self._watching: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._heat.state.value}, watching={self._watching is not None})"

    def begin(self) -> None:
        """Watch whenever the engine is ready, if that is wanted; to be called before it is started."""
        if self._gpu.thermal_guard:
            self._engine.subscribe(self._engine_changed)

    async def close(self) -> None:
        """Look no more."""
        await self._tasks.cancel()

    def _engine_changed(self, status: EngineStatus) -> None:
        ready = status.state is EngineState.READY
        if ready and self._watching is None:
            if self._heat.state is not ThermalState.COOL:
                self._tell_engine(status)
            self._watching = self._tasks.spawn(self._watch(), name="watch")
        elif not ready and self._watching is not None:
            self._watching.cancel()
            self._watching = None

    async def _watch(self) -> None:
        while True:
            readings = watched((await asyncio.to_thread(self._read)).readings, self._gpu.devices)
            self._look(readings)
            if not readings and self._heat.state is ThermalState.COOL:
                self._watching = None
                return
            engine = self._engine.status
            await self._sleep(BUSY_EVERY_S if engine.running or engine.waiting else IDLE_EVERY_S)

    def _look(self, readings: Sequence[GpuReading]) -> None:
        before, self._heat = self._heat, felt(self._heat, readings, self._thresholds, now=self._monotonic())
        heat = self._heat
        slowdowns = {name for each in readings for name in each.slowdowns or ()}
        self._metrics.set_thermal(heat.state, slowdowns, states=ThermalState, known_slowdowns=SLOWDOWN_NAMES)
        if heat.state is before.state:
            return
        action = self._tell_engine(self._engine.status)
        level = _log.info if heat.state is ThermalState.COOL else _log.warning
        level("thermal", state=heat.state.value, temp_c=heat.temperature_c, reason=heat.reason, action=action)
        self._tell(Thermal(state=heat.state.value, temp=heat.temperature_c, action=action))

    def _tell_engine(self, status: EngineStatus) -> str:
        """Tell the engine what it may do, and return that in words."""
        slots = status.model.slots if status.model else 1
        limit = limit_for(self._heat.state, slots=slots, hot_pause_ms=self._gpu.hot_pause_ms)
        self._limit(limit)
        return describe(limit, slots=slots)


def limit_for(state: ThermalState, *, slots: int, hot_pause_ms: int) -> Limit:
    """Return what an engine of so many slots may do: half of all when warm, hot a quarter for those who wait for it."""
    match state:
        case ThermalState.COOL:
            return Limit(active_slots=slots, prefill_share=1.0, lowest_class=_BATCH, pause_ms=0)
        case ThermalState.WARM:
            return Limit(active_slots=-(-slots // 2), prefill_share=0.5, lowest_class=_BATCH, pause_ms=0)
        case ThermalState.HOT:
            return Limit(
                active_slots=-(-slots // 4), prefill_share=0.25, lowest_class=_INTERACTIVE, pause_ms=hot_pause_ms
            )


def describe(limit: Limit, *, slots: int) -> str:
    """Return a limit in words, for people."""
    parts = [f"{limit.active_slots} of {slots} slots"]
    if limit.prefill_share < 1:
        parts.append(f"prompts read at {limit.prefill_share:.0%}")
    if limit.lowest_class < _BATCH:
        parts.append("interactive turns only")
    if limit.pause_ms:
        parts.append(f"a pause of {limit.pause_ms} ms after each step")
    return ", ".join(parts)

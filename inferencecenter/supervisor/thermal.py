"""Monitors the GPUs' temperatures while an engine is ready, and throttles the engines when they are hot."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

import structlog

from inferencecenter.core.tasks import TaskGroup
from inferencecenter.hardware.nvml import read_gpus
from inferencecenter.hardware.thermal import Heat, ThermalState, Thresholds, next_heat, select_gpus
from inferencecenter.ipc.messages import EngineLimits
from inferencecenter.ipc.port import EngineState
from inferencecenter.protocol.events import Thermal

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from inferencecenter.config.settings import GpuSettings
    from inferencecenter.hardware.nvml import GpuReading, Gpus
    from inferencecenter.ipc.port import EngineStatus
    from inferencecenter.telemetry.metrics import DaemonMetrics

BUSY_EVERY_S: Final = 2.0
IDLE_EVERY_S: Final = 30.0
_INTERACTIVE: Final = 0
_BATCH: Final = 2

_log = structlog.get_logger(__name__)


class ThrottledEngines(Protocol):
    """The engines as the throttler sees them."""

    @property
    def statuses(self) -> Mapping[str, EngineStatus]:
        """The status of each engine by model name."""

    def subscribe_models(self, listener: Callable[[str, EngineStatus], None]) -> None:
        """Call ``listener`` with a model's name and its engine's status when that changes."""


class ThermalThrottler:
    """Polls the GPUs every 2 s while turns run, every 30 s while none does, and not at all without a ready engine.

    Without a GPU it polls once for each engine that gets ready, and keeps no timer. A limit outlives the engine that it
    was set for: the next engine gets it before its first turn.

    Args:
        gpu: The monitored GPUs, their thresholds, and whether the throttler is enabled.
        engines: The engines to throttle.
        limit: Sends each ready engine the limits for its number of slots.
        notify: Sends an event to all clients.
        metrics: Where the state is recorded.
        read: Reads all GPUs; called off the event loop.
        sleep: Waits for seconds.
        monotonic: Monotonic clock in seconds.
    """

    def __init__(  # noqa: PLR0913 - keyword-only; the last two have defaults
        self,
        gpu: GpuSettings,
        *,
        engines: ThrottledEngines,
        limit: Callable[[Callable[[int], EngineLimits]], None],
        notify: Callable[[Thermal], None],
        metrics: DaemonMetrics,
        read: Callable[[], Gpus] = read_gpus,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gpu = gpu
        self._thresholds = Thresholds(
            warm_c=gpu.warm_c, hot_c=gpu.hot_c, hysteresis_c=gpu.hysteresis_c, dwell_s=gpu.cooling_s
        )
        self._engines = engines
        self._limit = limit
        self._notify = notify
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
        """Monitor whenever an engine is ready, if enabled; call it before engines are started."""
        if self._gpu.thermal_guard:
            self._engines.subscribe_models(self._engine_changed)

    async def close(self) -> None:
        """Stop monitoring."""
        await self._tasks.cancel()

    def _engine_changed(self, _name: str, status: EngineStatus) -> None:
        if status.state is EngineState.READY and self._heat.state is not ThermalState.COOL:
            self._limit_engines()
        ready = any(each.state is EngineState.READY for each in self._engines.statuses.values())
        if ready and self._watching is None:
            self._watching = self._tasks.keep_running(self._watch, name="watch", pause=self._sleep)
        elif not ready and self._watching is not None:
            self._watching.cancel()
            self._watching = None

    async def _watch(self) -> None:
        while True:
            readings = select_gpus((await asyncio.to_thread(self._read)).readings, self._gpu.devices)
            self._look(readings)
            if not readings and self._heat.state is ThermalState.COOL:
                self._watching = None
                return
            busy = any(each.running or each.waiting for each in self._engines.statuses.values())
            await self._sleep(BUSY_EVERY_S if busy else IDLE_EVERY_S)

    def _look(self, readings: Sequence[GpuReading]) -> None:
        before, self._heat = self._heat, next_heat(self._heat, readings, self._thresholds, now=self._monotonic())
        heat = self._heat
        self._metrics.set_thermal(heat.state, states=ThermalState)
        if heat.state is before.state:
            return
        action = self._limit_engines()
        level = _log.info if heat.state is ThermalState.COOL else _log.warning
        level("thermal", state=heat.state.value, temp_c=heat.temperature_c, reason=heat.reason, action=action)
        self._notify(Thermal(state=heat.state.value, temp=heat.temperature_c, action=action))

    def _limit_engines(self) -> str:
        """Send the engines their limits; return these as text."""
        limit = partial(limit_for, self._heat.state, hot_pause_ms=self._gpu.hot_pause_ms)
        self._limit(lambda slots: limit(slots=slots))
        n_slots = [each.model.slots for each in self._engines.statuses.values() if each.model] or [1]
        return describe(limit(slots=max(n_slots)), slots=max(n_slots))


def limit_for(state: ThermalState, *, slots: int, hot_pause_ms: int) -> EngineLimits:
    """Return an engine's limits: half its slots when warm; when hot, a quarter, for interactive turns only."""
    match state:
        case ThermalState.COOL:
            return EngineLimits(active_slots=slots, prefill_share=1.0, lowest_class=_BATCH, pause_ms=0)
        case ThermalState.WARM:
            return EngineLimits(active_slots=-(-slots // 2), prefill_share=0.5, lowest_class=_BATCH, pause_ms=0)
        case ThermalState.HOT:
            return EngineLimits(
                active_slots=-(-slots // 4), prefill_share=0.25, lowest_class=_INTERACTIVE, pause_ms=hot_pause_ms
            )


def describe(limit: EngineLimits, *, slots: int) -> str:
    """Return limits as text for people."""
    parts = [f"{limit.active_slots} of {slots} slots"]
    if limit.prefill_share < 1:
        parts.append(f"prompts read at {limit.prefill_share:.0%}")
    if limit.lowest_class < _BATCH:
        parts.append("interactive turns only")
    if limit.pause_ms:
        parts.append(f"a pause of {limit.pause_ms} ms after each step")
    return ", ".join(parts)

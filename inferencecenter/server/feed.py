"""Metrics frames for clients: one look at the machine serves everybody who wants it at that moment."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from inferencecenter.protocol.events import Metrics
from inferencecenter.protocol.values import EngineReadings, GpuReadings, InferenceReadings
from inferencecenter.tasks import TaskGroup

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferencecenter.hardware.nvml import Gpu, GpuReading
    from inferencecenter.ipc.port import EngineStatus
    from inferencecenter.sessions.client import EventSink
    from inferencecenter.sessions.registry import Sessions
    from inferencecenter.sessions.totals import Totals

_MB: Final = 2**20  # as nvidia-smi counts


class WatchedEngine(Protocol):
    """What tells how an engine is."""

    @property
    def status(self) -> EngineStatus:
        """The engine's state now."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Where readings come from; ``clock`` is Unix seconds."""

    gpu: Gpu
    engine: WatchedEngine
    sessions: Sessions
    clock: Callable[[], float]

    async def take(self) -> Metrics:
        """Return the readings now; the GPU, which takes its time, is asked off the event loop."""
        gpu = await asyncio.to_thread(self.gpu.read)
        return readings(timestamp=self.clock(), gpu=gpu, engine=self.engine.status, totals=self.sessions.totals())


class MetricsFeed:
    """Who gets metrics frames, and how often. With no subscriber nothing runs."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._tasks = TaskGroup("metrics")
        self._subscribers: dict[int, dict[EventSink, None]] = {}
        self._tickers: dict[int, asyncio.Task[None]] = {}
        self._intervals_ms: dict[EventSink, int] = {}
        self._asking: list[tuple[EventSink, str | None]] = []

    def once(self, sink: EventSink, *, request_id: str | None) -> None:
        """Send one frame, soon; all who ask before it is taken share it."""
        self._asking.append((sink, request_id))
        if len(self._asking) == 1:
            self._tasks.spawn(self._answer(), name="once")

    def subscribe(self, sink: EventSink, *, interval_ms: int) -> None:
        """Send a frame every ``interval_ms``, instead of what ``sink`` had subscribed to before."""
        self.unsubscribe(sink)
        self._intervals_ms[sink] = interval_ms
        self._subscribers.setdefault(interval_ms, {})[sink] = None
        if interval_ms not in self._tickers:
            self._tickers[interval_ms] = self._tasks.keep_running(
                partial(self._tick, interval_ms), name=f"every_{interval_ms}_ms"
            )

    def unsubscribe(self, sink: EventSink) -> None:
        """Send no more frames to ``sink``."""
        interval_ms = self._intervals_ms.pop(sink, None)
        if interval_ms is None:
            return
        subscribers = self._subscribers[interval_ms]
        del subscribers[sink]
        if not subscribers:
            del self._subscribers[interval_ms]
            self._tickers.pop(interval_ms).cancel()

    async def close(self) -> None:
        """Send nothing more to anybody."""
        await self._tasks.cancel()

    async def _answer(self) -> None:
        try:
            event = await self._sources.take()
        finally:
            asking, self._asking = self._asking, []
        for sink, request_id in asking:
            sink.send(event.model_copy(update={"id": request_id}))

    async def _tick(self, interval_ms: int) -> None:
        while True:
            await asyncio.sleep(interval_ms / 1000)
            event = await self._sources.take()
            for sink in list(self._subscribers.get(interval_ms, ())):
                sink.send(event)


def readings(*, timestamp: float, gpu: GpuReading, engine: EngineStatus, totals: Totals) -> Metrics:
    """Return the readings of all parts as a metrics frame."""
    model = engine.model
    return Metrics(
        timestamp=timestamp,
        gpu=GpuReadings(
            temp=gpu.temperature_c,
            vram_total_mb=_mb(gpu.vram_total_bytes),
            vram_used_mb=_mb(gpu.vram_used_bytes),
            vram_free_mb=_mb(gpu.vram_free_bytes),
            power_watts=gpu.power_watts,
            fan_percent=gpu.fan_percent,
            throttling=None if gpu.slowdowns is None else bool(gpu.slowdowns),
            name=gpu.name,
            utilization=gpu.utilization_percent,
            throttle_reasons=gpu.slowdowns,
        ),
        inference=InferenceReadings(
            active_generations=totals.active_generations,
            total_sessions=totals.total_sessions,
            last_tps=totals.last_tps,
            last_ttft_ms=totals.last_ttft_ms,
            total_tokens_generated=totals.total_tokens_generated,
            queue_depth=engine.waiting,
            tokens_per_s=totals.tokens_per_s,
            slots_used=engine.running,
            slots=model.slots if model else 0,
            parked_sessions=engine.parked_sessions,
            parked_mb=round(engine.parked_bytes / _MB, 1),
        ),
        engine=EngineReadings(
            state=engine.state.value,
            model=model.name if model else None,
            gpu_layers=model.n_gpu_layers if model else None,
            restarts=engine.restarts,
            rss_mb=_mb(engine.rss_bytes or None),
        ),
    )


def _mb(n_bytes: int | None) -> float | None:
    return None if n_bytes is None else round(n_bytes / _MB, 1)

"""Metrics over WebSockets; GPUs are read off the event loop, as a driver may be slow or never answer."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

import structlog

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.core.tasks import TaskGroup
from inferencecenter.hardware.nvml import NO_GPU, Gpus, read_gpus
from inferencecenter.protocol.events import Metrics
from inferencecenter.protocol.values import EngineReadings, GpuReadings, InferenceReadings
from inferencecenter.server import event_factory

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferencecenter.hardware.nvml import Gpu, GpuReading
    from inferencecenter.ipc.port import EngineStatus
    from inferencecenter.protocol.base import Event
    from inferencecenter.sessions.context import EventSink
    from inferencecenter.sessions.manager import SessionManager
    from inferencecenter.sessions.observability import Totals


MAX_AGE_S: Final = 2.0
GPU_TIMEOUT_S: Final = 1.0
_NO_ANSWER: Final = Gpus(problem="the driver does not answer")


class GpuCache:
    """Reads GPUs off the event loop, one reading at a time, at most every two seconds.

    Args:
        read: Returns readings of all GPUs; blocks for some milliseconds, or forever.
        timeout_s: Timeout of a caller, which then gets no GPUs.
        monotonic: Monotonic seconds.
    """

    def __init__(
        self,
        read: Callable[[], Gpus] = read_gpus,
        *,
        timeout_s: float = GPU_TIMEOUT_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._timeout_s = timeout_s
        self._monotonic = monotonic
        self._tasks = TaskGroup("gpus")
        self._gpus = Gpus()
        self._read_at_s = float("-inf")
        self._reading: asyncio.Task[None] | None = None

    async def get(self) -> Gpus:
        """Return readings at most two seconds old; empty if the driver does not answer in time."""
        if self._monotonic() - self._read_at_s < MAX_AGE_S:
            return self._gpus
        if self._reading is None:
            self._reading = self._tasks.spawn(self._look(), name="read")
        done, _ = await asyncio.wait([self._reading], timeout=self._timeout_s)
        return self._gpus if done else _NO_ANSWER

    async def close(self) -> None:
        """Stop waiting for a reading."""
        await self._tasks.cancel()

    async def _look(self) -> None:
        self._gpus = _NO_ANSWER
        try:
            self._gpus = await asyncio.to_thread(self._read)
            self._read_at_s = self._monotonic()
        finally:
            self._reading = None


FRESH_S: Final = 0.05
"""Maximum age of a shared GPU reading; half of the shortest interval."""
_MB: Final = 2**20  # as in nvidia-smi

_log = structlog.get_logger(__name__)


class EngineStatusSource(Protocol):
    """Provides the status of an engine."""

    @property
    def status(self) -> EngineStatus:
        """Current status of the engine."""


class MetricsSampler:
    """Samples the metrics.

    The GPU is read off the event loop, by one thread at a time and for all callers within ``FRESH_S``, so that the
    number of subscriptions, which a client may have on each socket, does not affect the number of threads. A driver
    that does not answer within ``GPU_TIMEOUT_S`` counts as no GPU.

    Args:
        gpu: The GPU in use.
        engine: The engine.
        sessions: All sessions.
        clock: Unix seconds.
        monotonic: Monotonic seconds.
    """

    def __init__(
        self,
        *,
        gpu: Gpu,
        engine: EngineStatusSource,
        sessions: SessionManager,
        clock: Callable[[], float],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gpu = gpu
        self._engine = engine
        self._sessions = sessions
        self._clock = clock
        self._monotonic = monotonic
        self._reading: asyncio.Future[GpuReading] | None = None
        self._begun_at_s = 0.0

    async def sample(self) -> Metrics:
        gpu = await self._read_gpu()
        return readings(timestamp=self._clock(), gpu=gpu, engine=self._engine.status, totals=self._sessions.totals())

    async def _read_gpu(self) -> GpuReading:
        now_s = self._monotonic()
        reading = self._reading
        if reading is None or (reading.done() and now_s - self._begun_at_s >= FRESH_S):
            reading = self._reading = asyncio.get_running_loop().run_in_executor(None, self._gpu.read)
            self._begun_at_s = now_s
        done, _ = await asyncio.wait([reading], timeout=GPU_TIMEOUT_S)
        return reading.result() if done else NO_GPU


class MetricsFeed:
    """Subscriptions to metrics frames. Without a subscriber nothing runs."""

    def __init__(self, sources: MetricsSampler) -> None:
        self._sources = sources
        self._tasks = TaskGroup("metrics")
        self._subscribers: dict[int, dict[EventSink, None]] = {}
        self._tickers: dict[int, asyncio.Task[None]] = {}
        self._intervals_ms: dict[EventSink, int] = {}
        self._asking: list[tuple[EventSink, str | None]] = []

    def once(self, sink: EventSink, *, request_id: str | None) -> None:
        """Send one frame soon; all requests until it is sampled share it."""
        self._asking.append((sink, request_id))
        if len(self._asking) == 1:
            self._tasks.spawn(self._answer(), name="once")

    def subscribe(self, sink: EventSink, *, interval_ms: int) -> None:
        """Send a frame every ``interval_ms``, replacing the previous subscription of ``sink``."""
        self.unsubscribe(sink)
        self._intervals_ms[sink] = interval_ms
        self._subscribers.setdefault(interval_ms, {})[sink] = None
        if interval_ms not in self._tickers:
            self._tickers[interval_ms] = self._tasks.keep_running(
                partial(self._tick, interval_ms), name=f"every_{interval_ms}_ms"
            )

    def unsubscribe(self, sink: EventSink) -> None:
        """End the subscription of ``sink``."""
        interval_ms = self._intervals_ms.pop(sink, None)
        if interval_ms is None:
            return
        subscribers = self._subscribers[interval_ms]
        del subscribers[sink]
        if not subscribers:
            del self._subscribers[interval_ms]
            self._tickers.pop(interval_ms).cancel()

    async def close(self) -> None:
        """End all subscriptions."""
        await self._tasks.cancel()

    async def _answer(self) -> None:
        event: Event
        try:
            event = await self._sources.sample()
        except Exception:  # noqa: BLE001 - boundary: reported to each caller
            _log.exception("metrics_failed")
            event = event_factory.error_event(InferenceCenterError(ErrorCode.INTERNAL))
        asking, self._asking = self._asking, []
        for sink, request_id in asking:
            _send(sink, event.model_copy(update={"id": request_id}))

    async def _tick(self, interval_ms: int) -> None:
        while True:
            await asyncio.sleep(interval_ms / 1000)
            event = await self._sources.sample()
            for sink in list(self._subscribers.get(interval_ms, ())):
                _send(sink, event)


def _send(sink: EventSink, event: Event) -> None:
    """Send an event; an exception in one sink does not affect the others."""
    try:
        sink.send(event)
    except Exception:  # noqa: BLE001 - boundary: a defect of one socket must not end the frames of others
        _log.exception("metrics_unsent")


def readings(*, timestamp: float, gpu: GpuReading, engine: EngineStatus, totals: Totals) -> Metrics:
    """Return the metrics frame of all readings."""
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

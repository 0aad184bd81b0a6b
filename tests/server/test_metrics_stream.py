"""Metrics frames."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

from inferencecenter.core.tasks import RESTART_MIN_S, TaskGroup
from inferencecenter.hardware.nvml import GpuReading
from inferencecenter.server.metrics_stream import FRESH_S, GPU_TIMEOUT_S, MetricsSampler
from tests.server.harness import Running, StubGpu, ask, ready, receive, stub_context

if TYPE_CHECKING:
    import pytest
    from websockets.asyncio.client import ClientConnection

    from inferencecenter.protocol.base import Event
    from tests.loop_clock import LoopClock

READING = GpuReading(
    name="GPU",
    temperature_c=61.0,
    vram_total_bytes=8 * 2**30,
    vram_used_bytes=2**30,
    vram_free_bytes=7 * 2**30,
    power_watts=55.5,
    utilization_percent=12.0,
    slowdowns=("sw_thermal",),
)


async def skip_hello(socket: ClientConnection) -> None:
    """Receive the first frame."""
    assert (await receive(socket))["op"] == "auth_success"


async def test_metrics_on_request(server: Running) -> None:
    """The frame echoes the id; without a GPU every reading is null."""
    async with server.v1() as socket:
        await skip_hello(socket)
        frame = await ask(socket, op="metrics", id="m")
    assert (frame["op"], frame["id"]) == ("metrics", "m")
    assert set(frame["gpu"]) == {
        "temp", "vram_total_mb", "vram_used_mb", "vram_free_mb", "power_watts", "fan_percent", "throttling", "name",
        "utilization", "throttle_reasons",
    }  # fmt: skip
    assert set(frame["gpu"].values()) == {None}
    assert frame["engine"] == {"state": "ready", "model": "stub", "gpu_layers": 0, "restarts": 0, "rss_mb": None}


async def test_version_0_metrics(server: Running) -> None:
    """``gpu.temp`` is present without a GPU."""
    async with server.connect(additional_headers={"X-Client-ID": "kitchen", "X-API-Key": "kitchen-key"}) as socket:
        await skip_hello(socket)
        frame = await ask(socket, op="metrics")
    assert set(frame) == {"op", "timestamp", "gpu", "inference"}
    assert frame["gpu"]["temp"] is None
    assert len(frame["gpu"]) == 7
    assert set(frame["inference"]) == {
        "active_generations", "total_sessions", "last_tps", "last_ttft_ms", "total_tokens_generated",
    }  # fmt: skip


async def test_gpu_readings(server: Running) -> None:
    """Bytes become mebibytes, and missing readings null."""
    server.gpu.reading = READING
    async with server.v1() as socket:
        await skip_hello(socket)
        gpu = (await ask(socket, op="metrics"))["gpu"]
    assert gpu == {
        "temp": 61.0, "vram_total_mb": 8192.0, "vram_used_mb": 1024.0, "vram_free_mb": 7168.0, "power_watts": 55.5,
        "fan_percent": None, "throttling": True, "name": "GPU", "utilization": 12.0, "throttle_reasons": ["sw_thermal"],
    }  # fmt: skip


async def test_offloaded_sessions_are_reported(server: Running) -> None:
    """``metrics`` and an operator's ``status`` have their number and size."""
    server.engine.become(ready(parked_sessions=3, parked_bytes=5 * 2**19))
    key = {"X-Client-ID": "desk", "X-API-Key": "desk-key"}
    async with server.connect(additional_headers=key) as socket:
        await skip_hello(socket)
        await ask(socket, op="hello", protocol=1)
        inference = (await ask(socket, op="metrics"))["inference"]
        values = (await ask(socket, op="status", type="memory"))["values"]
    assert (inference["parked_sessions"], inference["parked_mb"]) == (3, 2.5)
    assert (values["parked_sessions"], values["parked_bytes"]) == (3, 5 * 2**19)
    assert (values["pressure"], values["memory_used_bytes"], values["memory_limit_bytes"]) == ("easy", None, None)


async def test_frames_require_a_subscription(clock: LoopClock, server: Running) -> None:
    """No ticker runs without one."""
    async with server.v1() as socket:
        await skip_hello(socket)
        assert (await ask(socket, op="ping"))["op"] == "pong"
        assert server.gpu.reads == 0
        subscribed = await ask(socket, op="subscribe_metrics", interval_ms=3_600_000, id="s")
        assert subscribed == {"op": "metrics_subscribed", "id": "s", "interval_ms": 3_600_000}
        for _ in range(2):
            await clock.go_on(3600)
            assert (await receive(socket))["op"] == "metrics"
        await socket.send('{"op": "unsubscribe_metrics"}')
        await receive(socket, "metrics_unsubscribed")
        await asyncio.sleep(0)
        assert len(server.context.feed._tasks) == 0
        assert (await ask(socket, op="ping"))["op"] == "pong"


async def test_failed_reading_does_not_end_the_stream(
    clock: LoopClock, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is counted, and the next frames come."""
    read, faults = server.gpu.read, iter([ValueError("a reading that was not expected")])
    failed = asyncio.Event()
    loop = asyncio.get_running_loop()

    def fail_once() -> GpuReading:
        for fault in faults:
            loop.call_soon_threadsafe(failed.set)
            raise fault
        return read()

    monkeypatch.setattr(server.gpu, "read", fail_once)
    before = TaskGroup.failures["metrics"]
    async with server.v1() as socket:
        await skip_hello(socket)
        await ask(socket, op="subscribe_metrics", interval_ms=3_600_000)
        await clock.go_on(3600)
        await asyncio.wait_for(failed.wait(), 60)
        while TaskGroup.failures["metrics"] == before:  # noqa: ASYNC110 - a step of the loop, without any time
            await asyncio.sleep(0)
        await clock.go_on(RESTART_MIN_S)
        await clock.go_on(3600)
        assert (await receive(socket))["op"] == "metrics"
    page = (await server.http("/metrics"))[2].decode()
    assert f'inferencecenter_task_failures_total{{part="metrics"}} {before + 1:.1f}' in page


async def test_subscribers_of_one_interval_share_a_reading(clock: LoopClock, server: Running) -> None:
    """The GPU is read once for both."""
    async with server.v1() as first, server.v1() as second:
        for socket in (first, second):
            await skip_hello(socket)
            await ask(socket, op="subscribe_metrics", interval_ms=10_000)
        await clock.go_on(10)
        frames = [await receive(socket) for socket in (first, second)]
        assert frames[0]["timestamp"] == frames[1]["timestamp"]
        assert server.gpu.reads == 1


async def test_new_interval_replaces_the_old(server: Running) -> None:
    """Each socket has one subscription."""
    async with server.v1() as socket:
        await skip_hello(socket)
        await ask(socket, op="subscribe_metrics", interval_ms=3_600_000)
        await ask(socket, op="subscribe_metrics", interval_ms=100)
        await asyncio.sleep(0)
        assert len(server.context.feed._tasks) == 1
        assert (await receive(socket))["op"] == "metrics"


async def test_closed_socket_is_unsubscribed(server: Running) -> None:
    """Its ticker ends."""
    async with server.v1() as socket:
        await skip_hello(socket)
        await ask(socket, op="subscribe_metrics")
        assert len(server.context.feed._tasks) == 1
    async with server.v1() as other:
        await skip_hello(other)
        await ask(other, op="ping")
        assert len(server.context.feed._tasks) == 0


async def test_concurrent_requests_share_one_reading(server: Running) -> None:
    """Every request is answered."""
    async with server.v1() as socket:
        await skip_hello(socket)
        connection = next(iter(server.context.hub._connections))
        for number in range(5):
            server.context.feed.once(connection, request_id=str(number))
        assert [(await receive(socket))["id"] for _ in range(5)] == ["0", "1", "2", "3", "4"]
        assert server.gpu.reads == 1


class RecordingSink:
    """Records events, or fails at each."""

    def __init__(self, *, failing: bool = False) -> None:
        self.failing = failing
        self.heard: list[Event] = []

    def send(self, event: Event) -> None:
        """Record the event, or fail."""
        if self.failing:
            raise RuntimeError
        self.heard.append(event)


async def test_subscriptions_share_one_driver_thread() -> None:
    """Their intervals may differ."""
    context, gpu, now_s = stub_context(), StubGpu(), 0.0
    sources = MetricsSampler(
        gpu=gpu, engine=context.models, sessions=context.sessions, clock=lambda: 0.0, monotonic=lambda: now_s
    )
    await asyncio.gather(*(sources.sample() for _ in range(20)))
    await sources.sample()
    assert gpu.reads == 1
    now_s = FRESH_S
    await sources.sample()
    assert gpu.reads == 2
    await context.close()


async def test_blocked_driver_gives_frames_without_gpu(clock: LoopClock) -> None:
    """No further thread is blocked."""
    context, answer, asked = stub_context(), threading.Event(), asyncio.Event()
    loop, begun = asyncio.get_running_loop(), []

    class Stuck(StubGpu):
        """A GPU that is read for ever."""

        def read(self) -> GpuReading:
            """Wait for the test's end."""
            begun.append(1)
            loop.call_soon_threadsafe(asked.set)
            answer.wait(60)
            return READING

    sources = MetricsSampler(gpu=Stuck(), engine=context.models, sessions=context.sessions, clock=lambda: 0.0)
    try:
        for _ in range(3):
            taking = loop.create_task(sources.sample())
            await asyncio.wait_for(asked.wait(), 60)
            await clock.go_on(GPU_TIMEOUT_S)
            assert (await taking).gpu.name is None
    finally:
        answer.set()
    assert len(begun) == 1
    await context.close()


async def test_failing_sink_does_not_affect_others() -> None:
    """Neither requests nor subscriptions are affected."""
    context, good = stub_context(), RecordingSink()
    feed = context.feed
    for sink in (RecordingSink(failing=True), good):
        feed.once(sink, request_id="m")
    async with asyncio.timeout(60):
        while not good.heard:  # noqa: ASYNC110 - a step of the loop, without any time
            await asyncio.sleep(0)
    assert [event.op for event in good.heard] == ["metrics"]
    await context.close()


async def test_failed_reading_answers_the_request(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is an error with its id."""

    def fail() -> GpuReading:
        raise ValueError

    async with server.v1() as socket:
        await skip_hello(socket)
        monkeypatch.setattr(server.gpu, "read", fail)
        answer = await ask(socket, op="metrics", id="m")
    assert (answer["op"], answer["code"], answer["id"]) == ("error", "internal", "m")

"""Cached GPU readings."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from inferencecenter.hardware.nvml import GpuReading, Gpus
from inferencecenter.server.metrics_stream import MAX_AGE_S, GpuCache

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


class FakeDriver:
    """A readable device with a clock, which may block."""

    def __init__(self) -> None:
        self.reads = 0
        self.now = 0.0
        self.answers = threading.Event()
        self.answers.set()

    def read(self) -> Gpus:
        """Count a reading, and return its number as the temperature."""
        self.reads += 1
        assert self.answers.wait(60)
        return Gpus((GpuReading(index=0, temperature_c=self.reads),))


@asynccontextmanager
async def cached(read: Callable[[], Gpus], driver: FakeDriver, timeout_s: float = 20.0) -> AsyncIterator[GpuCache]:
    """A cache that is closed at the end, with no thread left waiting for the driver."""
    cache = GpuCache(read, timeout_s=timeout_s, monotonic=lambda: driver.now)
    try:
        yield cache
    finally:
        driver.answers.set()
        await cache.close()


async def test_readings_are_cached_for_two_seconds() -> None:
    """After that the driver is read again."""
    driver = FakeDriver()
    async with cached(driver.read, driver) as cache:
        first = await cache.get()
        driver.now = MAX_AGE_S - 0.1
        assert await cache.get() is first
        driver.now = MAX_AGE_S
        assert (await cache.get()).readings[0].temperature_c == 2


async def test_concurrent_requests_share_a_reading() -> None:
    """Their number does not matter."""
    driver = FakeDriver()
    async with cached(driver.read, driver) as cache:
        found = await asyncio.gather(*(cache.get() for _ in range(10)))
    assert driver.reads == 1
    assert all(each is found[0] for each in found)


async def test_blocked_driver_returns_no_gpu() -> None:
    """One thread waits, old readings are not reused, and they return when the driver answers."""
    driver = FakeDriver()
    async with cached(driver.read, driver, timeout_s=0.01) as cache:
        driver.answers.clear()
        for _ in range(3):
            found = await cache.get()
            assert (found.readings, found.problem) == ((), "the driver does not answer")
        assert driver.reads == 1
        driver.answers.set()
        while not (await cache.get()).readings:  # noqa: ASYNC110 - it waits for the thread each time
            await asyncio.sleep(0)
    assert driver.reads == 1


async def test_failed_reading_is_retried() -> None:
    """The failure is logged, and no GPU is reported meanwhile."""
    driver = FakeDriver()
    faults = [None, RuntimeError("planned")]

    def read() -> Gpus:
        if faults and (fault := faults.pop(0)) is not None:
            raise fault
        return driver.read()

    async with cached(read, driver) as cache:
        assert (await cache.get()).readings[0].temperature_c == 1
        driver.now = MAX_AGE_S
        assert (await cache.get()).readings == ()
        assert (await cache.get()).readings[0].temperature_c == 2


@pytest.mark.parametrize("times", [1, 3])
async def test_close_does_not_wait_for_the_driver(times: int) -> None:
    """It may be called twice."""
    driver = FakeDriver()
    async with cached(driver.read, driver, timeout_s=0.01) as cache:
        driver.answers.clear()
        await cache.get()
        for _ in range(times):
            await cache.close()

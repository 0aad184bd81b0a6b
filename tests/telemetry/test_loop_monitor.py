"""The measurement of the event loop's lag."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

from structlog.testing import capture_logs

from inferencecenter.core.tasks import TaskGroup
from inferencecenter.telemetry.instruments import Distribution
from inferencecenter.telemetry.loop_monitor import BOUNDS_S, LoopMonitor

if TYPE_CHECKING:
    from collections.abc import Callable

GUARD_S = 60.0


async def until(condition: Callable[[], bool]) -> None:
    """Run the loop until a condition holds."""
    async with asyncio.timeout(GUARD_S):
        while not condition():  # noqa: ASYNC110 - a thread makes it true
            await asyncio.sleep(0.001)


async def test_lag_of_a_running_loop_is_observed() -> None:
    """Each callback that the thread posts is one observation."""
    lag_s = Distribution(BOUNDS_S)
    async with LoopMonitor(lag_s, is_idle=lambda: False):
        await until(lambda: lag_s.count >= 3)


async def test_idle_loop_is_not_measured() -> None:
    """An activity wakes the monitor."""
    asked, idle, lag_s = threading.Event(), True, Distribution(BOUNDS_S)

    def is_idle() -> bool:
        asked.set()
        return idle

    async with LoopMonitor(lag_s, is_idle=is_idle) as monitor:
        await until(asked.is_set)
        assert lag_s.count == 0
        idle = False
        monitor.wake()
        await until(lambda: lag_s.count > 0)


async def test_close_races_with_sleep() -> None:
    """A close between the last check and the wait ends the thread."""
    monitor = LoopMonitor(Distribution(BOUNDS_S), is_idle=lambda: True)
    clear = monitor._awake.clear

    def close_then_clear() -> None:
        monitor._closing.set()
        monitor._awake.set()
        clear()

    monitor._awake.clear = close_then_clear  # type: ignore[method-assign]
    async with asyncio.timeout(GUARD_S), monitor:
        await until(lambda: not monitor._thread.is_alive())


class Seen(LoopMonitor):
    """Tells when it has looked at a loop that is late."""

    def __init__(self, lag_s: Distribution) -> None:
        super().__init__(lag_s, is_idle=lambda: False)
        self.has_looked = threading.Event()

    def _activity(self) -> tuple[str, str]:
        activity = super()._activity()
        self.has_looked.set()
        return activity


class Blocking(float):
    """A number whose comparison blocks until an event."""

    awaited: threading.Event

    def __gt__(self, other: object) -> bool:
        assert self.awaited.wait(GUARD_S)
        return False


async def test_blocked_loop_is_logged() -> None:
    """The log has its task and the innermost line of the package."""
    with capture_logs() as logs:
        monitor = Seen(Distribution(BOUNDS_S))
        async with monitor:
            number = Blocking(1.0)
            number.awaited = monitor.has_looked
            tasks = TaskGroup("tests")

            async def block() -> None:
                Distribution((2.0,)).observe(number)

            await tasks.spawn(block(), name="blocks")
            await until(lambda: len(logs) > 0)
    line = logs[0]
    assert line["event"] == "loop_blocked"
    assert line["log_level"] == "warning"
    assert line["task"] == "tests:blocks"
    assert line["line"].startswith("telemetry/instruments.py:")
    assert line["line"].endswith(" observe")
    assert line["lag_ms"] >= line["cpu_ms"] >= 0

"""Measures the event loop's lag from a separate thread.

While there are connections, the thread posts a callback to the loop every 200 ms and waits until it has run: the time
in between is the lag. If the callback has not run after 100 ms, the thread samples what the loop executes, and as which
task; one log line reports that.

Lag has two causes. Either the loop's thread was busy with something that should have been bounded, sliced or moved to a
thread, or the machine did not schedule it. The CPU time of that thread distinguishes them: it does not advance while
the process is stopped, or while other processes have the processors.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

import inferencecenter

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from inferencecenter.telemetry.instruments import Distribution

INTERVAL_S: Final = 0.2
SLOW_S: Final = 0.1
BOUNDS_S: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

_PACKAGE: Final = str(Path(inferencecenter.__file__).parent)

_log = structlog.get_logger(__name__)


class LoopMonitor:
    """Observes the lag of the running event loop while its context is open.

    Args:
        lag_s: Records each lag, in seconds; called on the loop.
        is_idle: Returns whether measuring may pause. It is called from a thread; once it has returned true the thread
            sleeps until ``wake``.
    """

    def __init__(self, lag_s: Distribution, *, is_idle: Callable[[], bool]) -> None:
        self._lag_s = lag_s
        self._is_idle = is_idle
        self._loop = asyncio.get_running_loop()
        self._loop_thread_id = threading.get_ident()
        self._loop_cpu_clock = time.pthread_getcpuclockid(self._loop_thread_id)
        self._closing = threading.Event()
        self._awake = threading.Event()
        self._answered = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loop-monitor", daemon=True)

    async def __aenter__(self) -> LoopMonitor:
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closing.set()
        self._awake.set()
        await asyncio.to_thread(self._thread.join)  # the loop continues: the thread may still wait for a callback

    def wake(self) -> None:
        """Resume measuring if the thread sleeps."""
        if not self._awake.is_set():
            self._awake.set()

    def _run(self) -> None:
        while not self._closing.wait(INTERVAL_S):
            self._awake.clear()
            if not self._is_idle():
                self._measure()
            elif not self._closing.is_set():  # set before `_awake`, which may have been cleared just now
                self._awake.wait()

    def _measure(self) -> None:
        posted_s, cpu_s = time.monotonic(), self._cpu_s()
        self._answered.clear()
        try:
            self._loop.call_soon_threadsafe(self._answer, posted_s)
        except RuntimeError:  # the loop was closed without this monitor
            self._closing.set()
            return
        if self._answered.wait(SLOW_S):
            return
        task, line = self._activity()
        while not self._answered.wait(SLOW_S):
            if self._loop.is_closed():
                return
        _log.warning(
            "loop_blocked",
            lag_ms=round((time.monotonic() - posted_s) * 1000),
            cpu_ms=round((self._cpu_s() - cpu_s) * 1000),
            task=task,
            line=line,
        )

    def _answer(self, posted_s: float) -> None:
        self._lag_s.observe(time.monotonic() - posted_s)
        self._answered.set()

    def _cpu_s(self) -> float:
        return time.clock_gettime(self._loop_cpu_clock)

    def _activity(self) -> tuple[str, str]:
        """Sample the loop: the name of the task that it executes, and the innermost line of this package."""
        task = asyncio.current_task(self._loop)
        frame = sys._current_frames().get(self._loop_thread_id)
        return "" if task is None else task.get_name(), _innermost_line(frame)


def _innermost_line(frame: FrameType | None) -> str:
    """Return the innermost line of this package on a stack, as ``sessions/history.py:93 append``; empty if none."""
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_PACKAGE):
            return f"{code.co_filename[len(_PACKAGE) + 1 :]}:{frame.f_lineno} {code.co_name}"
        frame = frame.f_back
    return ""

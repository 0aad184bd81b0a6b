"""When an engine is started, suspended, killed and restarted: demand, idleness, hangs, back-off and restart budget."""

from __future__ import annotations

import asyncio
import math
import re
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


POLLS: Final = 4
"""Polls within the timeout."""


class TimerHandle(Protocol):
    """A scheduled call that can be cancelled."""

    def cancel(self) -> None:
        """Cancel the call."""


def call_later(delay_s: float, call: Callable[[], None]) -> TimerHandle:
    """Schedule a call after ``delay_s`` seconds on the running event loop."""
    return asyncio.get_running_loop().call_later(delay_s, call)


def call_soon(call: Callable[[], None]) -> None:
    """Schedule a call in the next iteration of the running event loop."""
    asyncio.get_running_loop().call_soon(call)


class Watchdog:
    """Polls a progress counter while enabled, and calls ``on_hang`` when it has stopped changing.

    Unchanged polls are counted, not seconds: a daemon that was itself suspended has polled once in that time.

    Args:
        timeout_s: Seconds without a change after which ``on_hang`` is called, at most a quarter late.
        ticks: Returns the progress counter.
        on_hang: Called once; polling stops then.
        call_later: Schedules a call after some seconds.
    """

    def __init__(
        self,
        timeout_s: float,
        *,
        ticks: Callable[[], int],
        on_hang: Callable[[], None],
        call_later: Callable[[float, Callable[[], None]], TimerHandle],
    ) -> None:
        self._pause_s = timeout_s / POLLS
        self._ticks = ticks
        self._on_hang = on_hang
        self._call_later = call_later
        self._timer: TimerHandle | None = None
        self._last_ticks = 0
        self._unchanged = 0

    def keep(self, *, watching: bool) -> None:
        """Start or stop polling; no timer runs while ``watching`` is false."""
        if watching and self._timer is None:
            self._last_ticks, self._unchanged = self._ticks(), 0
            self._timer = self._call_later(self._pause_s, self._poll)
        elif not watching and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _poll(self) -> None:
        ticks = self._ticks()
        self._unchanged = self._unchanged + 1 if ticks == self._last_ticks else 0
        self._last_ticks = ticks
        if self._unchanged < POLLS:
            self._timer = self._call_later(self._pause_s, self._poll)
        else:
            self._timer = None
            self._on_hang()


class EngineDemand:
    """An engine is wanted while turns wait or a caller has requested one, unless it is paused or ended.

    Args:
        has_turns: Whether turns wait for an engine.
        admit: Waits until the engine may be started or is no longer wanted, and returns whether it may; ``None``
            starts it at once.
    """

    def __init__(self, *, has_turns: Callable[[], bool], admit: Callable[[], Awaitable[bool]] | None) -> None:
        self._has_turns = has_turns
        self._admit = admit
        self._callers: set[str] = set()
        self._is_urgent = False
        self._paused = False
        self._over = False
        self._changed_event = asyncio.Event()

    def __bool__(self) -> bool:
        return not self._over and not self._paused and (bool(self._callers) or self._has_turns())

    @property
    def callers(self) -> frozenset[str]:
        """The clients that have requested an engine; the empty name stands for no client in particular."""
        return frozenset(self._callers)

    @property
    def is_urgent(self) -> bool:
        """Whether an operator has requested the engine."""
        return self._is_urgent

    def request(self, caller: str = "", *, urgent: bool = False) -> None:
        """Request an engine independently of turns."""
        self._callers.add(caller)
        self._is_urgent |= urgent
        self._changed_event.set()

    def notify(self) -> None:
        """Check again whether turns wait."""
        self._changed_event.set()

    def pause(self, *, paused: bool) -> None:
        """Suppress the demand while ``paused``, whatever waits."""
        self._paused = paused
        self._changed_event.set()

    def fulfill(self) -> None:
        """Clear the requests: the engine is ready."""
        self._callers.clear()
        self._is_urgent = False

    def end(self) -> None:
        """End the demand for good."""
        self._over = True
        self._changed_event.set()

    async def wait_admitted(self) -> None:
        """Wait until an engine is wanted and may be started, or the demand has ended.

        Raises:
            InferenceCenterError: The engine can never be started.
        """
        while not self._over:
            if not self:
                self._changed_event.clear()
                await self._changed_event.wait()
            elif self._admit is None or await self._admit():
                return


class IdleTimer:
    """Calls ``on_idle`` after a period without work; one timer runs while the engine is idle, none otherwise.

    Args:
        after_s: Idle seconds after which ``on_idle`` is called; ``None`` for never.
        on_idle: Called once in each idle period that lasts so long.
        call_later: Schedules a call after some seconds.
    """

    def __init__(
        self,
        after_s: float | None,
        *,
        on_idle: Callable[[], None],
        call_later: Callable[[float, Callable[[], None]], TimerHandle],
    ) -> None:
        self._after_s = after_s
        self._on_idle = on_idle
        self._call_later = call_later
        self._timer: TimerHandle | None = None

    def keep(self, *, idle: bool) -> None:
        """Start or cancel the timer; one that runs is not restarted."""
        if idle and self._timer is None and self._after_s is not None:
            self._timer = self._call_later(self._after_s, self._expire)
        elif not idle and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._timer = None
        self._on_idle()


HEALTHY_AFTER_S: Final = 60.0
"""An engine that was ready this long resets the count of failures."""
_MAX_DOUBLINGS: Final = 30
_ASSUMED_LAYERS: Final = 64
"""Assumed for "all" before the model is known; more than most models have."""


class RestartBackoff:
    """Exponential back-off with jitter over consecutive failures.

    Args:
        min_s: Seconds to wait after a first failure.
        max_s: Most seconds to wait.
        random: Returns numbers from 0 to 1.
    """

    def __init__(self, *, min_s: float, max_s: float, random: Callable[[], float]) -> None:
        self._min_s = min_s
        self._max_s = max_s
        self._random = random
        self._failures = 0

    def after_failure(self, *, ready_s: float) -> float:
        """Return how many seconds to wait.

        Args:
            ready_s: How long the engine had been ready, 0 if it never was.
        """
        self._failures = 0 if ready_s >= HEALTHY_AFTER_S else self._failures
        wait_s = min(self._max_s, math.ldexp(self._min_s, min(self._failures, _MAX_DOUBLINGS)))
        self._failures += 1
        return wait_s * (0.5 + self._random() / 2)


_LACKS_MEMORY: Final = re.compile(r"alloc|out.?of.?(device)?.?memory", re.IGNORECASE)


class RestartBudget:
    """Limits the restarts within a sliding window."""

    def __init__(self, *, max_restarts: int, window_s: float) -> None:
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._restarts: deque[float] = deque()

    def take(self, *, now: float) -> bool:
        """Count a restart at ``now`` in monotonic seconds; return ``False`` if it exceeds the limit."""
        while self._restarts and now - self._restarts[0] > self._window_s:
            self._restarts.popleft()
        if len(self._restarts) >= self._max_restarts:
            return False
        self._restarts.append(now)
        return True

    def give_back(self) -> None:
        """Forget the last restart: no failure of an engine caused it."""
        if self._restarts:
            self._restarts.pop()

    def clear(self) -> None:
        """Forget all restarts: their cause is gone."""
        self._restarts.clear()


def fewer_layers(current: int, known_layers: int | None) -> int:
    """Return how many layers to offload after an engine died loading ``current`` of them: half, down to none.

    Args:
        current: The layers that were tried; -1 is all.
        known_layers: The model's layers, if it was ever loaded.
    """
    if current < 0:
        current = _ASSUMED_LAYERS if known_layers is None else known_layers
    elif known_layers is not None:
        current = min(current, known_layers)
    return current // 2


def lacks_memory(reason: str) -> bool:
    """Return whether llama.cpp's reason for refusing a model is lack of memory."""
    return bool(_LACKS_MEMORY.search(reason))

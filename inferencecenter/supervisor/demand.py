"""Whether an engine should run, when it may be started, and when an idle one is suspended."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from inferencecenter.supervisor.watchdog import TimerHandle


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
        self._news = asyncio.Event()

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
        self._news.set()

    def notify(self) -> None:
        """Check again whether turns wait."""
        self._news.set()

    def pause(self, *, paused: bool) -> None:
        """Suppress the demand while ``paused``, whatever waits."""
        self._paused = paused
        self._news.set()

    def fulfil(self) -> None:
        """Clear the requests: the engine is ready."""
        self._callers.clear()
        self._is_urgent = False

    def end(self) -> None:
        """End the demand for good."""
        self._over = True
        self._news.set()

    async def wait_admitted(self) -> None:
        """Wait until an engine is wanted and may be started, or the demand has ended.

        Raises:
            InferenceCenterError: The engine can never be started.
        """
        while not self._over:
            if not self:
                self._news.clear()
                await self._news.wait()
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

"""A clock that a test advances, and cleanup of engines that a test leaves running."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest

from tests.loop_clock import LoopClock
from tests.supervisor.harness import ObservedSupervisor

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> LoopClock:
    """The fake clock of the test's timers."""
    return LoopClock(monkeypatch)


@pytest.fixture
async def clock_with_timeouts(monkeypatch: pytest.MonkeyPatch) -> LoopClock:
    """The same, for ``asyncio.timeout`` too."""
    return LoopClock(monkeypatch, timeouts=True)


@pytest.fixture
async def stopped() -> AsyncIterator[None]:
    """Stop every supervisor, also where the test failed."""
    yield
    while ObservedSupervisor.left:
        supervisor = ObservedSupervisor.left.pop().supervisor
        with contextlib.suppress(Exception):  # the test has reported the error
            async with asyncio.timeout(10):
                await supervisor.stop(suspend_deadline_s=1.0, deadline_s=1.0)

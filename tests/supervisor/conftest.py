"""Time that passes when a test says so, and an end for every engine that a test leaves running."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest

from tests.loop_clock import LoopClock
from tests.supervisor.harness import Watched

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> LoopClock:
    """The time of what is arranged in this test."""
    return LoopClock(monkeypatch)


@pytest.fixture
async def clock_with_timeouts(monkeypatch: pytest.MonkeyPatch) -> LoopClock:
    """The same, for ``asyncio.timeout`` too."""
    return LoopClock(monkeypatch, timeouts=True)


@pytest.fixture
async def stopped() -> AsyncIterator[None]:
    """Stop every engine, also where the test has failed before it could."""
    yield
    while Watched.left:
        supervisor = Watched.left.pop().supervisor
        with contextlib.suppress(Exception):  # what is wrong with it the test has said
            async with asyncio.timeout(10):
                await supervisor.stop(suspend_deadline_s=1.0, deadline_s=1.0)

"""A clock that a test advances, and cleanup of engines that a test leaves running."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest

from inferencecenter.ipc import engine_child
from tests.loop_clock import LoopClock
from tests.supervisor import stub_engine
from tests.supervisor.harness import ObservedSupervisor

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


STUB = pytest.mark.usefixtures("stub")
"""For tests in which an engine need not keep anything: the stub starts in a fraction of a real one's time."""


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the stub as engine."""
    monkeypatch.setattr(engine_child, "MODULE", stub_engine.MODULE)


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

"""The worker that clients share."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest

from inferencecenter.core.fair_worker import FairWorker
from inferencecenter.core.tasks import TaskGroup

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PATIENCE_S = 60


class WorkerHarness:
    """A worker that blocks until a test releases it, and the order of its work."""

    def __init__(self) -> None:
        self.worker = FairWorker("test")
        self.tasks = TaskGroup("test")
        self.done: list[str] = []
        self.go = threading.Event()

    def put(self, client_id: str, name: str) -> asyncio.Task[None]:
        """Submit work of a client."""
        return self.tasks.spawn(self._run(client_id, name), name=name)

    async def _run(self, client_id: str, name: str) -> None:
        await self.worker.run(client_id, lambda: self._do(name))

    def _do(self, name: str) -> None:
        assert self.go.wait(PATIENCE_S)
        self.done.append(name)


@pytest.fixture
async def harness() -> AsyncIterator[WorkerHarness]:
    """A blocked worker."""
    harness = WorkerHarness()
    yield harness
    harness.go.set()
    await harness.tasks.cancel()
    harness.worker.close()


async def test_clients_take_turns(harness: WorkerHarness) -> None:
    """Another client's work runs after one item of the busy client."""
    tasks = [harness.put("a", name) for name in ("a1", "a2", "a3", "a4")] + [
        harness.put("b", "b1"),
        harness.put("c", "c1"),
    ]
    await asyncio.sleep(0)
    harness.go.set()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*tasks)
    assert harness.done == ["a1", "a2", "b1", "c1", "a3", "a4"]


async def test_cancelled_work_is_not_started(harness: WorkerHarness) -> None:
    """The next item runs."""
    first, second, third = (harness.put("a", name) for name in ("a1", "a2", "a3"))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.sleep(0)
    harness.go.set()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(first, third)
    assert harness.done == ["a1", "a3"]


async def test_grant_to_a_cancelled_caller_passes_on(harness: WorkerHarness) -> None:
    """Both may happen in the same iteration."""
    harness.go.set()
    first, second, third = (harness.put("a", name) for name in ("a1", "a2", "a3"))
    first.add_done_callback(lambda _: second.cancel())
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(first, third)
    assert {"a1", "a3"} <= set(harness.done)


async def test_failure_is_raised_to_the_caller(harness: WorkerHarness) -> None:
    """The worker continues."""
    harness.go.set()
    with pytest.raises(ZeroDivisionError):
        await harness.worker.run("a", lambda: 1 / 0)
    assert await harness.worker.run("a", lambda: threading.current_thread().name.startswith("test")) is True

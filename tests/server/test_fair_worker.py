"""Tests of the worker that clients share."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest

from inferencecenter.core.tasks import TaskGroup
from inferencecenter.server.fair_worker import FairWorker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PATIENCE_S = 60


class Bench:
    """A worker that is held until a test lets it go, and the order of what it did."""

    def __init__(self) -> None:
        self.worker = FairWorker("test")
        self.tasks = TaskGroup("test")
        self.done: list[str] = []
        self.go = threading.Event()

    def put(self, client_id: str, name: str) -> asyncio.Task[None]:
        """Have something done for a client."""
        return self.tasks.spawn(self._run(client_id, name), name=name)

    async def _run(self, client_id: str, name: str) -> None:
        await self.worker.run(client_id, lambda: self._do(name))

    def _do(self, name: str) -> None:
        assert self.go.wait(PATIENCE_S)
        self.done.append(name)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    """Return a worker that is held."""
    bench = Bench()
    yield bench
    bench.go.set()
    await bench.tasks.cancel()
    bench.worker.close()


async def test_clients_take_turns(bench: Bench) -> None:
    """Another client's work is done after one thing of the client that has much waiting."""
    tasks = [bench.put("a", name) for name in ("a1", "a2", "a3", "a4")] + [bench.put("b", "b1"), bench.put("c", "c1")]
    await asyncio.sleep(0)
    bench.go.set()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*tasks)
    assert bench.done == ["a1", "a2", "b1", "c1", "a3", "a4"]


async def test_work_of_a_caller_that_has_gone_is_not_begun(bench: Bench) -> None:
    """Cancelling withdraws what waits, and the next is done."""
    first, second, third = (bench.put("a", name) for name in ("a1", "a2", "a3"))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.sleep(0)
    bench.go.set()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(first, third)
    assert bench.done == ["a1", "a3"]


async def test_a_turn_that_is_given_to_a_cancelled_caller_goes_to_the_next(bench: Bench) -> None:
    """Both may happen in the same moment."""
    bench.go.set()
    first, second, third = (bench.put("a", name) for name in ("a1", "a2", "a3"))
    first.add_done_callback(lambda _: second.cancel())
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(first, third)
    assert {"a1", "a3"} <= set(bench.done)


async def test_a_failure_is_the_callers(bench: Bench) -> None:
    """What the work raises is raised, and the worker goes on."""
    bench.go.set()
    with pytest.raises(ZeroDivisionError):
        await bench.worker.run("a", lambda: 1 / 0)
    assert await bench.worker.run("a", lambda: threading.current_thread().name.startswith("test")) is True

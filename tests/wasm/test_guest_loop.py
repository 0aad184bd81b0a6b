"""The client's event loop: it runs in the thread that waits, and in the background otherwise."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest

from inferencecenter.wasm.guest_loop import GuestLoop

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def loop() -> Iterator[GuestLoop]:
    """A loop that is closed."""
    running = GuestLoop()
    yield running
    running.close()


async def here() -> threading.Thread:
    """Return the thread that runs the loop, after a step of it."""
    await asyncio.sleep(0)
    return threading.current_thread()


def test_thread_that_waits_runs_the_loop(loop: GuestLoop) -> None:
    """Whichever it is."""
    assert loop.call(here()) is threading.current_thread()
    found: list[threading.Thread] = []
    thread = threading.Thread(target=lambda: found.append(loop.call(here())))
    thread.start()
    thread.join()
    assert found == [thread]


def test_loop_runs_in_the_background(loop: GuestLoop) -> None:
    """While no thread waits; one that waits then gets it back, several times."""
    for _ in range(4):
        has_run = threading.Event()

        async def run(has_run: threading.Event = has_run) -> threading.Thread:
            has_run.set()
            return await here()

        task = loop.start(run())
        assert has_run.wait(timeout=60)
        loop.wait(task.done)
        assert loop.call(here()) is threading.current_thread()


def test_wait_that_is_over_leaves_the_loop_to_the_background(loop: GuestLoop) -> None:
    """A guest that takes queued pieces slowly does not keep the client from answering."""
    has_run = threading.Event()
    loop.call_soon(has_run.set)
    while not has_run.wait(timeout=0.01):
        loop.wait(lambda: True)


def test_failure_and_cancellation_reach_the_thread_that_waits(loop: GuestLoop) -> None:
    """An interrupted call cancels its coroutine."""

    async def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        loop.call(fail())
    cancelled = threading.Event()

    async def interrupted() -> None:
        asyncio.get_running_loop().call_soon(interrupt)
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop.call(interrupted())
    assert cancelled.wait(timeout=60)


def test_cancelled_task_ends_before_one_that_starts_later(loop: GuestLoop) -> None:
    """The next turn of a context must find the previous one aborted."""
    order: list[str] = []

    async def first() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            order.append("first")

    async def second() -> None:
        order.append("second")

    task = loop.start(first())
    loop.call(here())
    loop.cancel(task)
    loop.call(second())
    assert order == ["first", "second"]


def test_close_cancels_what_runs() -> None:
    """Also while the background thread runs it."""
    loop, started = GuestLoop(), threading.Event()

    async def endless() -> None:
        started.set()
        await asyncio.sleep(3600)

    task = loop.start(endless())
    assert started.wait(timeout=60)
    loop.close()
    assert task.cancelled()

"""Tests of owned tasks."""

from __future__ import annotations

import asyncio

from structlog.testing import capture_logs

from inferencecenter.tasks import TaskGroup


async def test_a_task_belongs_to_its_owner_until_it_ends() -> None:
    """The owner knows how many of its tasks run; the task's name tells both."""
    group, gate = TaskGroup("owner"), asyncio.Event()

    async def wait() -> None:
        await gate.wait()

    task = group.spawn(wait(), name="waiter")
    assert len(group) == 1
    assert task.get_name() == "owner:waiter"
    gate.set()
    await task
    await asyncio.sleep(0)
    assert len(group) == 0


async def test_cancel_waits_until_every_task_has_ended() -> None:
    """A task's clean-up is over when ``cancel`` returns."""
    group, started, cleaned = TaskGroup("owner"), asyncio.Event(), []

    async def wait() -> None:
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append(True)

    group.spawn(wait(), name="waiter")
    await started.wait()
    await group.cancel()
    assert cleaned == [True]
    assert len(group) == 0


async def test_a_task_may_cancel_its_own_group() -> None:
    """The task that calls ``cancel`` goes on; the others end."""
    group, finished = TaskGroup("owner"), []

    async def forever() -> None:
        await asyncio.Event().wait()

    async def end_all() -> None:
        await group.cancel()
        finished.append(True)

    other = group.spawn(forever(), name="other")
    await group.spawn(end_all(), name="ender")
    assert finished == [True]
    assert other.cancelled()


async def test_a_failure_is_logged_with_the_tasks_name() -> None:
    """Nobody has to await a task for its failure to be seen."""
    group = TaskGroup("owner")

    async def fail() -> None:
        raise ValueError("broken")

    with capture_logs() as logs:
        task = group.spawn(fail(), name="failing")
        await asyncio.wait([task])
        await asyncio.sleep(0)
    assert [(line["event"], line["task"]) for line in logs] == [("task_failed", "owner:failing")]
    assert isinstance(logs[0]["exc_info"], ValueError)


async def test_cancellation_is_no_failure() -> None:
    """Ending a group logs nothing."""
    group = TaskGroup("owner")

    async def forever() -> None:
        await asyncio.Event().wait()

    with capture_logs() as logs:
        group.spawn(forever(), name="waiter")
        await asyncio.sleep(0)
        await group.cancel()
    assert logs == []

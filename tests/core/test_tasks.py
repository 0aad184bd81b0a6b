"""Task groups with an owner."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from inferencecenter.core.tasks import RESTART_MAX_S, RESTART_MIN_S, TaskGroup

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


async def test_task_is_owned_until_it_ends() -> None:
    """The owner knows the number of its tasks; a task's name contains both."""
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


async def test_join_waits_for_every_task() -> None:
    """They end by themselves, and a failure among them is no error of the caller."""
    group, ended = TaskGroup("owner"), []

    async def end_later() -> None:
        await asyncio.sleep(0)
        ended.append(True)

    async def fail() -> None:
        raise ValueError

    group.spawn(end_later(), name="slow")
    group.spawn(fail(), name="bad")
    with capture_logs():
        await group.join()
    assert ended == [True]


async def test_cancel_waits_for_every_task() -> None:
    """Clean-up has finished when ``cancel`` returns."""
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


async def test_task_may_cancel_its_own_group() -> None:
    """The calling task continues; the others end."""
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


async def test_failure_is_logged_with_the_task_name() -> None:
    """It is logged without awaiting the task."""
    group = TaskGroup("owner")

    async def fail() -> None:
        raise ValueError("broken")

    with capture_logs() as logs:
        task = group.spawn(fail(), name="failing")
        await asyncio.wait([task])
        await asyncio.sleep(0)
    assert [(line["event"], line["task"]) for line in logs] == [("task_failed", "owner:failing")]
    assert isinstance(logs[0]["exc_info"], ValueError)


async def test_cancellation_is_not_logged() -> None:
    """Ending a group is no failure."""
    group = TaskGroup("owner")

    async def forever() -> None:
        await asyncio.Event().wait()

    with capture_logs() as logs:
        group.spawn(forever(), name="waiter")
        await asyncio.sleep(0)
        await group.cancel()
    assert logs == []


async def test_supervised_task_restarts_after_failures() -> None:
    """Failures are logged and counted, delays grow up to a limit, and a task that returns is not restarted."""
    group, starts, pauses_s = TaskGroup("keeper"), [], []
    before = TaskGroup.failures["keeper"]

    async def work() -> None:
        starts.append(True)
        if len(starts) <= 8:
            raise ValueError("broken")

    async def pause(seconds: float) -> None:
        pauses_s.append(seconds)

    with capture_logs() as logs:
        await group.keep_running(work, name="watch", pause=pause)
    assert len(starts) == 9
    assert pauses_s == [min(RESTART_MAX_S, RESTART_MIN_S * 2**failures) for failures in range(8)]
    assert TaskGroup.failures["keeper"] - before == 8
    assert {(line["event"], line["task"]) for line in logs} == {("task_restarts", "keeper:watch")}


async def test_supervised_task_ends_with_its_owner() -> None:
    """It is cancelled while it works and while it waits for its restart."""
    for failing in (False, True):
        group, reached = TaskGroup("keeper"), asyncio.Event()

        async def stay(reached: asyncio.Event = reached) -> None:
            reached.set()
            await asyncio.Event().wait()

        async def work(*, failing: bool = failing, stay: Callable[[], Awaitable[None]] = stay) -> None:
            if failing:
                raise ValueError("broken")
            await stay()

        async def pause(_: float, stay: Callable[[], Awaitable[None]] = stay) -> None:
            await stay()

        task = group.keep_running(work, name="watch", pause=pause)
        await asyncio.wait_for(reached.wait(), 60)
        await group.cancel()
        assert task.cancelled()


async def test_long_run_resets_the_restart_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Occasional failures do not accumulate."""
    group, now = TaskGroup("keeper"), [0.0]
    pauses_s: list[float] = []
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now[0])

    async def work() -> None:
        now[0] += RESTART_MAX_S
        if len(pauses_s) < 3:
            raise ValueError("broken")

    async def pause(seconds: float) -> None:
        pauses_s.append(seconds)

    await group.keep_running(work, name="watch", pause=pause)
    assert pauses_s == [RESTART_MIN_S] * 3

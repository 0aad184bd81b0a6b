"""Deadlines: called once, however distant, and never when cancelled."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from inferencecenter.server.hub import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable

DAY_S = 86_400.0


@pytest.mark.parametrize("delay_s", [0.0, -5.0])
async def test_past_deadline_is_called_soon(delay_s: float) -> None:
    """It is not called synchronously."""
    passed = asyncio.Event()
    Deadline(delay_s, passed.set)
    assert not passed.is_set()
    async with asyncio.timeout(60):
        await passed.wait()


async def test_cancelled_deadline_is_not_called() -> None:
    """It may be cancelled several times."""
    called: list[None] = []
    deadline = Deadline(0.0, lambda: called.append(None))
    deadline.cancel()
    deadline.cancel()
    last = asyncio.Event()
    Deadline(0.0, last.set)
    async with asyncio.timeout(60):
        await last.wait()
    assert called == []


async def test_distant_deadline_uses_several_timers(monkeypatch: pytest.MonkeyPatch) -> None:
    """No timer is longer than a week, and the callback runs after the last one."""
    timers: list[tuple[float, Callable[[], object]]] = []
    cancelled: list[int] = []

    class Handle:
        def __init__(self, number: int) -> None:
            self._number = number

        def cancel(self) -> None:
            cancelled.append(self._number)

    class Loop:
        def call_later(self, delay_s: float, function: Callable[..., object], *args: object) -> Handle:
            timers.append((delay_s, lambda: function(*args)))
            return Handle(len(timers) - 1)

    monkeypatch.setattr(asyncio, "get_running_loop", Loop)
    passed: list[None] = []
    deadline = Deadline(17 * DAY_S, lambda: passed.append(None))
    for number in range(3):
        assert passed == []
        timers[number][1]()
    deadline.cancel()
    monkeypatch.undo()
    assert [delay_s for delay_s, _ in timers] == [7 * DAY_S, 7 * DAY_S, 3 * DAY_S]
    assert passed == [None]
    assert cancelled == [2]

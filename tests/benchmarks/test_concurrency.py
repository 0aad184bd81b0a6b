"""Concurrent coroutines."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.concurrency import together
from inferencecenter.core.errors import ErrorCode, InferenceCenterError


async def _answer(value: int) -> int:
    return value


async def _refuse() -> int:
    raise InferenceCenterError(ErrorCode.SESSION_LIMIT)


async def _forget() -> int:
    raise KeyError("seed")


async def test_results_keep_the_order_of_the_coroutines() -> None:
    """The order in which they end does not matter."""
    assert await together(_answer(value) for value in range(5)) == [0, 1, 2, 3, 4]


async def test_failure_cancels_the_others() -> None:
    """The error is the failure itself, not a group."""
    cancelled = False

    async def wait() -> int:
        nonlocal cancelled
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled = True
            raise
        return 0

    with pytest.raises(InferenceCenterError) as failed:
        await together([wait(), _refuse()])

    assert failed.value.code is ErrorCode.SESSION_LIMIT
    assert cancelled


async def test_internal_error_stays_a_group() -> None:
    """It belongs to no request."""
    with pytest.raises(BaseExceptionGroup) as failed:
        await together([_forget()])

    assert failed.value.subgroup(KeyError) is not None

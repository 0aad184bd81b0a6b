"""Coroutines that run at the same time and fail together."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from inferencecenter.core.errors import InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Iterator

T = TypeVar("T")


@contextmanager
def one_failure() -> Iterator[None]:
    """Raise, of the failures of a task group inside, the first that is an ``InferenceCenterError``, as it is.

    Raises:
        BaseExceptionGroup: None of them is one.
    """
    try:
        yield
    except BaseExceptionGroup as errors:
        known = errors.subgroup(InferenceCenterError)
        raise (_first(known) if known is not None else errors) from None


async def together(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines at the same time and return their results; when one fails the others end and its error is raised.

    Raises:
        BaseExceptionGroup: No failure was an ``InferenceCenterError``, which would be raised itself.
    """
    with one_failure():
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    return [task.result() for task in tasks]


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error

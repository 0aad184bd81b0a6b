"""Asking again while the daemon loads the model that is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

from inferencecenter.client.lifeline import Timing
from inferencecenter.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")

LOAD_TIMEOUT_S: Final = 600.0
"""How long a model may take: some are read from slow disks."""
_RETRY_S: Final = 1.0


async def while_loading(
    attempt: Callable[[], Awaitable[T]],
    *,
    timeout_s: float = LOAD_TIMEOUT_S,
    on_loading: Callable[[str], None] | None = None,
    timing: Timing | None = None,
) -> T:
    """Return what ``attempt`` returns, made again for as long as the daemon says that the model is loading.

    Args:
        attempt: Asks the daemon for something.
        timeout_s: Seconds after which it is not made again.
        on_loading: Called each time with what the daemon says.
        timing: Time, for tests.

    Raises:
        InferenceCenterError: ``model_loading`` when that took too long, and all else that ``attempt`` raises.
    """
    timing = timing or Timing()
    give_up_at = timing.monotonic() + timeout_s
    while True:
        try:
            return await attempt()
        except InferenceCenterError as error:
            wait_s = _RETRY_S if error.retry_after_ms is None else error.retry_after_ms / 1000
            if error.code is not ErrorCode.MODEL_LOADING or timing.monotonic() + wait_s > give_up_at:
                raise
            if on_loading is not None:
                on_loading(error.message)
        await timing.sleep(wait_s)

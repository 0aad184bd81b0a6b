"""Retries after temporary errors of the daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

from inferencecenter.client.errors import TryLaterError
from inferencecenter.client.transport import Timing
from inferencecenter.core.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")

LOAD_TIMEOUT_S: Final = 600.0
"""Default timeout for loading a model; some are read from slow disks."""
_LOOK_AGAIN_S: Final = 1.0
_FIRST_WAIT_S: Final = 0.5
_MAX_WAIT_S: Final = 10.0


class RetryPolicy:
    """Decides whether one operation is retried, and waits before each retry.

    Args:
        retries: Number of retries after temporary errors.
        load_timeout_s: Seconds to wait for the model to load; these waits do not count as retries.
        on_loading: Called with the daemon's refusal, about once a second, while the model loads.
        timing: Clock and randomness.
    """

    def __init__(
        self,
        *,
        retries: int = 0,
        load_timeout_s: float = LOAD_TIMEOUT_S,
        on_loading: Callable[[str], None] | None = None,
        timing: Timing | None = None,
    ) -> None:
        self._retries = retries
        self._load_timeout_s = load_timeout_s
        self._on_loading = on_loading
        self._timing = timing or Timing()
        self._loaded_until: float | None = None
        self._n_waits = 0

    async def wait(self, error: InferenceCenterError) -> None:
        """Wait until the operation may be retried.

        Raises:
            InferenceCenterError: The error itself, if it is not to be retried.
        """
        if error.code is ErrorCode.MODEL_LOADING:
            wait_s = self._until_loaded(error)
            if self._on_loading is not None:
                self._on_loading(error.message)
        else:
            wait_s = self._until_retry(error)
        await self._timing.sleep(wait_s)

    async def run(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return the result of ``attempt``, called until it succeeds or the policy is exhausted.

        Raises:
            InferenceCenterError: The last error of ``attempt``.
        """
        while True:
            try:
                return await attempt()
            except InferenceCenterError as error:
                await self.wait(error)

    def _until_loaded(self, error: InferenceCenterError) -> float:
        now = self._timing.monotonic()
        if self._loaded_until is None:
            self._loaded_until = now + self._load_timeout_s
        wait_s = _LOOK_AGAIN_S if error.retry_after_ms is None else error.retry_after_ms / 1000
        if now + wait_s > self._loaded_until:
            raise error
        return wait_s

    def _until_retry(self, error: InferenceCenterError) -> float:
        """Return the daemon's delay with jitter, so that refused clients do not retry simultaneously."""
        if not isinstance(error, TryLaterError) or self._n_waits >= self._retries:
            raise error
        bound_s: float = min(_MAX_WAIT_S, _FIRST_WAIT_S * 2.0**self._n_waits)
        self._n_waits += 1
        asked_s = (error.retry_after_ms or 0) / 1000
        return asked_s + self._timing.random() * bound_s

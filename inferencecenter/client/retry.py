"""How long a caller waits for a daemon that cannot do it yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

from inferencecenter.client.errors import TryLaterError
from inferencecenter.client.transport import Timing
from inferencecenter.core.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")

LOAD_TIMEOUT_S: Final = 600.0
"""How long a model may take: some are read from slow disks."""
_LOOK_AGAIN_S: Final = 1.0
_FIRST_WAIT_S: Final = 0.5
_MAX_WAIT_S: Final = 10.0


class RetryPolicy:
    """Decides for one thing that is asked whether it is asked again, and waits until then.

    Args:
        retries: How often it is asked again when the daemon says that it may succeed later.
        load_timeout_s: Seconds that its model may take to be loaded, which are no retries.
        on_loading: Called with what the daemon says, about once a second while it loads the model.
        timing: Time and chance.
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
        """Wait until it is worth asking again.

        Raises:
            InferenceCenterError: The error itself, where it is not.
        """
        if error.code is ErrorCode.MODEL_LOADING:
            wait_s = self._until_loaded(error)
            if self._on_loading is not None:
                self._on_loading(error.message)
        else:
            wait_s = self._until_retry(error)
        await self._timing.sleep(wait_s)

    async def run(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return what ``attempt`` returns, made as often as it takes.

        Raises:
            InferenceCenterError: What it raised last.
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
        """Return what the daemon asked for and some more, so that those who were refused do not come back together."""
        if not isinstance(error, TryLaterError) or self._n_waits >= self._retries:
            raise error
        bound_s: float = min(_MAX_WAIT_S, _FIRST_WAIT_S * 2.0**self._n_waits)
        self._n_waits += 1
        asked_s = (error.retry_after_ms or 0) / 1000
        return asked_s + self._timing.random() * bound_s

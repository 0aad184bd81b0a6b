"""How often a client may ask for anything but turns: a bucket of units for each client, which its sockets share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.server.limits import Bucket

if TYPE_CHECKING:
    from collections.abc import Callable

UNIT_CHARS: Final = 64 * 1024
"""An operation that reads or copies a session costs one unit more for each so many characters of it."""
_SWEEP_FROM: Final = 1000


class OperationRates:
    """Counts operations of clients against one limit, and refuses those that are too many.

    Args:
        per_minute: Units that a client regains in a minute, and may use at once.
        monotonic: Seconds that only rise.
    """

    def __init__(self, per_minute: int, *, monotonic: Callable[[], float]) -> None:
        self._per_minute = per_minute
        self._monotonic = monotonic
        self._buckets: dict[str, Bucket] = {}
        self._sweep_at = _SWEEP_FROM

    def __len__(self) -> int:
        return len(self._buckets)

    def charge(self, client_id: str, *, n_chars: int = 0) -> None:
        """Count an operation of a client that reads or copies so many characters.

        Raises:
            InferenceCenterError: ``rate_limited`` when nothing is left; then it is not counted.
        """
        now_ms = round(self._monotonic() * 1000)
        bucket = self._buckets.get(client_id) or self._make(client_id, now_ms)
        retry_after_ms = bucket.retry_after_ms(self._per_minute, now_ms=now_ms)
        if retry_after_ms is not None:
            raise InferenceCenterError(
                ErrorCode.RATE_LIMITED,
                f"this client asks for more than {self._per_minute} operations a minute",
                hint="Ask again after retry_after_ms; operations on long sessions count for more than one.",
                retry_after_ms=retry_after_ms,
            )
        bucket.take(1 + n_chars // UNIT_CHARS, self._per_minute, now_ms=now_ms)

    def _make(self, client_id: str, now_ms: int) -> Bucket:
        if len(self._buckets) >= self._sweep_at:
            for each in [each for each, held in self._buckets.items() if held.is_full(self._per_minute, now_ms=now_ms)]:
                del self._buckets[each]
            self._sweep_at = max(_SWEEP_FROM, 2 * len(self._buckets))
        self._buckets[client_id] = Bucket()
        return self._buckets[client_id]

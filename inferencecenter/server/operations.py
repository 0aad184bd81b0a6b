"""How often a client may ask for anything but turns: a bucket of units for each client, which its sockets share."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.server.limits import Bucket

if TYPE_CHECKING:
    from collections.abc import Callable

UNIT_CHARS: Final = 64 * 1024
"""An operation that reads or copies a session costs one unit more for each so many characters of it."""
FRAME_UNIT_CHARS: Final = 16 * 1024
"""One costs one unit more for each so many characters of its frame, which take up to a quarter of a millisecond."""
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

    def charge(self, client_id: str, *, n_chars: int = 0, n_frame_chars: int = 0) -> None:
        """Count an operation of a client, before anything is done for it.

        Args:
            client_id: Who asks.
            n_chars: Characters of the session that is read or copied.
            n_frame_chars: Characters of the frame that asks.

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
                hint="Ask again after retry_after_ms; long frames and operations on long sessions count for more.",
                retry_after_ms=retry_after_ms,
            )
        n_units = 1 + n_chars // UNIT_CHARS + n_frame_chars // FRAME_UNIT_CHARS
        bucket.take(n_units, self._per_minute, now_ms=now_ms)

    def count(self, client_id: str, *, n_frame_chars: int) -> None:
        """Count a frame that was refused and would else have cost nothing; one without units owes no more for it."""
        with suppress(InferenceCenterError):
            self.charge(client_id, n_frame_chars=n_frame_chars)

    def _make(self, client_id: str, now_ms: int) -> Bucket:
        if len(self._buckets) >= self._sweep_at:
            for each in [each for each, held in self._buckets.items() if held.is_full(self._per_minute, now_ms=now_ms)]:
                del self._buckets[each]
            self._sweep_at = max(_SWEEP_FROM, 2 * len(self._buckets))
        self._buckets[client_id] = Bucket()
        return self._buckets[client_id]

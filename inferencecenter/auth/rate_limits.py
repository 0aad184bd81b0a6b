"""Rate limits: tokens in a bucket, operations, failed logins, refusals, pace.

Retry times are exact: one millisecond earlier the request is still refused.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv6Network
from typing import TYPE_CHECKING, Final

from inferencecenter.core.addresses import peer_address
from inferencecenter.core.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import Callable


MINUTE_MS: Final = 60_000


class TokenBucket:
    """Token bucket per minute: full at the start, refilled continuously; it can be overdrawn."""

    def __init__(self) -> None:
        # The deficit in tokens times milliseconds of a minute: integers, so that nothing is rounded.
        self._missing = 0
        self._updated_ms = 0

    def left(self, limit: int, *, now_ms: int) -> int:
        """Return the whole tokens left; negative if overdrawn."""
        self._regain(limit, now_ms)
        return (limit * MINUTE_MS - self._missing) // MINUTE_MS

    def retry_after_ms(self, limit: int, *, now_ms: int) -> int | None:
        """Return the time until a token is available, ``None`` if one is."""
        self._regain(limit, now_ms)
        short = self._missing - (limit - 1) * MINUTE_MS
        return None if short <= 0 else -(-short // limit)

    def take(self, n_tokens: int, limit: int, *, now_ms: int) -> None:
        """Take tokens, possibly overdrawing the bucket."""
        self._regain(limit, now_ms)
        self._missing += n_tokens * MINUTE_MS

    def is_full(self, limit: int, *, now_ms: int) -> bool:
        self._regain(limit, now_ms)
        return self._missing == 0

    def _regain(self, limit: int, now_ms: int) -> None:
        self._missing = max(0, self._missing - limit * max(0, now_ms - self._updated_ms))
        self._updated_ms = now_ms


UNIT_CHARS: Final = 64 * 1024
"""An operation that reads or copies a session costs one more unit per this many characters of it."""
FRAME_UNIT_CHARS: Final = 16 * 1024
"""An operation costs one more unit per this many characters of its frame, which take up to 0.25 ms."""
_SWEEP_FROM: Final = 1000


class OperationRateLimiter:
    """Limits the operations of each client, all with the same limit.

    Args:
        per_minute: Units that a client regains per minute, which is also the burst.
        monotonic: Monotonic seconds.
    """

    def __init__(self, per_minute: int, *, monotonic: Callable[[], float]) -> None:
        self._per_minute = per_minute
        self._monotonic = monotonic
        self._buckets: dict[str, TokenBucket] = {}
        self._sweep_at = _SWEEP_FROM

    def __len__(self) -> int:
        return len(self._buckets)

    def charge(self, client_id: str, *, n_units: int = 1, n_chars: int = 0, n_frame_chars: int = 0) -> None:
        """Charge a client for an operation, before it is executed.

        Args:
            client_id: The requesting client.
            n_units: What it costs beside characters.
            n_chars: Characters of the session that is read or copied.
            n_frame_chars: Characters of the request's frame.

        Raises:
            InferenceCenterError: ``rate_limited`` if no units are left; then nothing is charged.
        """
        now_ms = round(self._monotonic() * 1000)
        bucket = self._buckets.get(client_id) or self._make(client_id, now_ms)
        retry_after_ms = bucket.retry_after_ms(self._per_minute, now_ms=now_ms)
        if retry_after_ms is not None:
            raise InferenceCenterError(
                ErrorCode.RATE_LIMITED,
                f"this client exceeds {self._per_minute} operations per minute",
                hint="Retry after retry_after_ms; long frames and operations on long sessions cost more.",
                retry_after_ms=retry_after_ms,
            )
        n_units += n_chars // UNIT_CHARS + n_frame_chars // FRAME_UNIT_CHARS
        bucket.take(n_units, self._per_minute, now_ms=now_ms)

    def count(self, client_id: str, *, n_frame_chars: int) -> None:
        """Charge for a refused frame that would otherwise be free; the balance is not overdrawn."""
        with suppress(InferenceCenterError):
            self.charge(client_id, n_frame_chars=n_frame_chars)

    def _make(self, client_id: str, now_ms: int) -> TokenBucket:
        if len(self._buckets) >= self._sweep_at:
            for each in [each for each, held in self._buckets.items() if held.is_full(self._per_minute, now_ms=now_ms)]:
                del self._buckets[each]
            self._sweep_at = max(_SWEEP_FROM, 2 * len(self._buckets))
        self._buckets[client_id] = TokenBucket()
        return self._buckets[client_id]


_MAX_ADDRESSES: Final = 10_000
_IPV6_SITE_BITS: Final = 64


@dataclass(slots=True)
class _Bucket:
    left: float
    filled_at_s: float


class AddressRateLimiter:
    """Limits attempts by address.

    Args:
        at_once: Burst of attempts.
        per_s: Attempts regained per second.
        clock: Monotonic seconds.
    """

    def __init__(self, *, at_once: int, per_s: float, clock: Callable[[], float]) -> None:
        self._capacity = at_once
        self._per_s = per_s
        self._clock = clock
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def retry_after_ms(self, address: str) -> int | None:
        """Return how long ``address`` must wait before its next attempt, ``None`` if it may try now."""
        bucket = self._buckets.get(rate_limit_key(address))
        if bucket is None:
            return None
        self._refill(bucket)
        return None if bucket.left >= 1 else math.ceil((1 - bucket.left) / self._per_s * 1000)

    def count(self, address: str) -> None:
        shared = rate_limit_key(address)
        bucket = self._buckets.setdefault(shared, _Bucket(self._capacity, self._clock()))
        self._refill(bucket)
        bucket.left = max(0.0, bucket.left - 1)
        self._buckets.move_to_end(shared)
        # The least recent address is dropped first; it has regained the most.
        if len(self._buckets) > _MAX_ADDRESSES:
            self._buckets.popitem(last=False)

    def refund(self, address: str) -> None:
        if (bucket := self._buckets.get(rate_limit_key(address))) is not None:
            bucket.left = min(self._capacity, bucket.left + 1)

    def _refill(self, bucket: _Bucket) -> None:
        now_s = self._clock()
        bucket.left = min(self._capacity, bucket.left + (now_s - bucket.filled_at_s) * self._per_s)
        bucket.filled_at_s = now_s


def rate_limit_key(address: str) -> str:
    """Return the key of an address's bucket: an IPv4 address, or the /64 that an IPv6 subscriber is assigned."""
    parsed = peer_address(address)
    if parsed is None:
        return address
    if parsed.version == 4:
        return str(parsed)
    return str(IPv6Network((int(parsed) >> _IPV6_SITE_BITS << _IPV6_SITE_BITS, _IPV6_SITE_BITS)))


_MAX_PACED: Final = 10_000
MAX_PACE_DELAY_S: Final = 5.0
"""Longest delay of a paced piece of work."""


class Pacer:
    """Spreads the work that each key brings: a burst at once, then one piece per interval.

    A rate limit refuses what exceeds a minute's worth, and lets a client spend that worth within a second. On a machine
    whose cores all decode, each piece of work in the front lengthens one step of every stream, so pieces that come in a
    row lengthen it most. While others' turns run, work of one key is therefore delayed, not refused, until it is due
    (the generic cell rate algorithm).

    Args:
        interval_s: Time between two pieces of work.
        burst: Pieces that are not delayed after a pause.
        monotonic: Monotonic seconds.
    """

    def __init__(self, *, interval_s: float, burst: int, monotonic: Callable[[], float]) -> None:
        self._interval_s = interval_s
        self._burst_s = burst * interval_s
        self._monotonic = monotonic
        self._due_s: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._due_s)

    def delay_s(self, key: str) -> float:
        """Count a piece of work, and return the seconds until it is due."""
        now_s = self._monotonic()
        due_s = min(
            max(now_s, self._due_s.get(key, now_s)) + self._interval_s, now_s + self._burst_s + MAX_PACE_DELAY_S
        )
        self._due_s[key] = due_s
        self._due_s.move_to_end(key)
        # The least recent key is dropped first; nearly always its work is past due.
        if len(self._due_s) > _MAX_PACED:
            self._due_s.popitem(last=False)
        return max(0.0, due_s - now_s - self._burst_s)


FREE_REFUSALS: Final = 16
"""Consecutive refusals without a delay."""
MAX_DELAY_S: Final = 1.0
_STEP_S: Final = 0.01
_MAX_REFUSALS: Final = FREE_REFUSALS + round(MAX_DELAY_S / _STEP_S)
_MAX_CLIENTS: Final = 1000


class RefusalBackoff:
    """Delays the requests of a client that keeps sending refused ones.

    A refusal is cheap for the client and not free for the server, and no bucket limits it: a request against an empty
    bucket is refused as well. So the task that reads a socket or answers an HTTP request waits a little after a
    refusal, longer with each consecutive one, up to a second. An accepted request is never delayed and halves the
    count, so that a client which errs now and then is not delayed, while one that mixes a few accepted requests into
    its refusals is. Each socket has its own count, so that one program does not slow down another of the same account;
    HTTP requests count per account.
    """

    def __init__(self) -> None:
        self._n_refused = 0

    def accepted(self) -> None:
        self._n_refused //= 2

    def refused(self) -> float:
        """Record a refusal, and return the seconds to wait before the next request is read."""
        self._n_refused = min(self._n_refused + 1, _MAX_REFUSALS)
        return max(0, self._n_refused - FREE_REFUSALS) * _STEP_S


class RefusalBackoffs:
    """Back-offs of clients; beyond a limit, of those refused most recently."""

    __slots__ = ("_backoffs",)

    def __init__(self) -> None:
        self._backoffs: dict[str, RefusalBackoff] = {}  # the one refused most recently last

    def __len__(self) -> int:
        return len(self._backoffs)

    def accepted(self, client_id: str) -> None:
        if (backoff := self._backoffs.get(client_id)) is not None:
            backoff.accepted()

    def refused(self, client_id: str) -> float:
        """Record a refusal, and return the seconds to wait before the response."""
        backoff = self._backoffs[client_id] = self._backoffs.pop(client_id, RefusalBackoff())
        if len(self._backoffs) > _MAX_CLIENTS:
            del self._backoffs[next(iter(self._backoffs))]
        return backoff.refused()

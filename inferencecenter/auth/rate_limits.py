"""Rate limits: requests in a window, tokens in a bucket, tokens per day, operations, failed logins, refusals.

Retry times are exact: one millisecond earlier the request is still refused.
"""

from __future__ import annotations

import ipaddress
import math
from collections import OrderedDict, deque
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from inferencecenter.core.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import Callable


MINUTE_MS: Final = 60_000
DAY_MS: Final = 86_400_000
TICK_MS: Final = 100
"""Granularity of a window: events within a tick share an entry, so that a window holds at most some hundreds."""
_MAX_OTHER_DAYS: Final = 4


class SlidingWindow:
    """Sliding window over the last minute in whole ticks: at most a tick longer than a minute."""

    def __init__(self) -> None:
        self._ticks: deque[tuple[int, int]] = deque()
        self._total = 0

    def total(self, *, now_ms: int) -> int:
        """Return the number of events within the minute."""
        while self._ticks and _leaves_ms(self._ticks[0][0]) <= now_ms:
            self._total -= self._ticks.popleft()[1]
        return self._total

    def retry_after_ms(self, limit: int, *, now_ms: int) -> int | None:
        """Return the time until fewer than ``limit`` events are within the minute; ``None`` if that is so now."""
        excess = self.total(now_ms=now_ms) - limit
        if excess < 0:
            return None
        for tick, count in self._ticks:
            excess -= count
            if excess < 0:
                return _leaves_ms(tick) - now_ms
        raise AssertionError("a limit is at least 1")

    def count(self, *, now_ms: int) -> None:
        tick = now_ms // TICK_MS
        self.total(now_ms=now_ms)
        if self._ticks and self._ticks[-1][0] == tick:
            self._ticks[-1] = (tick, self._ticks[-1][1] + 1)
        else:
            self._ticks.append((tick, 1))
        self._total += 1


def _leaves_ms(tick: int) -> int:
    return (tick + 1) * TICK_MS + MINUTE_MS


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


@dataclass(slots=True)
class DailyUsage:
    """Tokens used since midnight UTC; ``ends_ms`` is the next one, in Unix milliseconds.

    Each day keeps its own count, so that a clock set back over midnight loses no usage.
    """

    used: int = 0
    ends_ms: int = 0
    _others: dict[int, int] = field(default_factory=dict)

    def at(self, now_ms: float) -> DailyUsage:
        """Return this day, switching to the current one first; called per token, hence one comparison."""
        if not 0 < self.ends_ms - now_ms <= DAY_MS:
            if self.used:
                self._others[self.ends_ms] = self.used
                while len(self._others) > _MAX_OTHER_DAYS:
                    del self._others[next(iter(self._others))]
            self.ends_ms = (int(now_ms) // DAY_MS + 1) * DAY_MS
            self.used = self._others.pop(self.ends_ms, 0)
        return self

    @property
    def end(self) -> str:
        """The end of the day as text."""
        return datetime.fromtimestamp(self.ends_ms / 1000, UTC).strftime("%Y-%m-%d 00:00 UTC")


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

    def charge(self, client_id: str, *, n_chars: int = 0, n_frame_chars: int = 0) -> None:
        """Charge a client for an operation, before it is executed.

        Args:
            client_id: The requesting client.
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
        n_units = 1 + n_chars // UNIT_CHARS + n_frame_chars // FRAME_UNIT_CHARS
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
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if parsed.version == 4:
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((int(parsed) >> _IPV6_SITE_BITS << _IPV6_SITE_BITS, _IPV6_SITE_BITS)))


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

    def __init__(self) -> None:
        self._backoffs: OrderedDict[str, RefusalBackoff] = OrderedDict()

    def __len__(self) -> int:
        return len(self._backoffs)

    def accepted(self, client_id: str) -> None:
        if (backoff := self._backoffs.get(client_id)) is not None:
            backoff.accepted()

    def refused(self, client_id: str) -> float:
        """Record a refusal, and return the seconds to wait before the response."""
        backoff = self._backoffs.setdefault(client_id, RefusalBackoff())
        self._backoffs.move_to_end(client_id)
        if len(self._backoffs) > _MAX_CLIENTS:
            self._backoffs.popitem(last=False)
        return backoff.refused()

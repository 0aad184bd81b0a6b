"""What an address may do so often, as to fail at a login: a token bucket each."""

from __future__ import annotations

import ipaddress
import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_MAX_ADDRESSES: Final = 10_000
_IPV6_SITE_BITS: Final = 64


@dataclass(slots=True)
class _Bucket:
    left: float
    filled_at_s: float


class Attempts:
    """Counts attempts by address.

    Args:
        at_once: Attempts that an address has when it comes first.
        per_s: Those that it regains in a second, up to that number.
        clock: Monotonic seconds.
    """

    def __init__(self, *, at_once: int, per_s: float, clock: Callable[[], float]) -> None:
        self._capacity = at_once
        self._per_s = per_s
        self._clock = clock
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def retry_after_ms(self, address: str) -> int | None:
        """Return how long ``address`` must wait before it may try again, ``None`` when it may try now."""
        bucket = self._buckets.get(site(address))
        if bucket is None:
            return None
        self._refill(bucket)
        return None if bucket.left >= 1 else math.ceil((1 - bucket.left) / self._per_s * 1000)

    def count(self, address: str) -> None:
        """Count an attempt of ``address``."""
        shared = site(address)
        bucket = self._buckets.setdefault(shared, _Bucket(self._capacity, self._clock()))
        self._refill(bucket)
        bucket.left = max(0.0, bucket.left - 1)
        self._buckets.move_to_end(shared)
        # The address that tried longest ago is forgotten first; it has regained the most.
        if len(self._buckets) > _MAX_ADDRESSES:
            self._buckets.popitem(last=False)

    def forgive(self, address: str) -> None:
        """Take back an attempt of ``address`` that is none after all."""
        if (bucket := self._buckets.get(site(address))) is not None:
            bucket.left = min(self._capacity, bucket.left + 1)

    def _refill(self, bucket: _Bucket) -> None:
        now_s = self._clock()
        bucket.left = min(self._capacity, bucket.left + (now_s - bucket.filled_at_s) * self._per_s)
        bucket.filled_at_s = now_s


def site(address: str) -> str:
    """Return what shares a bucket: an IPv4 address, or the /64 that one IPv6 subscriber is given."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if parsed.version == 4:
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((int(parsed) >> _IPV6_SITE_BITS << _IPV6_SITE_BITS, _IPV6_SITE_BITS)))

"""Rate limit of unauthenticated upgrades per address; a socket that authenticates gets its token refunded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from inferencecenter.auth.rate_limits import AddressRateLimiter
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.server.handshake import read_credential, refusal_body, refusal_headers

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.datastructures import Headers

    from inferencecenter.server.handshake import TrustedProxies
    from inferencecenter.telemetry.metrics import DaemonMetrics

BURST_S: Final = 15
"""Size of a burst, in seconds of the rate."""
_RETRY_MS: Final = 1000


def _refusal() -> bytes:
    error = InferenceCenterError(
        ErrorCode.RATE_LIMITED,
        "too many sockets of this address have not authenticated",
        hint="Authenticate right after the upgrade, or with it: Authorization: Bearer <token>.",
        retry_after_ms=_RETRY_MS,
    )
    body = refusal_body(error)
    headers = {**refusal_headers(error), "content-length": str(len(body)), "connection": "close"}
    lines = ("HTTP/1.1 429 Too Many Requests", *(f"{name}: {value}" for name, value in headers.items()), "", "")
    return "\r\n".join(lines).encode() + body


REFUSAL: Final = _refusal()
"""Shared by all refusals, so that they cost nothing to create."""


class UpgradeLimiter:
    """Counts upgrades without a credential by address; those with one are limited by its check.

    Args:
        proxies: Proxies whose information on a caller's address is trusted.
        per_s: Upgrades that an address regains per second; the burst is ``BURST_S`` times as many.
        clock: Monotonic seconds.
        metrics: Where refusals are counted.
    """

    def __init__(
        self, proxies: TrustedProxies, *, per_s: int, clock: Callable[[], float], metrics: DaemonMetrics
    ) -> None:
        self._proxies = proxies
        self._attempts = AddressRateLimiter(at_once=per_s * BURST_S, per_s=per_s, clock=clock)
        self._metrics = metrics

    def refusal(self, peer: str, headers: Headers) -> bytes | None:
        """Return the response to a refused upgrade from ``peer``, ``None`` if it is accepted."""
        if _brings_credential(headers):
            return None
        address = self._proxies.peer_info(peer, headers).address
        if self._attempts.retry_after_ms(address) is not None:
            self._metrics.refused_handshakes.inc()
            return REFUSAL
        self._attempts.count(address)
        return None

    def give_back(self, address: str) -> None:
        """Refund an upgrade whose socket has authenticated."""
        self._attempts.refund(address)


def _brings_credential(headers: Headers) -> bool:
    offered = [each.strip() for line in headers.getlist("sec-websocket-protocol") for each in line.split(",")]
    try:
        return read_credential(headers, offered) is not None
    except InferenceCenterError:  # half a credential counts as none
        return False

"""Upgrades of strangers: how often an address may make one. A socket that authenticates gives its own back."""

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
"""An address may make the upgrades of so many seconds at once."""
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
"""The same for all, so that it costs nothing to make."""


class UpgradeLimiter:
    """Counts upgrades that bring no credential, by address; one that brings any is judged by that.

    Args:
        proxies: Whose word on a caller's address is believed.
        per_s: Upgrades that an address regains in a second; ``BURST_S`` times as many it may make at once.
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
        """Return the answer to an upgrade through the peer ``peer`` that is refused, ``None`` when it may be made."""
        if _brings_credential(headers):
            return None
        address = self._proxies.peer_info(peer, headers).address
        if self._attempts.retry_after_ms(address) is not None:
            self._metrics.refused_handshakes.inc()
            return REFUSAL
        self._attempts.count(address)
        return None

    def give_back(self, address: str) -> None:
        """Count an upgrade no longer: its socket has authenticated."""
        self._attempts.refund(address)


def _brings_credential(headers: Headers) -> bool:
    offered = [each.strip() for line in headers.getlist("sec-websocket-protocol") for each in line.split(",")]
    try:
        return read_credential(headers, offered) is not None
    except InferenceCenterError:  # half of one says no more than none
        return False

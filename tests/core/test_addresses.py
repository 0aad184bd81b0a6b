"""Addresses of peers as text."""

from __future__ import annotations

import ipaddress

import pytest
from starlette.datastructures import Headers

from inferencecenter.auth.rate_limits import AddressRateLimiter, rate_limit_key
from inferencecenter.config.limits import AccessLimits
from inferencecenter.core import addresses
from inferencecenter.core.addresses import parse_address
from inferencecenter.server.handshake import TrustedProxies


@pytest.mark.parametrize(
    ("text", "address"),
    [("::ffff:1.2.3.4", "1.2.3.4"), ("2001:db8::1", "2001:db8::1"), ("1.2.3", None), ("", None), ("1.2.3.4%x", None)],
)
def test_addresses_mapped_into_ipv6_are_ipv4(text: str, address: str | None) -> None:
    """Other text is no address."""
    parsed = parse_address(text)
    assert (None if parsed is None else str(parsed)) == address


def test_address_of_a_peer_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proxies, rate limits and allowed networks share the result."""
    parsed: list[str] = []

    def ip_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
        parsed.append(text)
        return ipaddress.ip_address(text)

    monkeypatch.setattr(addresses, "ip_address", ip_address)
    peer = "198.51.100.77"
    assert TrustedProxies(["10.0.0.0/8"]).peer_info(peer, Headers({"host": "localhost"})).address == peer
    limiter = AddressRateLimiter(at_once=1, per_s=1, clock=lambda: 0.0)
    limiter.count(peer)
    assert limiter.retry_after_ms(peer) == 1000
    assert rate_limit_key(peer) == peer
    assert AccessLimits(addresses=("198.51.100.0/24",)).allows_address(peer)
    assert parsed == [peer]

"""Tests of callers' addresses and Origins."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from inferencecenter.server.origins import Proxies, origin_allowed

PROXIES = Proxies(["10.0.0.0/8", "127.0.0.1"])


@pytest.mark.parametrize(
    ("peer", "forwarded", "address"),
    [
        ("192.0.2.9", None, "192.0.2.9"),
        ("192.0.2.9", "203.0.113.1", "192.0.2.9"),
        ("10.1.2.3", None, "10.1.2.3"),
        ("10.1.2.3", "203.0.113.1", "203.0.113.1"),
        ("10.1.2.3", "198.51.100.7, 203.0.113.1", "203.0.113.1"),
        ("10.1.2.3", "198.51.100.7, 203.0.113.1, 10.9.9.9", "203.0.113.1"),
        ("10.1.2.3", "10.4.4.4", "10.4.4.4"),
        ("::ffff:10.1.2.3", "203.0.113.1", "203.0.113.1"),
        ("", "203.0.113.1", ""),
    ],
)
def test_the_address_is_the_last_hop_that_no_trusted_proxy_vouches_for(
    peer: str, forwarded: str | None, address: str
) -> None:
    """Only trusted proxies are believed, and what a client wrote itself into the header is not."""
    headers = Headers({} if forwarded is None else {"X-Forwarded-For": forwarded})
    assert PROXIES.caller(peer, headers).address == address


@pytest.mark.parametrize(
    ("peer", "headers", "local"),
    [
        ("127.0.0.1", {}, True),
        ("::1", {}, True),
        ("192.0.2.9", {}, False),
        ("127.0.0.1", {"X-Forwarded-For": "127.0.0.1"}, False),
        ("127.0.0.1", {"Forwarded": "for=192.0.2.1"}, False),
        ("::1", {"X-Forwarded-For": "192.0.2.1"}, False),
    ],
)
def test_a_proxy_on_this_machine_does_not_make_its_callers_local(
    peer: str, headers: dict[str, str], local: bool
) -> None:
    """Loopback counts only for who connects directly, also where the proxy was not declared."""
    assert PROXIES.caller(peer, Headers(headers)).on_this_machine is local


def test_the_host_comes_from_a_trusted_proxy_only() -> None:
    """X-Forwarded-Host is believed of trusted peers."""
    headers = Headers({"Host": "inner:3000", "X-Forwarded-Host": "chat.example.org"})
    assert PROXIES.caller("10.0.0.1", headers).host == "chat.example.org"
    assert PROXIES.caller("192.0.2.1", headers).host == "inner:3000"


@pytest.mark.parametrize(
    ("origin", "host", "allowed"),
    [
        (None, "127.0.0.1:3000", True),
        ("http://127.0.0.1:3000", "127.0.0.1:3000", True),
        ("http://127.0.0.1:3001", "127.0.0.1:3000", False),
        ("https://Chat.Example.org", "chat.example.org", True),
        ("https://chat.example.org:443", "chat.example.org", True),
        ("https://chat.example.org", "chat.example.org:443", True),
        ("https://evil.example", "chat.example.org", False),
        ("https://friend.example", "chat.example.org", True),
        ("null", "chat.example.org", False),
        ("file://", "", False),
        ("", "", False),
    ],
)
def test_pages_of_the_same_host_and_listed_ones_may_connect(origin: str | None, host: str, allowed: bool) -> None:
    """Every other page is refused; programs, which send no Origin, are not."""
    assert origin_allowed(origin, host, ("https://friend.example",)) is allowed

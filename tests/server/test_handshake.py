"""Client addresses and Origins."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from inferencecenter.server.handshake import TrustedProxies, origin_allowed

PROXIES = TrustedProxies(["10.0.0.0/8", "127.0.0.1"])


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
        ("10.1.2.3", "203.0.113.1:5678", "203.0.113.1"),
        ("10.1.2.3", "198.51.100.7:1, 203.0.113.1:5678, 10.9.9.9:80", "203.0.113.1"),
        ("10.1.2.3", "[2001:db8::1]:80", "2001:db8::1"),
        ("10.1.2.3", "[2001:db8::1]", "2001:db8::1"),
        ("10.1.2.3", "2001:db8::1", "2001:db8::1"),
        ("10.1.2.3", "fe80::1%" + "x" * 300, "fe80::1"),
        ("10.1.2.3", "203.0.113.1, unknown", "10.1.2.3"),
        ("10.1.2.3", "203.0.113.1, _hidden, 10.9.9.9", "10.9.9.9"),
        ("10.1.2.3", "", "10.1.2.3"),
        ("10.1.2.3", "x" * 10_000, "10.1.2.3"),
    ],
)
def test_client_address_is_the_last_untrusted_hop(peer: str, forwarded: str | None, address: str) -> None:
    """Entries that a client wrote itself are not believed."""
    headers = Headers({} if forwarded is None else {"X-Forwarded-For": forwarded})
    assert PROXIES.peer_info(peer, headers).address == address


LOCAL = {"Host": "127.0.0.1:3000"}


@pytest.mark.parametrize(
    ("peer", "headers", "local"),
    [
        ("127.0.0.1", LOCAL, True),
        ("::1", {"Host": "[::1]:3000"}, True),
        ("::ffff:127.0.0.1", {"Host": "localhost"}, True),
        ("127.0.0.1", {"Host": "LocalHost.:3000"}, True),
        ("127.0.0.1", {"Host": "model.localhost"}, True),
        ("192.0.2.9", LOCAL, False),
        ("127.0.0.1", {}, False),
        ("127.0.0.1", {"Host": ""}, False),
        ("127.0.0.1", {"Host": "chat.example.org"}, False),
        ("127.0.0.1", {"Host": "localhost.example.org:3000"}, False),
        ("127.0.0.1", {"Host": "192.0.2.1"}, False),
        ("127.0.0.1", {"Host": "[2001:db8::1]"}, False),
        ("127.0.0.1", {**LOCAL, "X-Forwarded-For": "127.0.0.1"}, False),
        ("127.0.0.1", {**LOCAL, "Forwarded": "for=192.0.2.1"}, False),
        ("127.0.0.1", {**LOCAL, "X-Real-IP": "192.0.2.1"}, False),
        ("127.0.0.1", {**LOCAL, "Via": "1.1 proxy"}, False),
        ("::1", {**LOCAL, "X-Forwarded-For": "192.0.2.1"}, False),
    ],
)
@pytest.mark.parametrize("trusted", [("10.0.0.0/8", "127.0.0.1"), ()])
def test_clients_of_a_local_proxy_are_not_local(
    peer: str, headers: dict[str, str], trusted: tuple[str, ...], local: bool
) -> None:
    """Loopback counts only without any forwarding header, declared proxy or not."""
    assert TrustedProxies(trusted).peer_info(peer, Headers(headers)).on_this_machine is local


@pytest.mark.parametrize(
    ("peer", "headers", "seen"),
    [
        ("127.0.0.1", LOCAL, False),
        ("192.0.2.1", {"Host": "chat.example.org", "X-Forwarded-For": "192.0.2.9"}, False),
        ("127.0.0.1", {"Host": "chat.example.org"}, True),
        ("::1", {**LOCAL, "Via": "1.1 proxy"}, True),
    ],
)
def test_untrusted_local_proxy_is_detected(peer: str, headers: dict[str, str], seen: bool) -> None:
    """Its forwarding headers identify it; those that remote clients send do not."""
    proxies = TrustedProxies(())
    proxies.peer_info(peer, Headers(headers))
    assert proxies.sees_untrusted is seen


def test_forwarded_host_needs_a_trusted_proxy() -> None:
    """X-Forwarded-Host is ignored otherwise."""
    headers = Headers({"Host": "inner:3000", "X-Forwarded-Host": "chat.example.org"})
    assert PROXIES.peer_info("10.0.0.1", headers).host == "chat.example.org"
    assert PROXIES.peer_info("192.0.2.1", headers).host == "inner:3000"


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
        ("http://[half", "[half", False),
        ("http://[::1]:80", "[::1]", True),
    ],
)
def test_allowed_origins(origin: str | None, host: str, allowed: bool) -> None:
    """The daemon's own host, listed origins and requests without an Origin are allowed."""
    assert origin_allowed(origin, host, ("https://friend.example",)) is allowed

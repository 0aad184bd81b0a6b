"""Network addresses as text. That of a peer is parsed once, though limits, origins and networks are checked with it."""

from __future__ import annotations

from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final

_MAX_KNOWN: Final = 1024
_UNIX: Final = "unix:"
_LOOPBACK: Final = (IPv4Address("127.0.0.1"), IPv6Address("::1"))


def parse_address(text: str) -> IPv4Address | IPv6Address | None:
    """Return an address, an IPv4 one where it is mapped into IPv6; ``None`` for other text."""
    try:
        parsed = ip_address(text)
    except ValueError:
        return None
    mapped = parsed.ipv4_mapped if isinstance(parsed, IPv6Address) else None
    return mapped or parsed


peer_address = lru_cache(_MAX_KNOWN)(parse_address)
"""``parse_address`` with a cache, for peers: their text has a bounded length."""


def unix_peer(uid: int) -> str:
    """Return what stands for the address of a user of this machine on a Unix socket: ``unix:1000``."""
    return f"{_UNIX}{uid}"


def unix_uid(peer: str) -> int | None:
    """Return the user id in the text of ``unix_peer``, ``None`` for an address."""
    return int(peer.removeprefix(_UNIX)) if peer.startswith(_UNIX) else None


def addresses_of(peer: str) -> tuple[IPv4Address | IPv6Address, ...]:
    """Return the addresses of a peer; on a Unix socket those of this machine, and none for other text."""
    if peer.startswith(_UNIX):
        return _LOOPBACK
    address = peer_address(peer)
    return () if address is None else (address,)

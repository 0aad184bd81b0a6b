"""Network addresses as text. That of a peer is parsed once, though limits, origins and networks are checked with it."""

from __future__ import annotations

from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final

_MAX_KNOWN: Final = 1024


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

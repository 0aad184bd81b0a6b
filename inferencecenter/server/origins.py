"""Where a connection comes from: the caller's address behind proxies, and the Origin a browser names. Pure."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.datastructures import Headers

_DEFAULT_PORTS: Final = {"http": 80, "ws": 80, "https": 443, "wss": 443}


@dataclass(frozen=True, slots=True)
class Caller:
    """Who is at the other end.

    ``address`` is the last hop that no trusted proxy vouches for; ``host`` is what the caller asked for.
    ``direct`` says that no proxy, trusted or not, stands between.
    """

    address: str
    host: str
    direct: bool

    @property
    def on_this_machine(self) -> bool:
        """Whether the caller is a program on this machine, rather than one behind a proxy on it."""
        parsed = _parsed(self.address)
        return self.direct and parsed is not None and parsed.is_loopback


class Proxies:
    """The proxies whose forwarding headers are believed.

    Args:
        networks: Addresses or CIDR networks.
    """

    def __init__(self, networks: Sequence[str]) -> None:
        self._networks = [ipaddress.ip_network(network, strict=False) for network in networks]

    def caller(self, peer: str, headers: Headers) -> Caller:
        """Return who is calling through the peer ``peer``."""
        forwarded = [hop.strip() for line in headers.getlist("x-forwarded-for") for hop in line.split(",")]
        direct = not forwarded and "forwarded" not in headers
        if not self._trusts(peer):
            return Caller(address=peer, host=headers.get("host", ""), direct=direct)
        # Each proxy appends whom it heard, so the list is read from its end.
        address = peer
        for hop in reversed(forwarded):
            address = hop
            if not self._trusts(hop):
                break
        host = headers.get("x-forwarded-host") or headers.get("host", "")
        return Caller(address=address, host=host, direct=direct)

    def _trusts(self, address: str) -> bool:
        parsed = _parsed(address)
        return parsed is not None and any(parsed in network for network in self._networks)


def origin_allowed(origin: str | None, host: str, allowed: Sequence[str]) -> bool:
    """Tell whether a page from ``origin`` may open a socket to ``host``.

    Programs other than browsers send no Origin and are not held to it.
    """
    if origin is None or origin in allowed:
        return True
    parts = urlsplit(origin)
    default_port = _DEFAULT_PORTS.get(parts.scheme)
    if default_port is None or not parts.netloc:
        return False
    suffix = f":{default_port}"
    return parts.netloc.lower().removesuffix(suffix) == host.lower().removesuffix(suffix)


def _parsed(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return None
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return mapped or parsed

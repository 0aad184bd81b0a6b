"""Where a connection comes from: the caller's address behind proxies, and the Origin a browser names.

A reverse proxy on this machine that is not in ``server.trusted_proxies`` makes all of its callers look as one local
program. Most proxies mark what they pass on, by a header or by a ``Host`` that is no loopback name; one that does
neither, as nginx with nothing but ``proxy_pass``, cannot be told from a local program by anything in the request.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import structlog

from inferencecenter.telemetry.log_limit import LogLimit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.datastructures import Headers

_DEFAULT_PORTS: Final = {"http": 80, "ws": 80, "https": 443, "wss": 443}
_PROXY_MARKS: Final = ("forwarded", "via", "x-real-ip", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto")
"""Headers that only proxies add."""
_BRACKETED: Final = re.compile(r"\[(?P<address>[^\]]*)\](?::\d*)?")
_WITH_PORT: Final = re.compile(r"(?P<address>[^:]*):\d*")
_SHOWN_CHARS: Final = 100
_REMIND_AFTER_S: Final = 3600.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who is at the other end.

    ``address`` is the last hop that no trusted proxy vouches for; ``host`` is what the caller asked for.
    ``direct`` says that no proxy has marked the request.
    """

    address: str
    host: str
    direct: bool

    @property
    def on_this_machine(self) -> bool:
        """Whether the caller is a program on this machine, rather than one behind a proxy on it that shows itself."""
        return self.direct and _is_loopback(self.address) and _names_loopback(self.host)


class Proxies:
    """The proxies whose forwarding headers are believed.

    ``sees_untrusted`` tells whether requests come through a proxy on this machine that is not among them: then all
    behind it share the limits of one address. It is logged, too.

    Args:
        networks: Addresses or CIDR networks.
    """

    def __init__(self, networks: Sequence[str]) -> None:
        self._networks = [ipaddress.ip_network(network, strict=False) for network in networks]
        self._reminder = LogLimit(_REMIND_AFTER_S)
        self.sees_untrusted = False

    def caller(self, peer: str, headers: Headers) -> Caller:
        """Return who is calling through the peer ``peer``."""
        direct = not any(mark in headers for mark in _PROXY_MARKS)
        if not self._trusts(peer):
            caller = Caller(address=peer, host=headers.get("host", ""), direct=direct)
            if _is_loopback(peer) and not caller.on_this_machine:
                self._note_untrusted(caller)
            return caller
        # Each proxy appends whom it heard, so the list is read from its end.
        address = peer
        forwarded = [hop for line in headers.getlist("x-forwarded-for") for hop in line.split(",")]
        for hop in reversed(forwarded):
            found = _hop_address(hop)
            if found is None:  # a name, or nothing that means anything: the proxy that wrote it is all that is known
                break
            address = found
            if not self._trusts(address):
                break
        host = headers.get("x-forwarded-host") or headers.get("host", "")
        return Caller(address=address, host=host, direct=direct)

    def _note_untrusted(self, caller: Caller) -> None:
        self.sees_untrusted = True
        if self._reminder.admit() is not None:
            _log.warning(
                "proxy_not_trusted",
                address=caller.address,
                host=caller.host[:_SHOWN_CHARS],
                hint="If a reverse proxy on this machine passes requests on, name its address in"
                " server.trusted_proxies and have it send X-Forwarded-For and Host; until then all behind it share"
                " the limits of one address.",
            )

    def _trusts(self, address: str) -> bool:
        parsed = _parsed(address)
        return parsed is not None and any(parsed in network for network in self._networks)


def origin_allowed(origin: str | None, host: str, allowed: Sequence[str]) -> bool:
    """Tell whether a page from ``origin`` may open a socket to ``host``.

    Programs other than browsers send no Origin and are not held to it.
    """
    if origin is None or origin in allowed:
        return True
    try:
        parts = urlsplit(origin)
    except ValueError:  # a host that is half an address
        return False
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


def _is_loopback(address: str) -> bool:
    parsed = _parsed(address)
    return parsed is not None and parsed.is_loopback


def _names_loopback(host: str) -> bool:
    """Tell whether a ``Host`` is a name or an address of this machine alone, with a port or without."""
    match = _BRACKETED.fullmatch(host) or _WITH_PORT.fullmatch(host)
    name = (match["address"] if match else host).lower().removesuffix(".")
    return name == "localhost" or name.endswith(".localhost") or _is_loopback(name)


def _hop_address(hop: str) -> str | None:
    """Return the address in an entry of ``X-Forwarded-For``, which may have a port: ``1.2.3.4:56``, ``[::1]:80``."""
    hop = hop.strip()
    match = _BRACKETED.fullmatch(hop) or _WITH_PORT.fullmatch(hop)
    parsed = _parsed(match["address"] if match else hop)
    # Without its zone, which may be any text of any length.
    return None if parsed is None else str(parsed).partition("%")[0]

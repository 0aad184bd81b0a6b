"""Checks of a request before it is admitted: its peer behind proxies, its Origin, its query, its credential.

Behind a reverse proxy on this machine that is not in ``server.trusted_proxies`` all callers appear as one local
program. Most proxies mark forwarded requests, by a header or by a ``Host`` that is not a loopback name; one that does
neither, such as nginx with nothing but ``proxy_pass``, cannot be distinguished from a local program.
"""

from __future__ import annotations

import ipaddress
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import orjson
import structlog
from starlette.datastructures import Headers, QueryParams

from inferencecenter.auth.authentication import Credential, KeyCredential, TokenCredential
from inferencecenter.core.addresses import addresses_of, parse_address, peer_address, unix_uid
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.base import SUBPROTOCOL, TOKEN_SUBPROTOCOL_PREFIX
from inferencecenter.telemetry.logs import LogLimit

if TYPE_CHECKING:
    from collections.abc import Sequence


_DEFAULT_PORTS: Final = {"http": 80, "ws": 80, "https": 443, "wss": 443}
_PROXY_MARKS: Final = ("forwarded", "via", "x-real-ip", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto")
"""Headers that only proxies add."""
_BRACKETED: Final = re.compile(r"\[(?P<address>[^\]]*)\](?::\d*)?")
_WITH_PORT: Final = re.compile(r"(?P<address>[^:]*):\d*")
_SHOWN_CHARS: Final = 100
_REMIND_AFTER_S: Final = 3600.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """The peer of a request.

    ``address`` is the last hop that no trusted proxy vouches for, or ``unix:`` and a user id; ``host`` is the ``Host``
    of the request. ``direct`` means that the request has no mark of a proxy.
    """

    address: str
    host: str
    direct: bool

    @property
    def on_this_machine(self) -> bool:
        """Whether the caller is a program on this machine, rather than one behind a proxy that marks its requests."""
        is_local = any(address.is_loopback for address in addresses_of(self.address))
        return self.direct and is_local and _names_loopback(self.host)

    @property
    def unix_uid(self) -> int | None:
        """User id of a program that is connected to the Unix socket itself, rather than through a proxy."""
        return unix_uid(self.address) if self.on_this_machine else None


class TrustedProxies:
    """The proxies whose forwarding headers are trusted.

    ``sees_untrusted`` is set once a request has come through a proxy on this machine that is not among them, in which
    case all callers behind it share the limits of one address; that is also logged.

    Args:
        networks: Addresses or CIDR networks.
    """

    def __init__(self, networks: Sequence[str]) -> None:
        self._networks = [ipaddress.ip_network(network, strict=False) for network in networks]
        self._reminder = LogLimit(_REMIND_AFTER_S)
        self.sees_untrusted = False

    def peer_info(self, peer: str, headers: Headers) -> PeerInfo:
        """Return the peer information of a request from ``peer``."""
        direct = not any(mark in headers for mark in _PROXY_MARKS)
        if not self.trusts(peer):
            caller = PeerInfo(address=peer, host=headers.get("host", ""), direct=direct)
            if (address := peer_address(peer)) is not None and address.is_loopback and not caller.on_this_machine:
                self._note_untrusted(caller)
            return caller
        # Each proxy appends the address of its own peer, so the list is read from its end.
        hop_address = peer
        forwarded = [hop for line in headers.getlist("x-forwarded-for") for hop in line.split(",")]
        for hop in reversed(forwarded):
            found = _hop_address(hop)
            if found is None:  # a name or garbage: only the proxy that wrote it is known
                break
            hop_address = found
            if not self.trusts(hop_address):
                break
        host = headers.get("x-forwarded-host") or headers.get("host", "")
        return PeerInfo(address=hop_address, host=host, direct=direct)

    def _note_untrusted(self, caller: PeerInfo) -> None:
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

    def trusts(self, address: str) -> bool:
        """Return whether ``address`` is that of a trusted proxy."""
        parsed = peer_address(address)
        return parsed is not None and any(parsed in network for network in self._networks)


def origin_allowed(origin: str | None, host: str, allowed: Sequence[str]) -> bool:
    """Return whether a page from ``origin`` may open a socket to ``host``.

    Clients other than browsers send no Origin and are not restricted.
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


def _names_loopback(host: str) -> bool:
    """Return whether a ``Host``, with or without a port, is a loopback name or address."""
    match = _BRACKETED.fullmatch(host) or _WITH_PORT.fullmatch(host)
    name = (match["address"] if match else host).lower().removesuffix(".")
    address = parse_address(name)
    return name == "localhost" or name.endswith(".localhost") or (address is not None and address.is_loopback)


def _hop_address(hop: str) -> str | None:
    """Return the address in an entry of ``X-Forwarded-For``, which may have a port: ``1.2.3.4:56``, ``[::1]:80``."""
    hop = hop.strip()
    match = _BRACKETED.fullmatch(hop) or _WITH_PORT.fullmatch(hop)
    parsed = parse_address(match["address"] if match else hop)
    # Without its zone, which may be any text of any length.
    return None if parsed is None else str(parsed).partition("%")[0]


MAX_QUERY_BYTES: Final = 4096
_SECRET_PARAMETERS: Final = ("token", "access_token", "api_key")


def chooses_v1(subprotocols: Sequence[str]) -> bool:
    """Return whether the client offers the daemon's own subprotocol."""
    return SUBPROTOCOL in subprotocols


def check_query(query: bytes) -> None:
    """Refuse a URL that contains a secret, or a query that is far too long.

    The error names the parameter, but not its value.

    Raises:
        InferenceCenterError: ``invalid_request``.
    """
    check_query_length(query)
    parameters = QueryParams(query)
    for name in _SECRET_PARAMETERS:
        if name in parameters:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST,
                f"{name} stands in the address, where logs and histories keep it",
                field=name,
                hint=f"Send Authorization: Bearer, or the subprotocols {SUBPROTOCOL} and"
                f" {TOKEN_SUBPROTOCOL_PREFIX}<token>, or an auth frame; and replace this token.",
            )


def check_query_length(query: bytes) -> None:
    """Refuse a query that takes milliseconds to parse, which happens before authentication.

    Raises:
        InferenceCenterError: ``invalid_request``.
    """
    if len(query) > MAX_QUERY_BYTES:
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST,
            f"the address has {len(query)} bytes of parameters; {MAX_QUERY_BYTES} are allowed",
        )


def read_credential(headers: Headers, subprotocols: Sequence[str] = ()) -> Credential | None:
    """Return the credential of a request, ``None`` without one.

    Clients of other services send a token as ``X-API-Key`` or ``API-Key`` alone.

    Raises:
        InferenceCenterError: ``not_authenticated`` for a client id without a key.
    """
    if (authorization := headers.get("authorization")) is not None:
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise InferenceCenterError(
                ErrorCode.NOT_AUTHENTICATED, "Authorization is not a bearer token", hint="Authorization: Bearer <token>"
            )
        return TokenCredential(token.strip())
    client_id, api_key = headers.get("x-client-id"), headers.get("x-api-key")
    if client_id is not None and api_key is not None:
        return KeyCredential(client_id, api_key)
    if client_id is not None:
        raise InferenceCenterError(
            ErrorCode.NOT_AUTHENTICATED, "X-API-Key is missing", hint="X-Client-ID and X-API-Key go together."
        )
    if alone := api_key or headers.get("api-key"):
        return TokenCredential(alone)
    for subprotocol in subprotocols:
        if subprotocol.startswith(TOKEN_SUBPROTOCOL_PREFIX):
            return TokenCredential(subprotocol.removeprefix(TOKEN_SUBPROTOCOL_PREFIX))
    return None


def refusal_headers(error: InferenceCenterError) -> dict[str, str]:
    """Return the HTTP headers of an error response."""
    headers = {"content-type": "application/json"}
    if error.code is ErrorCode.NOT_AUTHENTICATED:
        headers["www-authenticate"] = "Bearer"
    if error.retry_after_ms is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after_ms / 1000))
    return headers


def refusal_body(error: InferenceCenterError) -> bytes:
    """Return the JSON body of an error response."""
    fields = {
        "code": error.code.value,
        "message": error.message,
        "error": error.message,
        "hint": error.hint,
        "field": error.field,
        "retryable": error.spec.retryable,
        "retry_after_ms": error.retry_after_ms,
    }
    return orjson.dumps({name: value for name, value in fields.items() if value is not None})

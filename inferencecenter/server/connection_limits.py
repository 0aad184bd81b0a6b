"""Limits on the number of connections, and the choice of the one that a new one evicts. Pure."""

from __future__ import annotations

from collections import defaultdict
from itertools import islice
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

from inferencecenter.auth.rate_limits import AddressRateLimiter, rate_limit_key
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.server.handshake import read_credential, refusal_body, refusal_headers

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.datastructures import Headers

    from inferencecenter.server.handshake import TrustedProxies
    from inferencecenter.telemetry.metrics import DaemonMetrics


class TrackedConnection(Protocol):
    """A connection that can be evicted."""

    def evict(self) -> None:
        """Close at once."""


ConnectionT = TypeVar("ConnectionT", bound=TrackedConnection)


class ConnectionLimiter(Generic[ConnectionT]):
    """The open connections, with the idle ones in the order in which they became idle.

    A new connection evicts the one that has been idle longest, so many idle connections do not displace active ones.

    Args:
        most: Maximum number of connections.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._connections: set[ConnectionT] = set()
        self._waiting: dict[ConnectionT, None] = {}  # the longest idle first

    def __len__(self) -> int:
        return len(self._connections)

    @property
    def n_waiting(self) -> int:
        """Number of idle connections."""
        return len(self._waiting)

    def admit(self, connection: ConnectionT) -> bool:
        """Add a connection, if there is room or an idle one to evict."""
        if len(self._connections) >= self._most:
            if not self._waiting:
                return False
            self.evict_idle(1)
        self._connections.add(connection)
        return True

    def evict_idle(self, n_connections: int) -> None:
        """Close up to this many connections, the longest idle first."""
        for longest in list(islice(self._waiting, n_connections)):
            self.leave(longest)
            longest.evict()

    def mark_idle(self, connection: ConnectionT) -> None:
        """Mark a connection as idle; one that is idle already keeps its position."""
        if connection in self._connections:
            self._waiting.setdefault(connection)

    def mark_busy(self, connection: ConnectionT) -> None:
        """Mark a connection as busy with a request."""
        self._waiting.pop(connection, None)

    def leave(self, connection: ConnectionT) -> None:
        self._waiting.pop(connection, None)
        self._connections.discard(connection)


# Limits on unauthenticated sockets.
#
# Opening a socket is cheap, so unauthenticated sockets never displace those of clients: they are counted separately,
# and a new one is always admitted. It evicts the oldest one of its own address if that has reached its limit, and
# otherwise the oldest of all. So an address that opens thousands evicts only its own.

SocketT = TypeVar("SocketT")


class UnauthenticatedSockets(Generic[SocketT]):
    """Unauthenticated sockets in order of arrival, overall and per address; an IPv6 /64 counts as one address.

    Args:
        most: Maximum number in total.
        most_per_address: Maximum number per address.
    """

    def __init__(self, *, most: int, most_per_address: int) -> None:
        self._most = most
        self._most_per_address = most_per_address
        self._sites: dict[SocketT, str] = {}  # the oldest first
        self._of_site: defaultdict[str, dict[SocketT, None]] = defaultdict(dict)

    def __len__(self) -> int:
        return len(self._sites)

    def admit(self, socket: SocketT, *, address: str) -> SocketT | None:
        """Add a socket and return the evicted one, which is no longer counted, or ``None``."""
        from_where = rate_limit_key(address)
        evicted = None
        if len(self._of_site.get(from_where, ())) >= self._most_per_address:
            evicted = next(iter(self._of_site[from_where]))
        elif len(self._sites) >= self._most:
            evicted = next(iter(self._sites))
        if evicted is not None:
            self.discard(evicted)
        self._sites[socket] = from_where
        self._of_site[from_where][socket] = None
        return evicted

    def discard(self, socket: SocketT) -> bool:
        """Remove a socket that has authenticated or closed; return whether it was counted."""
        from_where = self._sites.pop(socket, None)
        if from_where is None:
            return False
        del self._of_site[from_where][socket]
        if not self._of_site[from_where]:
            del self._of_site[from_where]
        return True


# Rate limit of unauthenticated upgrades per address; a socket that authenticates gets its token refunded.

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

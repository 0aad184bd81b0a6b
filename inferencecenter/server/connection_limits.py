"""Limits on the number of connections, and the choice of the one that a new one evicts. Pure."""

from __future__ import annotations

from collections import defaultdict
from itertools import islice
from typing import Generic, Protocol, TypeVar

from inferencecenter.auth.rate_limits import rate_limit_key


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

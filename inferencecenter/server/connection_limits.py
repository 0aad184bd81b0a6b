"""How many connections there may be, and which of them is evicted when one more comes. Pure."""

from __future__ import annotations

from collections import defaultdict
from itertools import islice
from typing import Generic, Protocol, TypeVar

from inferencecenter.auth.rate_limits import rate_limit_key


class TrackedConnection(Protocol):
    """A connection, as far as it may have to go."""

    def evict(self) -> None:
        """Close at once."""


ConnectionT = TypeVar("ConnectionT", bound=TrackedConnection)


class ConnectionLimiter(Generic[ConnectionT]):
    """The connections that are open, those that wait for a request apart.

    Whoever opens many and asks nothing loses them to those who ask: the one that has waited longest makes way.

    Args:
        most: How many there may be.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._connections: set[ConnectionT] = set()
        self._waiting: dict[ConnectionT, None] = {}  # the one that has waited longest first

    def __len__(self) -> int:
        return len(self._connections)

    @property
    def n_waiting(self) -> int:
        """How many wait for a request."""
        return len(self._waiting)

    def admit(self, connection: ConnectionT) -> bool:
        """Take in one more, if there is room or another makes way."""
        if len(self._connections) >= self._most:
            if not self._waiting:
                return False
            self.evict_idle(1)
        self._connections.add(connection)
        return True

    def evict_idle(self, n_connections: int) -> None:
        """Close as many of those that have waited longest."""
        for longest in list(islice(self._waiting, n_connections)):
            self.leave(longest)
            longest.evict()

    def mark_idle(self, connection: ConnectionT) -> None:
        """Note that one waits for a request; how long it has waited already still counts."""
        if connection in self._connections:
            self._waiting.setdefault(connection)

    def mark_busy(self, connection: ConnectionT) -> None:
        """Note that one has a request."""
        self._waiting.pop(connection, None)

    def leave(self, connection: ConnectionT) -> None:
        """Let one go."""
        self._waiting.pop(connection, None)
        self._connections.discard(connection)


# Sockets that have not authenticated yet: how many there may be, and which of them makes way for a newcomer. Pure.
#
# Opening a socket costs a stranger next to nothing, so strangers never take the place of clients: they are counted
# apart, and one more is always let in. It takes the place of the oldest of its own address where that has as many as
# it may have, and otherwise of the oldest of all. So a peer that opens thousands from one address evicts its own
# alone.

SocketT = TypeVar("SocketT")


class UnauthenticatedSockets(Generic[SocketT]):
    """Keeps the order in which they came, for all and for each address; a /64 of IPv6 counts as one address.

    Args:
        most: How many there may be.
        most_per_address: How many of one address.
    """

    def __init__(self, *, most: int, most_per_address: int) -> None:
        self._most = most
        self._most_per_address = most_per_address
        self._sites: dict[SocketT, str] = {}  # the oldest first
        self._of_site: defaultdict[str, dict[SocketT, None]] = defaultdict(dict)

    def __len__(self) -> int:
        return len(self._sites)

    def admit(self, socket: SocketT, *, address: str) -> SocketT | None:
        """Take in one more; return the one that makes way, if one must, which is no longer counted."""
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
        """Count one no longer: it has authenticated, or gone. Tell whether it was counted."""
        from_where = self._sites.pop(socket, None)
        if from_where is None:
            return False
        del self._of_site[from_where][socket]
        if not self._of_site[from_where]:
            del self._of_site[from_where]
        return True

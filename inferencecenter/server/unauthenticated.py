"""Sockets that have not authenticated yet: how many there may be, and which of them makes way for a newcomer. Pure.

Opening a socket costs a stranger next to nothing, so strangers never take the place of clients: they are counted apart,
and one more is always let in. It takes the place of the oldest of its own address where that has as many as it may
have, and otherwise of the oldest of all. So a peer that opens thousands from one address evicts its own alone.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Generic, TypeVar

from inferencecenter.server.attempts import site

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
        from_where = site(address)
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

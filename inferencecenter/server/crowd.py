"""How many connections there may be, and which of them makes way when one more comes. Pure."""

from __future__ import annotations

from itertools import islice
from typing import Generic, Protocol, TypeVar


class Guest(Protocol):
    """A connection, as far as it may have to go."""

    def make_way(self) -> None:
        """Close at once."""


GuestT = TypeVar("GuestT", bound=Guest)


class Crowd(Generic[GuestT]):
    """The connections that are open, those that wait for a request apart.

    Whoever opens many and asks nothing loses them to those who ask: the one that has waited longest makes way.

    Args:
        most: How many there may be.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._guests: set[GuestT] = set()
        self._waiting: dict[GuestT, None] = {}  # the one that has waited longest first

    def __len__(self) -> int:
        return len(self._guests)

    @property
    def n_waiting(self) -> int:
        """How many wait for a request."""
        return len(self._waiting)

    def admit(self, guest: GuestT) -> bool:
        """Take in one more, if there is room or another makes way."""
        if len(self._guests) >= self._most:
            if not self._waiting:
                return False
            self.make_room(1)
        self._guests.add(guest)
        return True

    def make_room(self, n_guests: int) -> None:
        """Close as many of those that have waited longest."""
        for longest in list(islice(self._waiting, n_guests)):
            self.leave(longest)
            longest.make_way()

    def wait(self, guest: GuestT) -> None:
        """Note that one waits for a request; how long it has waited already still counts."""
        if guest in self._guests:
            self._waiting.setdefault(guest)

    def work(self, guest: GuestT) -> None:
        """Note that one has a request."""
        self._waiting.pop(guest, None)

    def leave(self, guest: GuestT) -> None:
        """Let one go."""
        self._waiting.pop(guest, None)
        self._guests.discard(guest)

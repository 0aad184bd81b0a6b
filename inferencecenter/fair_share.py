"""Room that clients share: one of them may use all of it while it is alone, and never keeps another out."""

from __future__ import annotations


class FairShare:
    """What each client holds of a room of bytes, or of anything else that can be counted.

    While there is room all is taken in. When it is full, a client that holds nothing is taken in all the same, and so
    is one that stays within an even share of the room; the others are refused. So the room is exceeded by what those
    bring, and by no client that has more than its share already.

    Args:
        room: How much there is.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._held: dict[str, int] = {}
        self._total = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._total} of {self._room}, clients={len(self._held)})"

    @property
    def total(self) -> int:
        """What all clients hold together."""
        return self._total

    def fits(self, client_id: str, amount: int) -> bool:
        """Tell whether a client may hold so much more."""
        held = self._held.get(client_id, 0)
        n_clients = len(self._held) + (client_id not in self._held)
        return not held or self._total + amount <= self._room or held + amount <= self._room // n_clients

    def add(self, client_id: str, amount: int) -> None:
        """Book what a client holds now, at least 1, whether it fits or not."""
        self._held[client_id] = self._held.get(client_id, 0) + amount
        self._total += amount

    def remove(self, client_id: str, amount: int) -> None:
        """Book that a client does not hold so much any more."""
        self._total -= amount
        self._held[client_id] -= amount
        if not self._held[client_id]:
            del self._held[client_id]

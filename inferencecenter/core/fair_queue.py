"""A queue in front of a worker that many clients use: they take turns, however much each of them has waiting."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator


ItemT = TypeVar("ItemT", bound="Hashable")


class FairQueue(Generic[ItemT]):
    """Items by client. A client that was served goes behind the others; its own items stay in their order.

    A client whose items are all gone is forgotten. An item is in the queue once at most.
    """

    def __init__(self) -> None:
        # The client whose turn it is first; of each its items, the oldest first.
        self._clients: OrderedDict[str, dict[ItemT, None]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._clients.values()))

    def __iter__(self) -> Iterator[ItemT]:
        """Iterate over all items, client by client."""
        return (item for items in self._clients.values() for item in items)

    def add(self, client_id: str, item: ItemT) -> None:
        """Put an item behind its client's others."""
        self._clients.setdefault(client_id, {})[item] = None

    def withdraw(self, client_id: str, item: ItemT) -> None:
        """Forget an item, if it still waits."""
        items = self._clients.get(client_id, {})
        items.pop(item, None)
        if not items:
            self._clients.pop(client_id, None)

    def take(self, may_run: Callable[[ItemT], bool] = lambda _: True) -> ItemT | None:
        """Remove and return the oldest item of the first client in turn for which ``may_run`` is true, if any."""
        for client_id, items in self._clients.items():
            item = next(iter(items))
            if may_run(item):
                self.withdraw(client_id, item)
                if client_id in self._clients:
                    self._clients.move_to_end(client_id)
                return item
        return None

    def clear(self) -> None:
        """Forget all items."""
        self._clients.clear()


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

"""Fair sharing between clients: a queue with round-robin over the clients, and shares of a bounded resource."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator


ItemT = TypeVar("ItemT", bound="Hashable")


class FairQueue(Generic[ItemT]):
    """Items by client. A client that was served goes behind the others; its own items stay in order.

    A client without items is forgotten. An item is in the queue at most once.
    """

    def __init__(self) -> None:
        # Clients in the order of service, each with its items, the oldest first.
        self._clients: OrderedDict[str, dict[ItemT, None]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._clients.values()))

    def __iter__(self) -> Iterator[ItemT]:
        """Iterate over all items, client by client."""
        return (item for items in self._clients.values() for item in items)

    def add(self, client_id: str, item: ItemT) -> None:
        self._clients.setdefault(client_id, {})[item] = None

    def withdraw(self, client_id: str, item: ItemT) -> None:
        """Remove an item, if it still waits."""
        items = self._clients.get(client_id, {})
        items.pop(item, None)
        if not items:
            self._clients.pop(client_id, None)

    def take(self, may_run: Callable[[ItemT], bool] = lambda _: True) -> ItemT | None:
        """Remove and return the oldest item of the first client for which ``may_run`` is true, if any."""
        for client_id, items in self._clients.items():
            item = next(iter(items))
            if may_run(item):
                self.withdraw(client_id, item)
                if client_id in self._clients:
                    self._clients.move_to_end(client_id)
                return item
        return None

    def clear(self) -> None:
        self._clients.clear()


class FairShare:
    """Shares of clients in a bounded resource, such as bytes or places in a queue.

    While there is room, every request fits. When it is full, a request still fits if its client holds nothing, or stays
    within an even share; others do not. So the bound is exceeded by these requests only, and by no client that
    already has more than its share.

    Args:
        room: The size of the resource.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._held: dict[str, int] = {}
        self._total = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._total} of {self._room}, clients={len(self._held)})"

    @property
    def total(self) -> int:
        """Total held by all clients."""
        return self._total

    def fits(self, client_id: str, amount: int) -> bool:
        held = self._held.get(client_id, 0)
        n_clients = len(self._held) + (client_id not in self._held)
        return not held or self._total + amount <= self._room or held + amount <= self._room // n_clients

    def add(self, client_id: str, amount: int) -> None:
        """Add to a client's share, at least 1, whether it fits or not."""
        self._held[client_id] = self._held.get(client_id, 0) + amount
        self._total += amount

    def remove(self, client_id: str, amount: int) -> None:
        """Subtract from a client's share."""
        self._total -= amount
        self._held[client_id] -= amount
        if not self._held[client_id]:
            del self._held[client_id]

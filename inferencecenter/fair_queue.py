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

"""Byte budgets of a tier per scope, with LRU eviction."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

PUBLIC = ""

ItemT = TypeVar("ItemT", bound="Hashable")


@dataclass(frozen=True, slots=True)
class TierLimits:
    """A byte budget, the share of it that a non-public scope may use, and the maximum number of items."""

    budget_bytes: int
    scope_share: float = 1.0
    max_items: int = 1_000_000

    def of(self, scope: str) -> int:
        """Return the bytes a scope may use."""
        return self.budget_bytes if scope == PUBLIC else int(self.budget_bytes * self.scope_share)


class LruBudget(Generic[ItemT]):
    """Items with their scopes and sizes, least recently used first.

    New items may use ``allowed_bytes`` of the budget; existing items may exceed it.
    """

    def __init__(self, limits: TierLimits) -> None:
        self.limits = limits
        self.allowed_bytes = limits.budget_bytes
        self._items: dict[ItemT, tuple[str, int]] = {}
        self._scopes: Counter[str] = Counter()
        self._total_bytes = 0

    def __contains__(self, item: ItemT) -> bool:
        return item in self._items

    def __iter__(self) -> Iterator[ItemT]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    @property
    def total_bytes(self) -> int:
        """Total size of all items."""
        return self._total_bytes

    def bytes_of(self, item: ItemT) -> int:
        """Return an item's size; 0 when it is absent."""
        return self._items.get(item, (PUBLIC, 0))[1]

    def put(self, item: ItemT, scope: str, n_bytes: int) -> None:
        """Add or replace an item as the most recently used."""
        self.drop(item)
        self._items[item] = (scope, n_bytes)
        self._scopes[scope] += n_bytes
        self._total_bytes += n_bytes

    def drop(self, item: ItemT) -> None:
        """Remove an item, if present."""
        scope, n_bytes = self._items.pop(item, (PUBLIC, 0))
        self._scopes[scope] -= n_bytes
        self._total_bytes -= n_bytes
        if not self._scopes[scope]:
            del self._scopes[scope]

    def touch(self, item: ItemT) -> None:
        """Mark an item as most recently used, if present."""
        if item in self._items:
            self._items[item] = self._items.pop(item)

    def spare_bytes(self, scope: str, *, without: ItemT | None = None) -> int:
        """Return the bytes available to an item of ``scope`` without evictions, once ``without`` is removed."""
        over_share, over_budget, _ = self._excess(scope, 0, without)
        return -max(over_share, over_budget)

    def room(
        self, scope: str, n_bytes: int, *, without: ItemT | None, rank: Callable[[ItemT], int | None]
    ) -> tuple[ItemT, ...] | None:
        """Return the items to evict, besides ``without``, before adding an item of ``scope`` and ``n_bytes``.

        The lowest ``rank`` is evicted first, and within a rank the least recently used; items of rank ``None`` stay. A
        scope over its share evicts its own items. ``None`` when there cannot be room.
        """
        over_share, over_budget, too_many = self._excess(scope, n_bytes, without)
        if over_share <= 0 and over_budget <= 0 and too_many <= 0:
            return ()
        ranked = [(place, item) for item in self._items if item != without and (place := rank(item)) is not None]
        order = [item for _, item in sorted(ranked, key=lambda each: each[0])]
        own = self._first([item for item in order if self._items[item][0] == scope], over_share, 0)
        freed = sum(map(self.bytes_of, own))
        rest = self._first([item for item in order if item not in own], over_budget - freed, too_many - len(own))
        victims = (*own, *rest)
        freed_budget = sum(map(self.bytes_of, victims))
        if freed < over_share or freed_budget < over_budget or len(victims) < too_many:
            return None
        return victims

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when sums are wrong or a limit is exceeded."""
        scopes: Counter[str] = Counter()
        for scope, n_bytes in self._items.values():
            scopes[scope] += n_bytes
        assert +scopes == +self._scopes, "a scope's bytes are wrong"
        assert scopes.total() == self._total_bytes <= self.limits.budget_bytes, "a tier's bytes are wrong"
        assert len(self._items) <= self.limits.max_items, "a tier holds too many items"
        assert all(n_bytes <= self.limits.of(scope) for scope, n_bytes in scopes.items()), "a scope exceeds its share"

    def _excess(self, scope: str, n_bytes: int, without: ItemT | None) -> tuple[int, int, int]:
        """Return the excess of a new item over its scope's share, the allowed bytes and the maximum item count."""
        gone_scope, gone_bytes = (None, 0) if without is None else self._items.get(without, (None, 0))
        total = self._total_bytes - gone_bytes + n_bytes
        share = self._scopes[scope] - (gone_bytes if gone_scope == scope else 0) + n_bytes
        items = len(self._items) + 1 - (gone_scope is not None)
        return share - self.limits.of(scope), total - self.allowed_bytes, items - self.limits.max_items

    def _first(self, order: list[ItemT], n_bytes: int, n_items: int) -> tuple[ItemT, ...]:
        """Return the first items that add up to ``n_bytes`` and ``n_items``, or all of them if they do not."""
        chosen: list[ItemT] = []
        for item in order:
            if n_bytes <= 0 and len(chosen) >= n_items:
                break
            chosen.append(item)
            n_bytes -= self._items[item][1]
        return tuple(chosen)

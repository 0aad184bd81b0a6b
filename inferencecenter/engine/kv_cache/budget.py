"""The bytes that a tier holds for each scope, in LRU order, and what is evicted when there is no room."""

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
    """A budget, the share of it that a scope other than the public one may hold, and how many items there may be."""

    budget_bytes: int
    scope_share: float = 1.0
    max_items: int = 1_000_000

    def of(self, scope: str) -> int:
        """Return how many bytes a scope may hold."""
        return self.budget_bytes if scope == PUBLIC else int(self.budget_bytes * self.scope_share)


class LruBudget(Generic[ItemT]):
    """Items with their scopes and bytes, the least recently used first.

    ``allowed_bytes`` of the budget may be used for now; what is here already may be more.
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
        """What all items take."""
        return self._total_bytes

    def bytes_of(self, item: ItemT) -> int:
        """Return what an item takes; 0 when it is not here."""
        return self._items.get(item, (PUBLIC, 0))[1]

    def put(self, item: ItemT, scope: str, n_bytes: int) -> None:
        """Enter an item, or change it, as the one used last."""
        self.drop(item)
        self._items[item] = (scope, n_bytes)
        self._scopes[scope] += n_bytes
        self._total_bytes += n_bytes

    def drop(self, item: ItemT) -> None:
        """Take an item out, if it is here."""
        scope, n_bytes = self._items.pop(item, (PUBLIC, 0))
        self._scopes[scope] -= n_bytes
        self._total_bytes -= n_bytes
        if not self._scopes[scope]:
            del self._scopes[scope]

    def touch(self, item: ItemT) -> None:
        """Make an item the one used last, if it is here."""
        if item in self._items:
            self._items[item] = self._items.pop(item)

    def spare_bytes(self, scope: str, *, without: ItemT | None = None) -> int:
        """Return how many bytes an item of ``scope`` may take as things are, once ``without`` is gone."""
        over_share, over_budget, _ = self._excess(scope, 0, without)
        return -max(over_share, over_budget)

    def room(
        self, scope: str, n_bytes: int, *, without: ItemT | None, rank: Callable[[ItemT], int | None]
    ) -> tuple[ItemT, ...] | None:
        """Return the items to drop, besides ``without``, before one of ``scope`` and ``n_bytes`` can be put.

        The lowest ``rank`` goes first, and of these the least recently used; those without a rank stay. A scope over
        its share makes room among its own. ``None`` when there cannot be room.
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
        assert len(self._items) <= self.limits.max_items, "a tier holds too many"
        assert all(n_bytes <= self.limits.of(scope) for scope, n_bytes in scopes.items()), "a scope has too much"

    def _excess(self, scope: str, n_bytes: int, without: ItemT | None) -> tuple[int, int, int]:
        """Return by what an item would exceed its scope's share and what is allowed, in bytes, and the most items."""
        gone_scope, gone_bytes = (None, 0) if without is None else self._items.get(without, (None, 0))
        total = self._total_bytes - gone_bytes + n_bytes
        share = self._scopes[scope] - (gone_bytes if gone_scope == scope else 0) + n_bytes
        items = len(self._items) + 1 - (gone_scope is not None)
        return share - self.limits.of(scope), total - self.allowed_bytes, items - self.limits.max_items

    def _first(self, order: list[ItemT], n_bytes: int, n_items: int) -> tuple[ItemT, ...]:
        """Return as many of the first items as make up ``n_bytes`` and ``n_items``, or all when these do not."""
        chosen: list[ItemT] = []
        for item in order:
            if n_bytes <= 0 and len(chosen) >= n_items:
                break
            chosen.append(item)
            n_bytes -= self._items[item][1]
        return tuple(chosen)

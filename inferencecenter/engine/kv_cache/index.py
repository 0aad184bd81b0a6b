"""Index of parked sequences: budgets of tiers and scopes, what each tier holds, lookup by prefix, choice of victims."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Generic, TypeVar

from inferencecenter.engine.kv_cache.ram import whole_pages
from inferencecenter.engine.kv_cache.record import TOKEN_BYTES, Record
from inferencecenter.engine.scheduler.placement import Match, common_prefix_tokens, is_prefix_key
from inferencecenter.ipc.messages import pack_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterator, Sequence


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

    New items may use ``allowed_bytes`` of the budget; existing items may exceed it. ``total_bytes`` is the size of all
    items.
    """

    def __init__(self, limits: TierLimits) -> None:
        self.limits = limits
        self.allowed_bytes = limits.budget_bytes
        self._items: dict[ItemT, tuple[str, int]] = {}
        self._scopes: Counter[str] = Counter()
        self.total_bytes = 0

    def __contains__(self, item: ItemT) -> bool:
        return item in self._items

    def __iter__(self) -> Iterator[ItemT]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def bytes_of(self, item: ItemT) -> int:
        """Return an item's size; 0 when it is absent."""
        return self._items.get(item, (PUBLIC, 0))[1]

    def put(self, item: ItemT, scope: str, n_bytes: int) -> None:
        """Add or replace an item as the most recently used."""
        self.drop(item)
        self._items[item] = (scope, n_bytes)
        self._scopes[scope] += n_bytes
        self.total_bytes += n_bytes

    def drop(self, item: ItemT) -> None:
        """Remove an item, if present."""
        scope, n_bytes = self._items.pop(item, (PUBLIC, 0))
        self._scopes[scope] -= n_bytes
        self.total_bytes -= n_bytes
        if not self._scopes[scope]:
            del self._scopes[scope]

    def touch(self, item: ItemT) -> None:
        """Mark an item as most recently used, if present."""
        if item in self._items:
            self._items[item] = self._items.pop(item)

    def free_bytes(self, scope: str, *, without: ItemT | None = None) -> int:
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
        assert scopes.total() == self.total_bytes <= self.limits.budget_bytes, "a tier's bytes are wrong"
        assert len(self._items) <= self.limits.max_items, "a tier holds too many items"
        assert all(n_bytes <= self.limits.of(scope) for scope, n_bytes in scopes.items()), "a scope exceeds its share"

    def _excess(self, scope: str, n_bytes: int, without: ItemT | None) -> tuple[int, int, int]:
        """Return the excess of a new item over its scope's share, the allowed bytes and the maximum item count."""
        gone_scope, gone_bytes = (None, 0) if without is None else self._items.get(without, (None, 0))
        total = self.total_bytes - gone_bytes + n_bytes
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


class TierState(Enum):
    """State of an entry in a tier."""

    ABSENT = "absent"
    LOADING = "arriving"
    RESIDENT = "there"


@dataclass(slots=True, eq=False)
class KvEntry:
    """One parked sequence; a later one of the same key is a different entry.

    ``tokens`` are packed; ``file_bytes`` is header and payload. ``verified``: the copy in RAM passed its checksum.
    ``durable``: it may be copied to disk; ``refused``: that was tried and failed. ``redundant``: a slot holds it too.
    ``load_failed``: the last load from disk found no room in RAM.
    """

    key: str
    scope: str
    tokens: bytes
    durable: bool
    stamp: int
    payload_start: int
    payload_bytes: int
    verified: bool = True
    refused: bool = False
    redundant: bool = False
    load_failed: bool = False
    ram: TierState = TierState.ABSENT
    disk: TierState = TierState.ABSENT
    used: int = 0

    @property
    def n_tokens(self) -> int:
        """Length of the sequence."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def file_bytes(self) -> int:
        """Size of a copy on disk."""
        return self.payload_start + self.payload_bytes

    @property
    def header(self) -> Record:
        """The header of its file, with a payload checksum of 0."""
        return Record(
            key=self.key,
            scope=self.scope,
            tokens=self.tokens,
            durable=self.durable,
            stamp=self.stamp,
            payload_bytes=self.payload_bytes,
            payload_crc=0,
        )


class KvIndex:
    """Entries by key and scope, with their use of each tier's budget.

    A removed entry stays in a budget while a worker still fills its memory.

    Args:
        ram: Limits of the RAM tier.
        disk: Limits of the disk tier.
        can_truncate: Whether a part of a sequence is usable; otherwise only whole ones are found.
    """

    def __init__(self, *, ram: TierLimits, disk: TierLimits, can_truncate: bool) -> None:
        self.ram: LruBudget[KvEntry] = LruBudget(ram)
        self.disk: LruBudget[KvEntry] = LruBudget(disk)
        self._can_truncate = can_truncate
        self.sessions = 0
        """Number of entries that are no shared prefixes."""
        self._entries: dict[str, KvEntry] = {}
        self._scopes: dict[str, dict[str, KvEntry]] = {}
        self._uses = 0

    def __iter__(self) -> Iterator[KvEntry]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: str) -> KvEntry | None:
        return self._entries.get(key)

    def add(self, entry: KvEntry) -> None:
        """Add an entry with a new key as the most recently used."""
        assert entry.key not in self._entries, f"{entry.key} is taken"
        self._entries[entry.key] = entry
        self.sessions += not is_prefix_key(entry.key)
        self._scopes.setdefault(entry.scope, {})[entry.key] = entry
        self.touch(entry)

    def remove(self, entry: KvEntry) -> None:
        """Remove an entry; the budgets are unchanged."""
        del self._entries[entry.key]
        self.sessions -= not is_prefix_key(entry.key)
        siblings = self._scopes[entry.scope]
        del siblings[entry.key]
        if not siblings:
            del self._scopes[entry.scope]

    def touch(self, entry: KvEntry) -> None:
        """Mark an entry as most recently used in both tiers."""
        self._uses += 1
        entry.used = self._uses
        self.ram.touch(entry)
        self.disk.touch(entry)

    def find(self, scope: str, tokens: Sequence[int]) -> Match | None:
        """Return the entry of ``scope`` or the public scope that shares most tokens; ``None`` if none shares any.

        Ties are broken in this order: in RAM, shortest, no redundant copy, parked last. Entries on disk that must not
        be loaded now are skipped.
        """
        candidates = [*self._scopes.get(scope, {}).values()]
        if scope != PUBLIC:
            candidates += self._scopes.get(PUBLIC, {}).values()
        if not candidates:
            return None
        wanted = pack_tokens(tokens[: max(entry.n_tokens for entry in candidates)])
        best: tuple[tuple[int, bool, int, bool, int], KvEntry] | None = None
        shared = b""
        for entry in candidates:
            if not entry.tokens.startswith(shared):  # shares less than the best so far, found by one comparison
                continue
            if self._exceeds_allowed(entry):
                continue
            common = common_prefix_tokens(entry.tokens, wanted) // TOKEN_BYTES
            if common == 0 or (common < entry.n_tokens and not self._can_truncate):
                continue
            merit = (common, entry.ram is TierState.RESIDENT, -entry.n_tokens, not entry.redundant, entry.stamp)
            if best is None or merit > best[0]:
                best = (merit, entry)
                shared = wanted[: common * TOKEN_BYTES]
        if best is None:
            return None
        (common, ready, *_), entry = best
        return Match(
            entry.key,
            common_tokens=common,
            n_tokens=entry.n_tokens,
            ready=ready,
            tokens=entry.tokens,
            redundant=entry.redundant,
            load_failed=entry.load_failed,
        )

    def room_in_ram(
        self, scope: str, n_bytes: int, *, without: KvEntry | None, keep: Collection[str]
    ) -> tuple[KvEntry, ...] | None:
        """Return the entries to evict from RAM for one of ``scope`` and ``n_bytes``; ``None`` without room.

        ``without`` leaves anyway. Entries with a key in ``keep`` stay. Redundant entries are evicted first, those that
        could still be copied to disk last.
        """

        def rank(entry: KvEntry) -> int | None:
            if entry.key in keep or entry.ram is TierState.LOADING or entry.disk is TierState.LOADING:
                return None
            return 0 if entry.redundant else 2 if self._awaits_copy(entry) else 1

        return self.ram.room(scope, n_bytes, without=without, rank=rank)

    def is_free_in_ram(self, scope: str, n_bytes: int, *, without: KvEntry | None) -> bool:
        """Return whether RAM is not limited and has room without evictions once ``without`` is removed."""
        ram = self.ram
        if ram.allowed_bytes < ram.limits.budget_bytes:
            return False
        return ram.room(scope, n_bytes, without=without, rank=lambda _: None) == ()

    def room_on_disk(self, entry: KvEntry) -> tuple[KvEntry, ...] | None:
        """Return the entries to evict from disk for a copy of ``entry``: only less recently used ones."""

        def rank(other: KvEntry) -> int | None:
            settled = other.disk is TierState.RESIDENT and other.ram is not TierState.LOADING
            return 0 if settled and other.used < entry.used else None

        return self.disk.room(entry.scope, entry.file_bytes, without=None, rank=rank)

    def excess_in_ram(self) -> list[KvEntry]:
        """Return the entries to evict so that RAM stays within ``allowed_bytes``; entries being loaded stay.

        Redundant entries and those on disk are evicted first, since nothing is lost, least recently used first; entries
        being written are evicted last.
        """
        order = {TierState.RESIDENT: 0, TierState.ABSENT: 1, TierState.LOADING: 2}

        def rank(entry: KvEntry) -> int:
            return 0 if entry.redundant and entry.disk is TierState.ABSENT else order[entry.disk]

        excess = self.ram.total_bytes - self.ram.allowed_bytes
        chosen: list[KvEntry] = []
        for entry in sorted(self.ram, key=rank):
            if excess <= 0:
                break
            if entry.ram is TierState.RESIDENT:
                chosen.append(entry)
                excess -= self.ram.bytes_of(entry)
        return chosen

    def to_copy(self, wanted_bytes: int) -> list[KvEntry]:
        """Return the entries to copy to disk now, so that ``wanted_bytes`` of RAM can be freed without loss.

        Redundant entries are not copied: evicting them loses nothing.
        """
        chosen: list[KvEntry] = []
        free_bytes = self.ram.allowed_bytes - self.ram.total_bytes
        for entry in self.ram:
            if free_bytes >= wanted_bytes:
                break
            free_bytes += self.ram.bytes_of(entry)
            if self._awaits_copy(entry) and entry.ram is TierState.RESIDENT and not entry.redundant:
                chosen.append(entry)
        return chosen

    def unsaved(self) -> list[KvEntry]:
        """Return the entries that may be copied to disk and were not, most recently used first."""
        entries = [entry for entry in self.ram if self._awaits_copy(entry) and entry.ram is TierState.RESIDENT]
        return sorted(entries, key=lambda entry: entry.used, reverse=True)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when the index contradicts itself."""
        self.ram.check_integrity()
        self.disk.check_integrity()
        assert sum(map(len, self._scopes.values())) == len(self._entries), "an entry is lost"
        assert self.sessions == sum(not is_prefix_key(key) for key in self._entries), "sessions are miscounted"
        for key, entry in self._entries.items():
            assert entry.key == key, f"{key} is entered under another key"
            assert self._scopes[entry.scope][key] is entry, f"{key} is entered under another scope"
            assert TierState.RESIDENT in {entry.ram, entry.disk}, f"{key} is nowhere"
            assert (entry in self.ram) == (entry.ram is not TierState.ABSENT), f"{key} is miscounted in RAM"
            assert (entry in self.disk) == (entry.disk is not TierState.ABSENT), f"{key} is miscounted on disk"

    def _exceeds_allowed(self, entry: KvEntry) -> bool:
        """Return whether an entry on disk fits the RAM budget but not the bytes allowed now."""
        fits_budget_only = self.ram.allowed_bytes < whole_pages(entry.file_bytes) <= self.ram.limits.budget_bytes
        return fits_budget_only and entry.ram is TierState.ABSENT

    def _awaits_copy(self, entry: KvEntry) -> bool:
        may_be_copied = entry.durable and not entry.refused and entry.file_bytes <= self.disk.limits.of(entry.scope)
        return may_be_copied and entry.disk is TierState.ABSENT

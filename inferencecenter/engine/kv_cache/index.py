"""Index of parked sequences: which tiers hold them, lookup by prefix, choice of victims. Does no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from inferencecenter.engine.kv_cache.budget import PUBLIC, LruBudget
from inferencecenter.engine.kv_cache.ram import whole_pages
from inferencecenter.engine.kv_cache.record import TOKEN_BYTES, Record
from inferencecenter.engine.scheduler.prefix_sharing import Match, common_prefix_tokens
from inferencecenter.ipc.messages import pack_tokens

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from inferencecenter.engine.kv_cache.budget import TierLimits


class TierState(Enum):
    """State of an entry in a tier."""

    ABSENT = "absent"
    LOADING = "arriving"
    RESIDENT = "there"


@dataclass(slots=True, eq=False)
class KvEntry:
    """One parked sequence; a later one of the same key is a different entry.

    ``tokens`` are packed; ``file_bytes`` is header and payload. ``verified``: the copy in RAM passed its checksum.
    ``durable``: it may be copied to disk; ``refused``: that was tried and failed. ``spare``: a slot holds it too.
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
    spare: bool = False
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
        self._entries: dict[str, KvEntry] = {}
        self._scopes: dict[str, dict[str, KvEntry]] = {}
        self._uses = 0

    def __iter__(self) -> Iterator[KvEntry]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: str) -> KvEntry | None:
        """Return the entry of ``key``."""
        return self._entries.get(key)

    def add(self, entry: KvEntry) -> None:
        """Add an entry with a new key as the most recently used."""
        assert entry.key not in self._entries, f"{entry.key} is taken"
        self._entries[entry.key] = entry
        self._scopes.setdefault(entry.scope, {})[entry.key] = entry
        self.touch(entry)

    def remove(self, entry: KvEntry) -> None:
        """Remove an entry; the budgets are unchanged."""
        del self._entries[entry.key]
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

        Ties are broken in this order: in RAM, shortest, no spare copy, parked last. Entries on disk that must not be
        loaded now are skipped.
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
            merit = (common, entry.ram is TierState.RESIDENT, -entry.n_tokens, not entry.spare, entry.stamp)
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
            spare=entry.spare,
            load_failed=entry.load_failed,
        )

    def room_in_ram(
        self, scope: str, n_bytes: int, *, without: KvEntry | None, keep: Collection[str]
    ) -> tuple[KvEntry, ...] | None:
        """Return the entries to evict from RAM for one of ``scope`` and ``n_bytes``; ``None`` without room.

        ``without`` leaves anyway. Entries with a key in ``keep`` stay. Spare entries are evicted first, those that
        could still be copied to disk last.
        """

        def rank(entry: KvEntry) -> int | None:
            if entry.key in keep or entry.ram is TierState.LOADING or entry.disk is TierState.LOADING:
                return None
            return 0 if entry.spare else 2 if self._awaits_copy(entry) else 1

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

        Spare entries and those on disk are evicted first, since nothing is lost, least recently used first; entries
        being written are evicted last.
        """
        order = {TierState.RESIDENT: 0, TierState.ABSENT: 1, TierState.LOADING: 2}

        def rank(entry: KvEntry) -> int:
            return 0 if entry.spare and entry.disk is TierState.ABSENT else order[entry.disk]

        excess = self.ram.total_bytes - self.ram.allowed_bytes
        chosen: list[KvEntry] = []
        for entry in sorted(self.ram, key=rank):
            if excess <= 0:
                break
            if entry.ram is TierState.RESIDENT:
                chosen.append(entry)
                excess -= self.ram.bytes_of(entry)
        return chosen

    def to_copy(self, spare_bytes: int) -> list[KvEntry]:
        """Return the entries to copy to disk now, so that ``spare_bytes`` of RAM can be freed without loss.

        Spare entries are not copied: evicting them loses nothing.
        """
        chosen: list[KvEntry] = []
        spare = self.ram.allowed_bytes - self.ram.total_bytes
        for entry in self.ram:
            if spare >= spare_bytes:
                break
            spare += self.ram.bytes_of(entry)
            if self._awaits_copy(entry) and entry.ram is TierState.RESIDENT and not entry.spare:
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

"""Which sequences are parked, in which tier, how they are found and which are evicted. Does no I/O."""

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
    """Whether an entry is in a tier."""

    ABSENT = "absent"
    LOADING = "arriving"
    RESIDENT = "there"


@dataclass(slots=True, eq=False)
class KvEntry:
    """One parked sequence; a later one of the same key is another entry.

    ``tokens`` are packed; ``file_bytes`` is header and payload. ``verified``: the copy in RAM is known to be what was
    saved. ``durable``: it may be copied to disk; ``refused``: that was tried and failed. ``spare``: a slot has it too.
    ``load_failed``: when it was to come from disk the last time, there was no room in RAM.
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
        """How long the sequence is."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def file_bytes(self) -> int:
        """What a copy on disk takes."""
        return self.payload_start + self.payload_bytes

    @property
    def header(self) -> Record:
        """What is written before its payload, but for the payload's checksum."""
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
    """The entries by key and scope, with what they take of each tier's budget.

    Entries may stay in a budget after they were removed: while a worker still fills their place.

    Args:
        ram: Limits of the RAM tier.
        disk: Limits of the disk tier.
        can_truncate: Whether a part of a sequence is of use; otherwise only whole ones are found.
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
        """Enter an entry whose key is free, as the one used last."""
        assert entry.key not in self._entries, f"{entry.key} is taken"
        self._entries[entry.key] = entry
        self._scopes.setdefault(entry.scope, {})[entry.key] = entry
        self.touch(entry)

    def remove(self, entry: KvEntry) -> None:
        """Take an entry out; the budgets are left alone."""
        del self._entries[entry.key]
        siblings = self._scopes[entry.scope]
        del siblings[entry.key]
        if not siblings:
            del self._scopes[entry.scope]

    def touch(self, entry: KvEntry) -> None:
        """Make an entry the one used last, in both tiers."""
        self._uses += 1
        entry.used = self._uses
        self.ram.touch(entry)
        self.disk.touch(entry)

    def find(self, scope: str, tokens: Sequence[int]) -> Match | None:
        """Return the entry of ``scope`` or of the public one that shares most tokens, or ``None`` if none shares any.

        Of equal ones the first is that in RAM, then the shortest, then one that is no spare copy, then the one parked
        last. One on disk is passed over while it may not be fetched.
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
            if not entry.tokens.startswith(shared):  # shares less than the best so far, seen by one comparison
                continue
            if self._shut_out(entry):
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
        """Return the entries that leave RAM for one of ``scope`` and ``n_bytes``; ``None`` when it finds no room.

        ``without`` leaves anyway. Those with a key in ``keep`` stay. Spare ones go first, those that could still be
        copied to disk last.
        """

        def rank(entry: KvEntry) -> int | None:
            if entry.key in keep or entry.ram is TierState.LOADING or entry.disk is TierState.LOADING:
                return None
            return 0 if entry.spare else 2 if self._awaits_copy(entry) else 1

        return self.ram.room(scope, n_bytes, without=without, rank=rank)

    def is_free_in_ram(self, scope: str, n_bytes: int, *, without: KvEntry | None) -> bool:
        """Tell whether RAM may be used wholly, and has room once ``without`` is gone for one of these bytes."""
        ram = self.ram
        if ram.allowed_bytes < ram.limits.budget_bytes:
            return False
        return ram.room(scope, n_bytes, without=without, rank=lambda _: None) == ()

    def room_on_disk(self, entry: KvEntry) -> tuple[KvEntry, ...] | None:
        """Return the entries that leave the disk for a copy of ``entry``; only those used before it do."""

        def rank(other: KvEntry) -> int | None:
            settled = other.disk is TierState.RESIDENT and other.ram is not TierState.LOADING
            return 0 if settled and other.used < entry.used else None

        return self.disk.room(entry.scope, entry.file_bytes, without=None, rank=rank)

    def excess_in_ram(self) -> list[KvEntry]:
        """Return the entries to leave RAM so that it holds no more than is allowed; those that arrive cannot.

        What is spare or on disk goes first, as nothing is lost with it, and of these what was used longest ago; what is
        on its way there goes last.
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
        """Return the entries to be copied to disk now, so that ``spare_bytes`` of RAM can be had at no loss.

        Spare ones are not: nothing is lost with them.
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
        """Return the entries that may be copied to disk and were not, the one used last first."""
        entries = [entry for entry in self.ram if self._awaits_copy(entry) and entry.ram is TierState.RESIDENT]
        return sorted(entries, key=lambda entry: entry.used, reverse=True)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when the books contradict each other."""
        self.ram.check_integrity()
        self.disk.check_integrity()
        assert sum(map(len, self._scopes.values())) == len(self._entries), "an entry is lost"
        for key, entry in self._entries.items():
            assert entry.key == key, f"{key} is entered under another key"
            assert self._scopes[entry.scope][key] is entry, f"{key} is entered under another scope"
            assert TierState.RESIDENT in {entry.ram, entry.disk}, f"{key} is nowhere"
            assert (entry in self.ram) == (entry.ram is not TierState.ABSENT), f"{key} is miscounted in RAM"
            assert (entry in self.disk) == (entry.disk is not TierState.ABSENT), f"{key} is miscounted on disk"

    def _shut_out(self, entry: KvEntry) -> bool:
        """Tell whether an entry on disk fits RAM, but not what is allowed of it now."""
        is_fitting = self.ram.allowed_bytes < whole_pages(entry.file_bytes) <= self.ram.limits.budget_bytes
        return is_fitting and entry.ram is TierState.ABSENT

    def _awaits_copy(self, entry: KvEntry) -> bool:
        may_be_copied = entry.durable and not entry.refused and entry.file_bytes <= self.disk.limits.of(entry.scope)
        return may_be_copied and entry.disk is TierState.ABSENT

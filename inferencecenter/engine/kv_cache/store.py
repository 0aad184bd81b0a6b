"""The store of parked KV: sequences in RAM, copied to disk ahead of their eviction.

Mechanism: a sequence is written into a mapped file of the RAM tier (tmpfs), and its checksum and header are added by
the worker. The least recently used half of RAM is copied to the disk tier ahead of need, so that eviction from RAM only
drops memory and the engine's thread never waits for a disk; a sequence on disk alone is loaded into RAM by a job before
it can be restored into a slot. Both tiers use one file format, keyed by model fingerprint, so a later engine recovers
what an earlier one left. Invariant: an entry of the index is resident in at least one tier, its tokens are exactly what
its payload holds, and every budget counts memory until the worker has finished with it; a payload is restored only
after its checksum was verified or in the process that wrote it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from inferencecenter.engine.kv_cache import directory, record
from inferencecenter.engine.kv_cache.disk import DiskTier
from inferencecenter.engine.kv_cache.index import PUBLIC, KvEntry, KvIndex, TierLimits, TierState
from inferencecenter.engine.kv_cache.ram import RamTier, whole_pages
from inferencecenter.engine.kv_cache.recovery import RecoveryMode, clear, recover
from inferencecenter.engine.kv_cache.tiers import TieredCache
from inferencecenter.engine.scheduler.placement import is_prefix_key
from inferencecenter.ipc.messages import pack_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from concurrent.futures import Executor
    from pathlib import Path

    from inferencecenter.engine.kv_cache.tiers import KvUsage
    from inferencecenter.engine.scheduler.placement import Match

# A mapping holds a file descriptor, and a process has 1,024 by default.
_MAX_IN_RAM = 512
_MAX_ON_DISK = 4096
# Without a RAM tier, RAM is only a buffer: this many sequences may wait to be written, or to be used after a read.
_PASSING = TierLimits(512 * 1024 * 1024, max_items=4)
# A key or scope of typical length, to estimate headers.
_ANY = "x" * 64


@dataclass(frozen=True, slots=True)
class TierOptions:
    """A tier's directory and the total size of its files; a budget of 0 disables the tier."""

    path: Path
    budget_bytes: int


class KvStore:
    """Parks, finds and restores sequences. All methods are called from the engine's thread.

    Files are read, written, verified and deleted by ``worker``; a call touches only memory. An invalid file is dropped
    with a log line, as is a sequence for which there is no room: its tokens are prefilled again.

    Args:
        fingerprint: What saved sequences are compatible with (``Backend.fingerprint``).
        bytes_per_token: Approximate bytes per token of a saved sequence.
        ram: The tier of mapped files, on tmpfs. Without it sequences pass through at most four buffers.
        disk: The tier for sequences evicted from RAM.
        client_share: The fraction of a tier's budget that one non-public scope may use.
        adopt: Which sequences of an earlier engine are recovered; the others are deleted.
        can_truncate: Whether a part of a sequence is usable (``Backend.can_truncate``).
        worker: Executor with one thread of its own.
        on_fetched: Called on the worker when a ``fetch`` has finished or failed.
        on_log: Called with a level and a line.
    """

    def __init__(  # noqa: PLR0913 - the composition root's call, all by name
        self,
        *,
        fingerprint: str,
        bytes_per_token: int,
        ram: TierOptions | None,
        disk: TierOptions | None,
        client_share: float = 0.5,
        adopt: RecoveryMode = RecoveryMode.NONE,
        can_truncate: bool = True,
        worker: Executor,
        on_fetched: Callable[[], None],
        on_log: Callable[[str, str], None],
    ) -> None:
        self._bytes_per_token = bytes_per_token
        self._on_fetched = on_fetched
        self._on_log = on_log
        self._stamp = 0
        ram, disk = self._usable(ram, "RAM"), self._usable(disk, "disk")
        self._passes_through = ram is None
        digest = record.digest(fingerprint)
        ram_tier = RamTier(None if ram is None else ram.path, digest)
        disk_tier = None if disk is None else DiskTier(disk.path, digest)
        index = KvIndex(
            ram=_ram_limits(ram, disk, client_share),
            disk=TierLimits(0) if disk is None else TierLimits(disk.budget_bytes, client_share, _MAX_ON_DISK),
            can_truncate=can_truncate,
        )
        self._tiers = TieredCache(
            index=index,
            ram=ram_tier,
            disk=disk_tier,
            passes_through=self._passes_through,
            fingerprint=digest,
            worker=worker,
            on_log=on_log,
        )
        self._take_over(None if ram is None else ram_tier, disk_tier, adopt=adopt)

    @property
    def usage(self) -> KvUsage:
        """What is parked now, warm memory included."""
        return self._tiers.usage

    @property
    def sessions_on_disk(self) -> int:
        """Number of sessions with a copy on disk."""
        entries = (entry for entry in self._tiers.index if not is_prefix_key(entry.key))
        return sum(entry.disk is TierState.RESIDENT for entry in entries)

    def find(self, scope: str, tokens: Sequence[int]) -> Match | None:
        """Return the best match among the entries of ``scope`` and the public scope; ``None`` if nothing is shared."""
        self._tiers.settle()
        return self._tiers.index.find(scope, tokens)

    def fits(self, n_tokens: int) -> bool:
        """Return whether a client's sequence of ``n_tokens`` could be parked within the RAM allowed now."""
        index = self._tiers.index
        need = record.header_bytes(_ANY, _ANY, n_tokens) + n_tokens * self._bytes_per_token
        if self._passes_through and need > index.disk.limits.of(_ANY):
            return False
        return whole_pages(need) <= min(index.ram.limits.of(_ANY), index.ram.allowed_bytes)

    def has_room(self, key: str, scope: str, n_tokens: int) -> bool:
        """Return whether a redundant copy of ``n_tokens`` may be parked now, replacing the entry of ``key``.

        Not without a RAM tier: sequences would go straight to the disk, and a copy after each turn would wear it out.
        Not while RAM is limited either.
        """
        self._tiers.settle()
        need = whole_pages(record.header_bytes(key, scope, n_tokens) + n_tokens * self._bytes_per_token)
        return not self._passes_through and self._is_free(self._tiers.index.get(key), scope, need)

    def park(  # noqa: PLR0913 - a sequence and its owner, all by name
        self,
        key: str,
        *,
        scope: str,
        tokens: Sequence[int],
        size_bytes: int,
        write: Callable[[memoryview], int],
        durable: bool,
        keep: Collection[str] = (),
        redundant: bool = False,
    ) -> bool:
        """Save a sequence of ``size_bytes`` with ``write``, replacing the entry of ``key``.

        ``write`` returns the bytes it wrote, 0 on failure. It is not called when the same tokens are parked already.
        Entries with a key in ``keep``, about to be loaded, are not evicted; a ``redundant`` entry evicts none and is
        evicted first until it is parked again as not redundant. ``False``: it was not parked; an earlier entry's copy
        on disk may remain.
        """
        self._tiers.settle()
        packed = pack_tokens(tokens)
        entry = self._tiers.index.get(key)
        same = entry is not None and (entry.scope, entry.tokens, entry.durable) == (scope, packed, durable)
        if entry is not None and same and entry.ram is TierState.RESIDENT:
            self._tiers.hold(entry, redundant=redundant)
            return True
        if not packed or size_bytes <= 0 or (self._passes_through and not durable):
            return False
        start = record.header_bytes(key, scope, len(tokens))
        need = whole_pages(start + size_bytes)
        if redundant and not self._is_free(entry, scope, need):
            return False
        mapping = self._tiers.claim(entry, scope, need, keep, grows=redundant)
        if mapping is None:
            return False
        mapping.begin()
        written = 0
        try:
            with mapping.view(start, size_bytes) as payload:
                written = write(payload)
        finally:
            if not 0 < written <= size_bytes:
                self._tiers.give_back(mapping)
        if not 0 < written <= size_bytes:
            return False
        self._stamp += 1
        # An entry that was not redundant keeps that status with its new content.
        redundant = redundant and (entry is None or entry.redundant)
        self._tiers.enter(
            KvEntry(key, scope, packed, durable, self._stamp, start, written, redundant=redundant), mapping
        )
        return True

    def load(self, key: str, tokens: bytes, read: Callable[[memoryview], bool]) -> bool:
        """Restore the sequence of ``key`` with ``read``, which must not keep the memory.

        ``False``: it is not in RAM, it no longer holds ``tokens`` (packed), or it was dropped because it was damaged or
        ``read`` failed.
        """
        self._tiers.settle()
        entry = self._tiers.index.get(key)
        if entry is None or entry.ram is not TierState.RESIDENT or entry.tokens != tokens:
            return False
        mapping = self._tiers.mapping_of(entry)
        if mapping is None:
            return False
        mapping.suspect(whether=True)  # stays set if the process crashes during the restore
        with mapping.view(entry.payload_start, entry.payload_bytes, readonly=True) as payload:
            restored = read(payload)
        mapping.suspect(whether=False)
        if not restored:
            self._tiers.drop(entry, "it could not be restored")
            return False
        self._tiers.index.touch(entry)
        return True

    def fetch(self, key: str, *, keep: Collection[str] = ()) -> None:
        """Load a sequence from disk to RAM; ``on_fetched`` is called in every case, also when there is nothing to do.

        A damaged sequence, or one that cannot fit RAM, is dropped. Entries with a key in ``keep`` stay in RAM. Without
        room now, ``on_fetched`` is called when there may be some, and ``find`` reports ``load_failed``.
        """
        self._tiers.settle()
        entry = self._tiers.index.get(key)
        if entry is not None and entry.ram is TierState.LOADING:
            return
        if entry is None or entry.ram is TierState.RESIDENT or not self._tiers.fetch(entry, keep, self._on_fetched):
            # In job order: jobs that occupy RAM now are done when this one is.
            self._tiers.notify(self._on_fetched, entry)

    def cancel_fetch(self, key: str) -> None:
        """Cancel the load of a sequence no turn waits for; one that has started completes.

        ``on_fetched`` is called, here or on the worker.
        """
        self._tiers.settle()
        entry = self._tiers.index.get(key)
        if entry is not None:
            self._tiers.cancel_fetch(entry)

    def forget(self, key: str) -> None:
        """Delete the entry of ``key`` from both tiers."""
        self._tiers.settle()
        entry = self._tiers.index.get(key)
        if entry is not None:
            self._tiers.remove(entry)

    def forget_session(self, session_id: str) -> None:
        """Delete a session's entry; prefixes shared with other sessions stay."""
        self.forget(session_id)

    def keep(self, session_ids: Collection[str]) -> None:
        """Delete the entries of all sessions except these.

        Public prefixes stay, and those of clients with a remaining session; a client without sessions leaves nothing
        behind.
        """
        self._tiers.settle()
        wanted = frozenset(session_ids)
        scopes = {PUBLIC, *(entry.scope for entry in self._tiers.index if entry.key in wanted)}
        for entry in tuple(self._tiers.index):
            stays = entry.scope in scopes if is_prefix_key(entry.key) else entry.key in wanted
            if not stays:
                self._tiers.remove(entry)

    def limit_ram(self, allowed_bytes: int | None) -> None:
        """Limit parked sequences to ``allowed_bytes`` of memory, ``None`` for the tier's budget.

        The excess is freed before this returns, except memory the worker is reading or writing. Sequences that are also
        on disk are evicted first, then the least recently used.
        """
        self._tiers.settle()
        self._tiers.limit_ram(allowed_bytes)

    def save(self, progressed: Callable[[], None]) -> None:
        """Copy all unsaved durable sequences to disk, most recently used first, as far as there is room, and wait.

        ``progressed`` is called after each file.
        """
        self._tiers.settle()
        self._tiers.save(progressed)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when index, budgets and mappings contradict each other."""
        self._tiers.settle()
        self._tiers.check_integrity()

    def close(self) -> None:
        """Finish pending writes and release all memory; to be called before the worker is shut down.

        Files stay for the next engine. Copies to disk that have not started are skipped where the RAM tier has the
        sequence.
        """
        self._tiers.close()

    def _is_free(self, entry: KvEntry | None, scope: str, n_bytes: int) -> bool:
        own = entry if entry is not None and entry.ram is TierState.RESIDENT else None
        return self._tiers.index.is_free_in_ram(scope, n_bytes, without=own)

    def _take_over(self, ram: RamTier | None, disk: DiskTier | None, *, adopt: RecoveryMode) -> None:
        tiers = [tier for tier in (ram, disk) if tier is not None]
        if adopt is RecoveryMode.NONE:
            clear(tiers, self._on_log)
            return
        try:
            recovered = recover(ram, disk, self._on_log, durable_only=adopt is RecoveryMode.DURABLE)
        except Exception as error:  # noqa: BLE001 - a border: a file that no engine can read would end all of them
            self._on_log("error", f"parked KV of an earlier engine is deleted: {error!r}")
            clear(tiers, self._on_log)
            return
        if recovered:
            self._stamp = recovered[-1].entry.stamp
            self._tiers.adopt(recovered)

    def _usable(self, options: TierOptions | None, tier: str) -> TierOptions | None:
        """Return the options of a tier, or ``None`` if its directory is unusable."""
        if options is None or options.budget_bytes <= 0:
            return None
        try:
            directory.prepare(options.path)
        except OSError as error:
            self._on_log("warning", f"KV is parked without a {tier} tier: {error}")
            return None
        return options


def _ram_limits(ram: TierOptions | None, disk: TierOptions | None, client_share: float) -> TierLimits:
    if ram is not None:
        return TierLimits(ram.budget_bytes, client_share, _MAX_IN_RAM)
    return TierLimits(0) if disk is None else _PASSING

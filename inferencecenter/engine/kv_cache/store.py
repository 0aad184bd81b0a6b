"""The store of parked KV: sequences in RAM, copied to disk before they have to leave it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from inferencecenter.engine.kv_cache import directory, record
from inferencecenter.engine.kv_cache.budget import PUBLIC, TierLimits
from inferencecenter.engine.kv_cache.disk import DiskTier
from inferencecenter.engine.kv_cache.index import KvEntry, KvIndex, TierState
from inferencecenter.engine.kv_cache.ram import RamTier, whole_pages
from inferencecenter.engine.kv_cache.recovery import RecoveryMode, clear, recover
from inferencecenter.engine.kv_cache.tiers import TieredCache
from inferencecenter.engine.scheduler.prefix_sharing import is_prefix_key
from inferencecenter.ipc.messages import pack_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from concurrent.futures import Executor
    from pathlib import Path

    from inferencecenter.engine.scheduler.prefix_sharing import Match

# A mapping holds a descriptor, and a process has 1,024 by default.
_MAX_IN_RAM = 512
_MAX_ON_DISK = 4096
# Where RAM is only passed through: so many sequences may wait to be written, or to be used after they were read.
_PASSING = TierLimits(512 * 1024 * 1024, max_items=4)
# A key or scope of usual length, to estimate headers.
_ANY = "x" * 64


@dataclass(frozen=True, slots=True)
class TierOptions:
    """A tier's directory and how many bytes its files may have together; with 0 there is no such tier."""

    path: Path
    budget_bytes: int


class KvStore:
    """Parks sequences, finds and lends them again. All methods are for the engine's thread.

    Files are read, written, checked and deleted by ``worker``; only memory is touched in a call. A file that cannot be
    trusted is dropped with a line of the log, and so is a sequence for which there is no room: who wants it computes it
    again.

    Args:
        fingerprint: What saved sequences are compatible with (``Backend.fingerprint``).
        bytes_per_token: About what a token takes in a saved sequence.
        ram: The tier whose files are mapped, on tmpfs. Without it sequences pass through at most four buffers.
        disk: The tier for what leaves RAM.
        client_share: The part of a tier's budget that one scope other than the public one may hold.
        adopt: Which files of an earlier engine are taken over; the others are deleted.
        can_truncate: Whether a part of a sequence is of use (``Backend.can_truncate``).
        worker: Has one thread of its own.
        on_fetched: Called on the worker when a ``fetch`` has come to an end, good or bad.
        on_log: Takes a level and a line.
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
    def sessions(self) -> int:
        """How many sessions are parked, shared prefixes not counted."""
        return sum(not is_prefix_key(entry.key) for entry in self._tiers.index)

    @property
    def sessions_on_disk(self) -> int:
        """How many of them are on disk, wherever else they are."""
        entries = (entry for entry in self._tiers.index if not is_prefix_key(entry.key))
        return sum(entry.disk is TierState.RESIDENT for entry in entries)

    @property
    def total_bytes(self) -> int:
        """What the files of both tiers take together."""
        return self._tiers.total_bytes

    @property
    def ram_bytes(self) -> int:
        """What of them is in memory."""
        return self._tiers.ram_bytes

    def find(self, scope: str, tokens: Sequence[int]) -> Match | None:
        """Return the best match among the entries of ``scope`` and of the public one; ``None`` if nothing is shared."""
        self._tiers.settle()
        return self._tiers.index.find(scope, tokens)

    def fits(self, n_tokens: int) -> bool:
        """Tell whether a client's sequence of ``n_tokens`` could be parked at all, as far as RAM may be used now."""
        index = self._tiers.index
        need = record.header_bytes(_ANY, _ANY, n_tokens) + n_tokens * self._bytes_per_token
        if self._passes_through and need > index.disk.limits.of(_ANY):
            return False
        return whole_pages(need) <= min(index.ram.limits.of(_ANY), index.ram.allowed_bytes)

    def has_room(self, key: str, scope: str, n_tokens: int) -> bool:
        """Tell whether a spare copy of ``n_tokens`` may be parked now, in place of what was parked under ``key``.

        Not without a RAM tier: what passes through goes to the disk, and a copy after each turn would wear it out. And
        not while RAM may not be used wholly.
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
        spare: bool = False,
    ) -> bool:
        """Have ``write`` save a sequence of ``size_bytes``, in place of what was parked under ``key``.

        ``write`` returns the bytes that it wrote, 0 when it could not. It is not called when the same tokens are parked
        already. Entries with a key in ``keep``, about to be loaded, are not pushed out by this one; a ``spare`` one
        pushes none out, and is the first to go until it is parked again without that. ``False``: it was not parked; of
        an earlier one of the key what is on disk may be left.
        """
        self._tiers.settle()
        packed = pack_tokens(tokens)
        entry = self._tiers.index.get(key)
        same = entry is not None and (entry.scope, entry.tokens, entry.durable) == (scope, packed, durable)
        if entry is not None and same and entry.ram is TierState.RESIDENT:
            self._tiers.hold(entry, spare=spare)
            return True
        if not packed or size_bytes <= 0 or (self._passes_through and not durable):
            return False
        start = record.header_bytes(key, scope, len(tokens))
        need = whole_pages(start + size_bytes)
        if spare and not self._is_free(entry, scope, need):
            return False
        mapping = self._tiers.claim(entry, scope, need, keep, grows=spare)
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
        # A place that was not spare stays the session's with what it holds now.
        spare = spare and (entry is None or entry.spare)
        self._tiers.enter(KvEntry(key, scope, packed, durable, self._stamp, start, written, spare=spare), mapping)
        return True

    def load(self, key: str, tokens: bytes, read: Callable[[memoryview], bool]) -> bool:
        """Have ``read`` restore the sequence of ``key`` from memory that it must not keep.

        ``False``: it is not in RAM, it does not spell ``tokens`` (packed) any more, or it is dropped, because ``read``
        could not or because it was damaged.
        """
        self._tiers.settle()
        entry = self._tiers.index.get(key)
        if entry is None or entry.ram is not TierState.RESIDENT or entry.tokens != tokens:
            return False
        mapping = self._tiers.mapping_of(entry)
        if mapping is None:
            return False
        mapping.suspect(whether=True)  # and it stays so where this process ends in what follows
        with mapping.view(entry.payload_start, entry.payload_bytes, readonly=True) as payload:
            restored = read(payload)
        mapping.suspect(whether=False)
        if not restored:
            self._tiers.drop(entry, "it could not be restored")
            return False
        self._tiers.index.touch(entry)
        return True

    def fetch(self, key: str, *, keep: Collection[str] = ()) -> None:
        """Bring a sequence from disk to RAM; ``on_fetched`` is called however that ends, and if there is nothing to do.

        One that is damaged, or for which RAM is too small, is dropped. Entries with a key in ``keep`` stay in RAM.
        Where there is no room for now, that is told when there may be some, and what ``find`` returns is
        ``load_failed``.
        """
        self._tiers.settle()
        entry = self._tiers.index.get(key)
        if entry is not None and entry.ram is TierState.LOADING:
            return
        if entry is None or entry.ram is TierState.RESIDENT or not self._tiers.fetch(entry, keep, self._on_fetched):
            # In the order of the jobs: those that keep RAM occupied for now are done when this one is.
            self._tiers.notify(self._on_fetched, entry)

    def cancel_fetch(self, key: str) -> None:
        """Leave a sequence on disk that no turn waits for any more; one that is being read comes to RAM all the same.

        ``on_fetched`` is called, here or on the worker.
        """
        self._tiers.settle()
        entry = self._tiers.index.get(key)
        if entry is not None:
            self._tiers.cancel_fetch(entry)

    def forget(self, key: str) -> None:
        """Delete what is parked under ``key``, from both tiers."""
        self._tiers.settle()
        entry = self._tiers.index.get(key)
        if entry is not None:
            self._tiers.remove(entry)

    def forget_session(self, session_id: str) -> None:
        """Delete what is parked of a session; prefixes that it shares with others stay."""
        self.forget(session_id)

    def keep(self, session_ids: Collection[str]) -> None:
        """Delete what is parked of all sessions but these.

        Of the shared prefixes the public ones stay, and those of clients of which a session stays: a client that has
        nothing left here leaves nothing behind.
        """
        self._tiers.settle()
        wanted = frozenset(session_ids)
        scopes = {PUBLIC, *(entry.scope for entry in self._tiers.index if entry.key in wanted)}
        for entry in tuple(self._tiers.index):
            stays = entry.scope in scopes if is_prefix_key(entry.key) else entry.key in wanted
            if not stays:
                self._tiers.remove(entry)

    def limit_ram(self, allowed_bytes: int | None) -> None:
        """Have sequences take no more than ``allowed_bytes`` of memory from now on, ``None`` for the tier's budget.

        What is more is given up at once, and its memory is free when this returns, except what is being read or written
        on the worker. Sequences that are on disk as well go first, then those that were used longest ago.
        """
        self._tiers.settle()
        self._tiers.limit_ram(allowed_bytes)

    def save(self, progressed: Callable[[], None]) -> None:
        """Copy to disk what may be there and is not, what was used last first, as far as there is room; wait for that.

        ``progressed`` is called after each file.
        """
        self._tiers.settle()
        self._tiers.save(progressed)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when the books contradict each other."""
        self._tiers.settle()
        self._tiers.check_integrity()

    def close(self) -> None:
        """Finish what is being written and let everything go; to be called before the worker is shut down.

        Files stay for the next engine to take over. Copies to disk that have not begun are left out where the RAM tier
        has the sequence.
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
            found = recover(ram, disk, self._on_log, durable_only=adopt is RecoveryMode.DURABLE)
        except Exception as error:  # noqa: BLE001 - a border: a file that no engine can read would end all of them
            self._on_log("error", f"parked KV of an earlier engine is deleted: {error!r}")
            clear(tiers, self._on_log)
            return
        if found:
            self._stamp = found[-1].entry.stamp
            self._tiers.adopt(found)

    def _usable(self, options: TierOptions | None, tier: str) -> TierOptions | None:
        """Return the options of a tier that can be used."""
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

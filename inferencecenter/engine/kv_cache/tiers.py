"""Moves parked sequences between the RAM tier and the disk tier, as the index decides."""

from __future__ import annotations

from collections import deque
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from inferencecenter.engine.kv_cache.disk import ExpectedSequence, seal
from inferencecenter.engine.kv_cache.index import KvEntry, KvIndex, TierLimits, TierState
from inferencecenter.engine.kv_cache.ram import Mapping, is_sound, whole_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from concurrent.futures import Executor

    from inferencecenter.engine.kv_cache.disk import DiskTier
    from inferencecenter.engine.kv_cache.ram import RamTier
    from inferencecenter.engine.kv_cache.recovery import RecoveredSequence


ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class _Job:
    future: Future[Any]
    finished: Callable[[Any], None]
    optional: bool


class WorkerJobs:
    """Runs jobs on a worker in order and delivers their results in the same order, when polled.

    Args:
        worker: Executor with one thread: later jobs rely on earlier ones being done.
    """

    def __init__(self, worker: Executor) -> None:
        self._worker = worker
        self._jobs: deque[_Job] = deque()

    def submit(
        self,
        job: Callable[[], ResultT],
        finished: Callable[[ResultT | Exception], None],
        *,
        notify: Callable[[], None] | None = None,
        optional: bool = False,
    ) -> Future[ResultT]:
        """Queue a job and return its future, which ``withdraw`` accepts.

        ``notify`` is called on the worker as soon as the result is available. ``finish`` does not wait for an
        ``optional`` job.
        """
        try:
            future: Future[ResultT] = self._worker.submit(job)
        except RuntimeError:  # it was shut down
            future = Future()
            future.cancel()
        self._jobs.append(_Job(future, finished, optional))
        if notify is not None:
            future.add_done_callback(lambda _: notify())
        return future

    def withdraw(self, future: Future[Any]) -> bool:
        """Cancel a job that has not started, with ``CancelledError`` as its result; ``False`` when it has started."""
        if not future.cancel():
            return False
        for job in tuple(self._jobs):
            if job.future is future:
                self._jobs.remove(job)
                job.finished(CancelledError())
        return True

    def settle(self) -> None:
        """Deliver the results of finished jobs.

        An exception raised by a job is its result; ``CancelledError`` is that of a job that did not run.
        """
        while self._jobs and self._jobs[0].future.done():
            job = self._jobs.popleft()
            try:
                result = job.future.result()
            except Exception as error:  # noqa: BLE001 - a border: the submitter handles it
                result = error
            job.finished(result)

    def drain(self, progressed: Callable[[], None]) -> None:
        """Like ``finish``, but settle each job as soon as it is done, and call ``progressed`` after each."""
        self._cancel_optional()
        while self._jobs:
            wait([self._jobs[0].future])
            self.settle()
            progressed()

    def finish(self) -> None:
        """Wait for all jobs except optional ones that have not started, and settle."""
        self._cancel_optional()
        wait([job.future for job in self._jobs])
        self.settle()

    def _cancel_optional(self) -> None:
        for job in self._jobs:
            if job.optional:
                job.future.cancel()


# Fraction of the RAM tier whose least recently used entries are copied to disk ahead of eviction.
_COPIED_SHARE = 0.5


class KvUsage(NamedTuple):
    """Number of parked sessions, without shared prefixes, and the size of both tiers and of that in RAM."""

    sessions: int
    total_bytes: int
    ram_bytes: int


class TieredCache:
    """Moves entries between tiers. A call touches only memory; the worker does the I/O.

    Args:
        index: State of all entries; updated here.
        ram: Creates mappings.
        disk: Reads and writes files; ``None`` without a disk tier.
        passes_through: Whether RAM is only a buffer in front of the disk, to which everything is copied.
        fingerprint: Digest that sequences are saved under (see ``record.digest``).
        worker: Executor with one thread of its own.
        on_log: Called with a level and a line.
    """

    def __init__(  # noqa: PLR0913 - put together by the store alone, all by name
        self,
        *,
        index: KvIndex,
        ram: RamTier,
        disk: DiskTier | None,
        passes_through: bool,
        fingerprint: bytes,
        worker: Executor,
        on_log: Callable[[str, str], None],
    ) -> None:
        self.index = index
        self._ram = ram
        self._disk = disk
        self._passes_through = passes_through
        self._fingerprint = fingerprint
        self._jobs = WorkerJobs(worker)
        self._on_log = on_log
        self._mappings: dict[KvEntry, Mapping] = {}
        self._fetches: dict[KvEntry, Future[Mapping]] = {}
        self._warned: set[tuple[str, str]] = set()

    @property
    def usage(self) -> KvUsage:
        """What is parked now."""
        ram_bytes = self.index.ram.total_bytes + self._ram.warm_bytes
        return KvUsage(self.index.sessions, ram_bytes + self.index.disk.total_bytes, ram_bytes)

    def settle(self) -> None:
        """Apply the results of finished jobs."""
        self._jobs.settle()

    def mapping_of(self, entry: KvEntry) -> Mapping | None:
        """Return the memory of an entry in RAM; a damaged one is dropped."""
        mapping = self._mappings.get(entry)
        if mapping is None or entry.verified:
            return mapping
        entry.verified = is_sound(mapping, mapping.generation, self._fingerprint)
        if not entry.verified:
            self.drop(entry, "its checksum is wrong")
            return None
        return mapping

    def notify(self, callback: Callable[[], None], wanted: KvEntry | None) -> None:
        """Have the worker call back after all jobs queued so far, and record whether ``wanted`` is still not in RAM."""

        def check(_result: object) -> None:
            if wanted is not None:
                wanted.load_failed = wanted.ram is TierState.ABSENT

        self._jobs.submit(_nothing, check, notify=callback)

    def adopt(self, recovered: Iterable[RecoveredSequence]) -> None:
        """Add the sequences of an earlier engine, oldest first."""
        for each in recovered:
            entry = each.entry
            self.index.add(entry)
            if each.mapping is not None:
                self._adopt_ram(entry, each.mapping)
            if each.on_disk:
                self._adopt_disk(entry)
            if entry.ram is TierState.ABSENT and entry.disk is TierState.ABSENT:
                self.index.remove(entry)
            self._ram.trim(self._room_bytes)
        self._copy_ahead()

    def claim(
        self, entry: KvEntry | None, scope: str, need_bytes: int, keep: Collection[str], *, grows: bool
    ) -> Mapping | None:
        """Return memory for a sequence that replaces ``entry``, which has left RAM by then."""
        ram = self.index.ram
        own = entry if entry is not None and entry.ram is TierState.RESIDENT else None
        victims = self.index.room_in_ram(scope, need_bytes, without=own, keep=keep)
        if victims is None:
            return None
        for victim in victims:
            self._leave_ram(victim)
        if own is not None and own.disk is TierState.LOADING:  # its copy to disk is in progress and will be overwritten
            self.remove(own)
        elif own is not None:
            self._leave_ram(own)
        try:
            return self._ram.take(
                need_bytes,
                at_most_bytes=ram.free_bytes(scope),
                room_bytes=self._room_bytes,
                grows=grows,
            )
        except OSError as error:
            self._warn("RAM", error)
            return None

    def enter(self, entry: KvEntry, mapping: Mapping) -> None:
        """Add a sequence that was just written into ``mapping``, replacing an older one."""
        old = self.index.get(entry.key)
        if old is not None:
            self.remove(old)
        self.index.add(entry)
        self._settle_in(entry, mapping)
        header = entry.header
        self._jobs.submit(partial(seal, mapping, mapping.generation, header, self._fingerprint), self._finished)
        self._copy_ahead()

    def hold(self, entry: KvEntry, *, redundant: bool) -> None:
        """Record that an entry was parked again unchanged; it stops being redundant unless ``redundant``."""
        self.index.touch(entry)
        if entry.redundant and not redundant:
            entry.redundant = False
            self._copy_ahead()

    def limit_ram(self, allowed_bytes: int | None) -> None:
        """Limit RAM to ``allowed_bytes``, ``None`` for its budget, and free the excess at once.

        Runs on the caller's thread: the worker may be busy with a disk while memory runs out.
        """
        ram = self.index.ram
        budget = ram.limits.budget_bytes
        ram.allowed_bytes = budget if allowed_bytes is None else min(allowed_bytes, budget)
        for entry in self.index.excess_in_ram():
            self._take_from_ram(entry).discard()
            if entry.disk is not TierState.RESIDENT:
                self.remove(entry)
        self._ram.trim(self._room_bytes)

    def save(self, progressed: Callable[[], None]) -> None:
        """Copy all unsaved durable entries to disk, most recently used first, and wait."""
        # Copies that have not started are of the least recently used entries, and entries in transit cannot leave the
        # disk.
        self._jobs.drain(progressed)
        if self._disk is not None:
            for entry in self.index.unsaved():
                self._copy(self._disk, entry, optional=False)
        self._jobs.drain(progressed)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when index, budgets and mappings contradict each other."""
        self.index.check_integrity()
        ram = self.index.ram
        assert ram.total_bytes + self._ram.warm_bytes <= ram.limits.budget_bytes, "warm memory exceeds the budget"
        resident = {entry for entry in self.index if entry.ram is TierState.RESIDENT}
        assert self._mappings.keys() == resident, "a mapping is lost"
        assert all(mapping.capacity_bytes == ram.bytes_of(entry) for entry, mapping in self._mappings.items())

    def close(self) -> None:
        """Wait for the worker and release all memory; files stay."""
        self._jobs.finish()
        self._ram.trim(0)
        for mapping in self._mappings.values():
            mapping.release()
        self._mappings.clear()
        self.index = KvIndex(ram=TierLimits(0), disk=TierLimits(0), can_truncate=True)

    def _settle_in(self, entry: KvEntry, mapping: Mapping) -> None:
        entry.ram = TierState.RESIDENT
        self._mappings[entry] = mapping
        self.index.ram.put(entry, entry.scope, mapping.capacity_bytes)

    def fetch(self, entry: KvEntry, keep: Collection[str], on_fetched: Callable[[], None]) -> bool:
        """Start to load an entry that is on disk alone; ``False`` when there is no room, now or ever.

        ``on_fetched`` is called on the worker. A damaged or too large entry is dropped.
        """
        assert self._disk is not None
        entry.load_failed = False
        ram = self.index.ram
        need = whole_pages(entry.file_bytes)
        victims = self.index.room_in_ram(entry.scope, need, without=None, keep=keep)
        if victims is None:
            if need > ram.limits.of(entry.scope):
                self.drop(entry, "it does not fit into RAM")
            return False
        for victim in victims:
            self._leave_ram(victim)
        warm = self._ram.take_warm(need, at_most_bytes=ram.free_bytes(entry.scope), room_bytes=self._room_bytes)
        entry.ram = TierState.LOADING
        ram.put(entry, entry.scope, need if warm is None else warm.capacity_bytes)
        wanted = ExpectedSequence(entry.key, entry.scope, entry.tokens)
        self._fetches[entry] = self._jobs.submit(
            partial(self._disk.read, wanted, warm, self._ram.create),
            partial(self._fetched, entry, warm),
            notify=on_fetched,
            optional=True,
        )
        return True

    def cancel_fetch(self, entry: KvEntry) -> None:
        """Cancel the load of an entry that has not started and free the memory reserved for it."""
        if (future := self._fetches.get(entry)) is not None:
            self._jobs.withdraw(future)

    def _fetched(self, entry: KvEntry, reserved: Mapping | None, result: Mapping | Exception) -> None:
        self._fetches.pop(entry, None)
        current = self.index.get(entry.key) is entry
        if isinstance(result, Mapping) and current:
            entry.verified = True
            self._settle_in(entry, result)
            self.index.touch(entry)
            return
        self.index.ram.drop(entry)
        entry.ram = TierState.ABSENT
        mapping = result if isinstance(result, Mapping) else reserved
        if mapping is not None:
            self.give_back(mapping)
        if current and isinstance(result, Exception) and not isinstance(result, CancelledError):
            self.drop(entry, str(result))

    def _copy_ahead(self) -> None:
        """Copy the least recently used entries in RAM to disk, so that they can be evicted without loss."""
        if self._disk is None:
            return
        allowed = self.index.ram.allowed_bytes
        for entry in self.index.to_copy(allowed if self._passes_through else int(allowed * _COPIED_SHARE)):
            self._copy(self._disk, entry, optional=not self._passes_through)

    def _copy(self, disk: DiskTier, entry: KvEntry, *, optional: bool) -> None:
        """Queue a copy of an entry to disk, if evicting less recently used ones makes room."""
        victims = self.index.room_on_disk(entry)
        if victims is None:
            return
        for victim in victims:
            self._leave_disk(victim)
        entry.disk = TierState.LOADING
        self.index.disk.put(entry, entry.scope, entry.file_bytes)
        mapping = self._mappings[entry]
        self._jobs.submit(
            partial(disk.write, entry.key, mapping, mapping.generation, entry.file_bytes),
            partial(self._copied, entry),
            optional=optional,
        )

    def _copied(self, entry: KvEntry, result: bool | Exception) -> None:
        if self.index.get(entry.key) is not entry:
            return
        if result is True:
            entry.disk = TierState.RESIDENT
            return
        entry.disk = TierState.ABSENT
        self.index.disk.drop(entry)
        if isinstance(result, CancelledError):
            return
        entry.refused = True  # otherwise every parked sequence would write to a full disk
        if isinstance(result, Exception):
            self._warn("disk", result)

    def _adopt_ram(self, entry: KvEntry, mapping: Mapping) -> None:
        victims = self.index.room_in_ram(entry.scope, mapping.capacity_bytes, without=None, keep=())
        if victims is None:
            mapping.discard()
            return
        for victim in victims:
            self._leave_ram(victim)
        self._settle_in(entry, mapping)
        generation = mapping.generation
        self._jobs.submit(
            partial(is_sound, mapping, generation, self._fingerprint),
            partial(self._checked, entry, mapping, generation),
            optional=True,
        )

    def _adopt_disk(self, entry: KvEntry) -> None:
        assert self._disk is not None
        victims = self.index.room_on_disk(entry)
        if victims is None:
            self._jobs.submit(partial(self._disk.delete, entry.key), self._finished)
            return
        for victim in victims:
            self._leave_disk(victim)
        entry.disk = TierState.RESIDENT
        self.index.disk.put(entry, entry.scope, entry.file_bytes)

    def _checked(self, entry: KvEntry, mapping: Mapping, generation: int, result: bool | Exception) -> None:
        if self._mappings.get(entry) is not mapping or mapping.generation != generation:
            return
        entry.verified = entry.verified or result is True
        if result is False:
            self.drop(entry, "its checksum is wrong")

    def _take_from_ram(self, entry: KvEntry) -> Mapping:
        entry.ram = TierState.ABSENT
        self.index.ram.drop(entry)
        return self._mappings.pop(entry)

    def _leave_ram(self, entry: KvEntry) -> None:
        self.give_back(self._take_from_ram(entry))
        if entry.disk is TierState.ABSENT:
            self.index.remove(entry)

    def _leave_disk(self, entry: KvEntry) -> None:
        assert self._disk is not None
        entry.disk = TierState.ABSENT
        self.index.disk.drop(entry)
        self._jobs.submit(partial(self._disk.delete, entry.key), self._finished)
        if entry.ram is TierState.ABSENT:
            self.index.remove(entry)

    def remove(self, entry: KvEntry) -> None:
        """Remove an entry from both tiers; memory being loaded is returned with the job's result."""
        self.index.remove(entry)
        self.cancel_fetch(entry)
        if entry.ram is TierState.RESIDENT:
            self.give_back(self._take_from_ram(entry))
        if entry.disk is not TierState.ABSENT and self._disk is not None:
            entry.disk = TierState.ABSENT
            self.index.disk.drop(entry)
            self._jobs.submit(partial(self._disk.delete, entry.key), self._finished)

    def drop(self, entry: KvEntry, why: str) -> None:
        """Remove an unusable entry and log the reason."""
        self._on_log("warning", f"parked KV of {entry.key} is dropped: {why}")
        self.remove(entry)

    def give_back(self, mapping: Mapping) -> None:
        """Return claimed memory to the RAM tier."""
        surplus = self._ram.give_back(mapping)
        if surplus is not None:
            self._jobs.submit(surplus.discard, self._finished)

    def _warn(self, tier: str, error: Exception) -> None:
        """Log a tier's failure once per reason; the tier is tried again with the next sequence."""
        reason = error.strerror or str(error) if isinstance(error, OSError) else repr(error)
        if (tier, reason) not in self._warned:
            self._warned.add((tier, reason))
            self._on_log("warning", f"KV cannot be parked ({tier} tier): {error}")

    @property
    def _room_bytes(self) -> int:
        """Bytes available to mappings without an entry."""
        return self.index.ram.allowed_bytes - self.index.ram.total_bytes

    def _finished(self, result: object) -> None:
        if isinstance(result, Exception) and not isinstance(result, CancelledError):
            self._on_log("error", f"parking: {result!r}")


def _nothing() -> None:
    pass

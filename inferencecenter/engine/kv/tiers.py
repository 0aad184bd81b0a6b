"""Parked sequences on their way between memory, RAM tier and disk tier, as the catalogue decides."""

from __future__ import annotations

from concurrent.futures import CancelledError
from functools import partial
from typing import TYPE_CHECKING

from inferencecenter.engine.kv.catalogue import Catalogue, Entry, Place
from inferencecenter.engine.kv.disk import Wanted, seal
from inferencecenter.engine.kv.jobs import Jobs
from inferencecenter.engine.kv.ledger import Limits
from inferencecenter.engine.kv.mapping import Mapping
from inferencecenter.engine.kv.ram import is_sound, whole_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from concurrent.futures import Executor, Future

    from inferencecenter.engine.kv.adoption import Found
    from inferencecenter.engine.kv.disk import DiskTier
    from inferencecenter.engine.kv.ram import RamTier

# So much of the RAM tier can be had at once, because what is oldest in it has been copied to disk before.
_COPIED_SHARE = 0.5


class Tiers:
    """Carries entries from one place to another. Only memory is touched in a call; the worker does the rest.

    Args:
        catalogue: What is where; kept up to date here.
        ram: Makes mappings.
        disk: Makes files, unless there is no disk tier.
        passes_through: Whether RAM is only a way to the disk, and everything is to be copied there.
        fingerprint: What sequences are saved under (see ``record.digest``).
        worker: Has one thread of its own.
        on_log: Takes a level and a line.
    """

    def __init__(  # noqa: PLR0913 - put together by the store alone, all by name
        self,
        *,
        catalogue: Catalogue,
        ram: RamTier,
        disk: DiskTier | None,
        passes_through: bool,
        fingerprint: bytes,
        worker: Executor,
        on_log: Callable[[str, str], None],
    ) -> None:
        self.catalogue = catalogue
        self._ram = ram
        self._disk = disk
        self._passes_through = passes_through
        self._fingerprint = fingerprint
        self._jobs = Jobs(worker)
        self._on_log = on_log
        self._mappings: dict[Entry, Mapping] = {}
        self._fetches: dict[Entry, Future[Mapping]] = {}
        self._warned: set[tuple[str, str]] = set()

    @property
    def ram_bytes(self) -> int:
        """What the RAM tier takes, warm mappings included."""
        return self.catalogue.ram.total_bytes + self._ram.warm_bytes

    @property
    def total_bytes(self) -> int:
        """What both tiers take."""
        return self.ram_bytes + self.catalogue.disk.total_bytes

    def settle(self) -> None:
        """Take up what the worker has done meanwhile."""
        self._jobs.settle()

    def mapping_of(self, entry: Entry) -> Mapping | None:
        """Return the memory of an entry that is in RAM; one that turns out to be damaged is dropped."""
        mapping = self._mappings.get(entry)
        if mapping is None or entry.verified:
            return mapping
        entry.verified = is_sound(mapping, mapping.generation, self._fingerprint)
        if not entry.verified:
            self.drop(entry, "its checksum is wrong")
            return None
        return mapping

    def notify(self, callback: Callable[[], None], wanted: Entry | None) -> None:
        """Have the worker call back when it has done all that it was given so far, and note what is not in RAM then."""

        def told(_result: object) -> None:
            if wanted is not None:
                wanted.in_vain = wanted.ram is Place.ABSENT

        self._jobs.submit(_nothing, told, notify=callback)

    def adopt(self, found: Iterable[Found]) -> None:
        """Take over what an earlier engine left, in the order in which it was parked."""
        for each in found:
            entry = each.entry
            self.catalogue.add(entry)
            if each.mapping is not None:
                self._adopt_ram(entry, each.mapping)
            if each.on_disk:
                self._adopt_disk(entry)
            if entry.ram is Place.ABSENT and entry.disk is Place.ABSENT:
                self.catalogue.remove(entry)
            self._ram.trim(self._room_bytes)
        self._copy_ahead()

    def claim(
        self, entry: Entry | None, scope: str, need_bytes: int, keep: Collection[str], *, grows: bool
    ) -> Mapping | None:
        """Return memory for a sequence that takes the place of ``entry``; the latter has left RAM then."""
        ram = self.catalogue.ram
        own = entry if entry is not None and entry.ram is Place.THERE else None
        victims = self.catalogue.room_in_ram(scope, need_bytes, without=own, keep=keep)
        if victims is None:
            return None
        for victim in victims:
            self._leave_ram(victim)
        if own is not None and own.disk is Place.ARRIVING:  # what is being copied is overwritten now
            self.remove(own)
        elif own is not None:
            self._leave_ram(own)
        try:
            return self._ram.take(
                need_bytes,
                at_most_bytes=ram.spare_bytes(scope),
                room_bytes=self._room_bytes,
                grows=grows,
            )
        except OSError as error:
            self._warn("RAM", error)
            return None

    def enter(self, entry: Entry, mapping: Mapping) -> None:
        """Enter a new sequence that has just been written into ``mapping``, in place of an older one."""
        old = self.catalogue.get(entry.key)
        if old is not None:
            self.remove(old)
        self.catalogue.add(entry)
        self._settle_in(entry, mapping)
        header = entry.header
        self._jobs.submit(partial(seal, mapping, mapping.generation, header, self._fingerprint), self._finished)
        self._copy_ahead()

    def hold(self, entry: Entry, *, spare: bool) -> None:
        """Take note that an entry was parked again as it is; once it was no spare copy it is none any more."""
        self.catalogue.touch(entry)
        if entry.spare and not spare:
            entry.spare = False
            self._copy_ahead()

    def limit_ram(self, allowed_bytes: int | None) -> None:
        """Let RAM hold no more than ``allowed_bytes`` from now on, ``None`` for its budget; what is more goes at once.

        It goes on this thread: the worker may be busy with a disk while memory runs out.
        """
        ram = self.catalogue.ram
        budget = ram.limits.budget_bytes
        ram.allowed_bytes = budget if allowed_bytes is None else min(allowed_bytes, budget)
        for entry in self.catalogue.excess_in_ram():
            self._take_from_ram(entry).discard()
            if entry.disk is not Place.THERE:
                self.remove(entry)
        self._ram.trim(self._room_bytes)

    def save(self, progressed: Callable[[], None]) -> None:
        """Copy to disk what may be there and is not, what was used last first, and wait for that."""
        # Copies that have not begun are of what was used long ago, and whatever is under way cannot leave the disk.
        self._jobs.drain(progressed)
        if self._disk is not None:
            for entry in self.catalogue.unsaved():
                self._copy(self._disk, entry, optional=False)
        self._jobs.drain(progressed)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when the books contradict each other."""
        self.catalogue.check_integrity()
        ram = self.catalogue.ram
        assert ram.total_bytes + self._ram.warm_bytes <= ram.limits.budget_bytes, "warm memory exceeds the budget"
        there = {entry for entry in self.catalogue if entry.ram is Place.THERE}
        assert self._mappings.keys() == there, "a mapping is lost"
        assert all(mapping.capacity_bytes == ram.bytes_of(entry) for entry, mapping in self._mappings.items())

    def close(self) -> None:
        """Wait for the worker and let everything go; files stay."""
        self._jobs.finish()
        self._ram.trim(0)
        for mapping in self._mappings.values():
            mapping.release()
        self._mappings.clear()
        self.catalogue = Catalogue(ram=Limits(0), disk=Limits(0), can_rewind=True)

    def _settle_in(self, entry: Entry, mapping: Mapping) -> None:
        entry.ram = Place.THERE
        self._mappings[entry] = mapping
        self.catalogue.ram.put(entry, entry.scope, mapping.capacity_bytes)

    def fetch(self, entry: Entry, keep: Collection[str], on_fetched: Callable[[], None]) -> bool:
        """Start to read an entry that is on disk alone; ``False`` when there is no room, for now or for ever.

        ``on_fetched`` is called on the worker. Damaged or too large, the entry is dropped.
        """
        assert self._disk is not None
        entry.in_vain = False
        ram = self.catalogue.ram
        need = whole_pages(entry.file_bytes)
        victims = self.catalogue.room_in_ram(entry.scope, need, without=None, keep=keep)
        if victims is None:
            if need > ram.limits.of(entry.scope):
                self.drop(entry, "it does not fit into RAM")
            return False
        for victim in victims:
            self._leave_ram(victim)
        warm = self._ram.take_warm(need, at_most_bytes=ram.spare_bytes(entry.scope), room_bytes=self._room_bytes)
        entry.ram = Place.ARRIVING
        ram.put(entry, entry.scope, need if warm is None else warm.capacity_bytes)
        wanted = Wanted(entry.key, entry.scope, entry.tokens)
        self._fetches[entry] = self._jobs.submit(
            partial(self._disk.read, wanted, warm, self._ram.create),
            partial(self._fetched, entry, warm),
            notify=on_fetched,
            optional=True,
        )
        return True

    def cancel_fetch(self, entry: Entry) -> None:
        """Do not read an entry from disk if that has not begun; the room that was kept for it is free then."""
        if (future := self._fetches.get(entry)) is not None:
            self._jobs.withdraw(future)

    def _fetched(self, entry: Entry, reserved: Mapping | None, result: Mapping | Exception) -> None:
        self._fetches.pop(entry, None)
        current = self.catalogue.get(entry.key) is entry
        if isinstance(result, Mapping) and current:
            entry.verified = True
            self._settle_in(entry, result)
            self.catalogue.touch(entry)
            return
        self.catalogue.ram.drop(entry)
        entry.ram = Place.ABSENT
        mapping = result if isinstance(result, Mapping) else reserved
        if mapping is not None:
            self.give_back(mapping)
        if current and isinstance(result, Exception) and not isinstance(result, CancelledError):
            self.drop(entry, str(result))

    def _copy_ahead(self) -> None:
        """Copy to disk what is oldest in RAM, so that it can leave without being lost."""
        if self._disk is None:
            return
        allowed = self.catalogue.ram.allowed_bytes
        for entry in self.catalogue.to_copy(allowed if self._passes_through else int(allowed * _COPIED_SHARE)):
            self._copy(self._disk, entry, optional=not self._passes_through)

    def _copy(self, disk: DiskTier, entry: Entry, *, optional: bool) -> None:
        """Have an entry copied to disk, if there is room among those used before it."""
        victims = self.catalogue.room_on_disk(entry)
        if victims is None:
            return
        for victim in victims:
            self._leave_disk(victim)
        entry.disk = Place.ARRIVING
        self.catalogue.disk.put(entry, entry.scope, entry.file_bytes)
        mapping = self._mappings[entry]
        self._jobs.submit(
            partial(disk.write, entry.key, mapping, mapping.generation, entry.file_bytes),
            partial(self._copied, entry),
            optional=optional,
        )

    def _copied(self, entry: Entry, result: bool | Exception) -> None:
        if self.catalogue.get(entry.key) is not entry:
            return
        if result is True:
            entry.disk = Place.THERE
            return
        entry.disk = Place.ABSENT
        self.catalogue.disk.drop(entry)
        if isinstance(result, CancelledError):
            return
        entry.refused = True  # or a full disk would be written to for every sequence parked
        if isinstance(result, Exception):
            self._warn("disk", result)

    def _adopt_ram(self, entry: Entry, mapping: Mapping) -> None:
        victims = self.catalogue.room_in_ram(entry.scope, mapping.capacity_bytes, without=None, keep=())
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

    def _adopt_disk(self, entry: Entry) -> None:
        assert self._disk is not None
        victims = self.catalogue.room_on_disk(entry)
        if victims is None:
            self._jobs.submit(partial(self._disk.delete, entry.key), self._finished)
            return
        for victim in victims:
            self._leave_disk(victim)
        entry.disk = Place.THERE
        self.catalogue.disk.put(entry, entry.scope, entry.file_bytes)

    def _checked(self, entry: Entry, mapping: Mapping, generation: int, result: bool | Exception) -> None:
        if self._mappings.get(entry) is not mapping or mapping.generation != generation:
            return
        entry.verified = entry.verified or result is True
        if result is False:
            self.drop(entry, "its checksum is wrong")

    def _take_from_ram(self, entry: Entry) -> Mapping:
        entry.ram = Place.ABSENT
        self.catalogue.ram.drop(entry)
        return self._mappings.pop(entry)

    def _leave_ram(self, entry: Entry) -> None:
        self.give_back(self._take_from_ram(entry))
        if entry.disk is Place.ABSENT:
            self.catalogue.remove(entry)

    def _leave_disk(self, entry: Entry) -> None:
        assert self._disk is not None
        entry.disk = Place.ABSENT
        self.catalogue.disk.drop(entry)
        self._jobs.submit(partial(self._disk.delete, entry.key), self._finished)
        if entry.ram is Place.ABSENT:
            self.catalogue.remove(entry)

    def remove(self, entry: Entry) -> None:
        """Take an entry out of both tiers; memory that is being read into comes back with the result of that."""
        self.catalogue.remove(entry)
        self.cancel_fetch(entry)
        if entry.ram is Place.THERE:
            self.give_back(self._take_from_ram(entry))
        if entry.disk is not Place.ABSENT and self._disk is not None:
            entry.disk = Place.ABSENT
            self.catalogue.disk.drop(entry)
            self._jobs.submit(partial(self._disk.delete, entry.key), self._finished)

    def drop(self, entry: Entry, why: str) -> None:
        """Remove an entry that cannot be used, and say so."""
        self._on_log("warning", f"parked KV of {entry.key} is dropped: {why}")
        self.remove(entry)

    def give_back(self, mapping: Mapping) -> None:
        """Take memory back that was claimed."""
        surplus = self._ram.give_back(mapping)
        if surplus is not None:
            self._jobs.submit(surplus.discard, self._finished)

    def _warn(self, tier: str, error: Exception) -> None:
        """Log that a tier does not work, once for each reason; it is tried again with the next sequence."""
        reason = error.strerror or str(error) if isinstance(error, OSError) else repr(error)
        if (tier, reason) not in self._warned:
            self._warned.add((tier, reason))
            self._on_log("warning", f"KV cannot be parked ({tier} tier): {error}")

    @property
    def _room_bytes(self) -> int:
        """What mappings may take in which there is no entry."""
        return self.catalogue.ram.allowed_bytes - self.catalogue.ram.total_bytes

    def _finished(self, result: object) -> None:
        if isinstance(result, Exception) and not isinstance(result, CancelledError):
            self._on_log("error", f"parking: {result!r}")


def _nothing() -> None:
    pass

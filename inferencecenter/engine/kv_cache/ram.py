"""The RAM tier's memory: mapped files, of which a few are kept warm for the next sequence to park."""

from __future__ import annotations

import mmap
import secrets
import zlib
from typing import TYPE_CHECKING

from inferencecenter.engine.kv_cache import directory
from inferencecenter.engine.kv_cache.mapping import Mapping
from inferencecenter.engine.kv_cache.record import Record, RecordError, decode

if TYPE_CHECKING:
    from pathlib import Path

_MAX_WARM = 4
# A warm mapping may be so much larger than needed; beyond that it is cut, which costs less than the memory is worth.
_SLACK = 1.25
# What grows with every turn gets this part more, because a mapping that was resized is nearly as slow as a new one.
_HEADROOM = 1 / 8


def whole_pages(n_bytes: int) -> int:
    """Return ``n_bytes`` rounded up to what memory is mapped in."""
    return -(-n_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class RamTier:
    """Makes mappings and keeps those that are given back.

    Args:
        path: The directory of the files; ``None`` for memory of no files.
        fingerprint: What sequences are saved under (see ``record.digest``).
    """

    def __init__(self, path: Path | None, fingerprint: bytes) -> None:
        self._path = path
        self._fingerprint = fingerprint
        self._warm: list[Mapping] = []

    @property
    def warm_bytes(self) -> int:
        """What the mappings take that nobody uses."""
        return sum(mapping.capacity_bytes for mapping in self._warm)

    def create(self, capacity_bytes: int) -> Mapping:
        """Make a new mapping of whole pages; from any thread.

        Raises:
            OSError: There is no room, or no usable directory.
        """
        if self._path is None:
            return Mapping.anonymous(whole_pages(capacity_bytes))
        directory.prepare(self._path)
        return Mapping.create(self._path / f"kv-{secrets.token_hex(16)}.ram", whole_pages(capacity_bytes))

    def take(self, need_bytes: int, *, at_most_bytes: int, room_bytes: int, grows: bool = False) -> Mapping:
        """Return a mapping for ``need_bytes``, whole pages, a warm one if possible.

        It takes no more than ``at_most_bytes``, and with what stays warm no more than ``room_bytes``. For what
        ``grows`` there is room for more in it, as far as these allow.

        Raises:
            OSError: It would have to be a new one, which cannot be made.
        """
        more_pages = int(need_bytes // mmap.PAGESIZE * _HEADROOM) if grows else 0
        roomy_bytes = need_bytes + more_pages * mmap.PAGESIZE
        if roomy_bytes > min(at_most_bytes, room_bytes):
            roomy_bytes = need_bytes
        mapping = self.take_warm(
            need_bytes, at_most_bytes=at_most_bytes, room_bytes=room_bytes, roomy_bytes=roomy_bytes
        )
        return mapping or self.create(roomy_bytes)

    def take_warm(
        self, need_bytes: int, *, at_most_bytes: int, room_bytes: int, roomy_bytes: int = 0
    ) -> Mapping | None:
        """Do what ``take`` does, but leave it to the caller to make a new one; one that is resized is ``roomy``."""
        roomy_bytes = max(need_bytes, roomy_bytes)
        for mapping in self._best_first(need_bytes):
            if mapping not in self._warm:  # trimmed for the sake of one that could not be resized
                continue
            fits = need_bytes <= mapping.capacity_bytes <= min(need_bytes * _SLACK, at_most_bytes)
            self._warm.remove(mapping)
            self.trim(room_bytes - (mapping.capacity_bytes if fits else roomy_bytes))
            if fits or mapping.resize(roomy_bytes):
                return mapping
            self._warm.append(mapping)
        self.trim(room_bytes - roomy_bytes)
        return None

    def give_back(self, mapping: Mapping) -> Mapping | None:
        """Keep a mapping warm, whose content is worthless from now on; return one that is to be discarded for it."""
        mapping.begin()
        self._warm.append(mapping)
        return self._warm.pop(0) if len(self._warm) > _MAX_WARM else None

    def trim(self, warm_bytes: int) -> None:
        """Give up warm mappings, the oldest first, until they take no more than ``warm_bytes``."""
        while self._warm and self.warm_bytes > warm_bytes:
            self._warm.pop(0).discard()

    def adopt(self) -> tuple[list[tuple[Mapping, Record]], list[str]]:
        """Map what an earlier engine left; what has no sound header is deleted, with the reasons returned.

        Raises:
            OSError: The directory cannot be read.
        """
        assert self._path is not None
        left: list[tuple[Mapping, Record]] = []
        sound, strange = directory.list_parked(self._path, ".ram")
        faults = [directory.deleted(path, "it is no plain file") for path in strange]
        for path in sound:
            try:
                left.append(_opened(path, self._fingerprint))
            except (RecordError, OSError) as error:
                faults.append(directory.deleted(path, str(error)))
        return left, faults

    def clear(self) -> None:
        """Delete what an earlier engine left.

        Raises:
            OSError: The directory cannot be read.
        """
        assert self._path is not None
        for files in directory.list_parked(self._path, ".ram"):
            for path in files:
                directory.delete(path)

    def _best_first(self, need_bytes: int) -> list[Mapping]:
        """Order warm mappings: the smallest that is large enough, then those to be grown by the least."""
        return sorted(
            self._warm,
            key=lambda each: (each.capacity_bytes < need_bytes, abs(each.capacity_bytes - need_bytes)),
        )


def is_sound(mapping: Mapping, generation: int, fingerprint: bytes) -> bool:
    """Tell whether a mapping's payload is what its header was written for; from any thread."""
    with mapping.reading(generation) as data:
        if data is None:
            return False
        try:
            record = decode(data, fingerprint)
        except RecordError:
            return False
        start = record.header_bytes
        return zlib.crc32(data[start : start + record.payload_bytes]) == record.payload_crc


def _opened(path: Path, fingerprint: bytes) -> tuple[Mapping, Record]:
    mapping = Mapping.open(path)
    try:
        with mapping.view(0, mapping.capacity_bytes) as data:
            record = decode(data, fingerprint)
        if record.header_bytes + record.payload_bytes > mapping.capacity_bytes:
            raise RecordError("it is torn")
    except RecordError:
        mapping.release()
        raise
    return mapping, record

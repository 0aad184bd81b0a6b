"""Memory of the RAM tier: mapped files, some of which are kept warm for the next sequence."""

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
# A warm mapping may exceed the need by this factor; beyond it, it is cut, which costs less than the wasted memory.
_SLACK = 1.25
# Extra capacity for sequences that grow with every turn, because a resized mapping is nearly as slow as a new one.
_HEADROOM = 1 / 8


def whole_pages(n_bytes: int) -> int:
    """Return ``n_bytes`` rounded up to whole pages."""
    return -(-n_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class RamTier:
    """Creates mappings and keeps returned ones warm.

    Args:
        path: The directory of the files; ``None`` for anonymous memory.
        fingerprint: Digest that sequences are saved under (see ``record.digest``).
    """

    def __init__(self, path: Path | None, fingerprint: bytes) -> None:
        self._path = path
        self._fingerprint = fingerprint
        self._warm: list[Mapping] = []

    @property
    def warm_bytes(self) -> int:
        """Total size of the warm mappings."""
        return sum(mapping.capacity_bytes for mapping in self._warm)

    def create(self, capacity_bytes: int) -> Mapping:
        """Create a mapping of whole pages; from any thread.

        Raises:
            OSError: There is no room, or no usable directory.
        """
        if self._path is None:
            return Mapping.anonymous(whole_pages(capacity_bytes))
        directory.prepare(self._path)
        return Mapping.create(self._path / f"kv-{secrets.token_hex(16)}.ram", whole_pages(capacity_bytes))

    def take(self, need_bytes: int, *, at_most_bytes: int, room_bytes: int, grows: bool = False) -> Mapping:
        """Return a mapping for ``need_bytes`` (whole pages), a warm one if possible.

        It takes at most ``at_most_bytes``, and together with the remaining warm mappings at most ``room_bytes``. With
        ``grows`` it gets extra capacity as far as these allow.

        Raises:
            OSError: A new mapping is needed and cannot be created.
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
        """Return a warm mapping as ``take`` does, or ``None``; a resized one gets ``roomy_bytes``."""
        roomy_bytes = max(need_bytes, roomy_bytes)
        for mapping in self._best_first(need_bytes):
            if mapping not in self._warm:  # trimmed to make room for one that could not be resized
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
        """Keep a mapping warm and invalidate its content; return a surplus mapping to be discarded."""
        mapping.begin()
        self._warm.append(mapping)
        return self._warm.pop(0) if len(self._warm) > _MAX_WARM else None

    def trim(self, warm_bytes: int) -> None:
        """Discard warm mappings, oldest first, until they take at most ``warm_bytes``."""
        while self._warm and self.warm_bytes > warm_bytes:
            self._warm.pop(0).discard()

    def adopt(self) -> tuple[list[tuple[Mapping, Record]], list[str]]:
        """Map an earlier engine's files; return them and the reasons for files deleted without a valid header.

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
        """Delete an earlier engine's files.

        Raises:
            OSError: The directory cannot be read.
        """
        assert self._path is not None
        for files in directory.list_parked(self._path, ".ram"):
            for path in files:
                directory.delete(path)

    def _best_first(self, need_bytes: int) -> list[Mapping]:
        """Order warm mappings: the smallest that is large enough, then those that need the least growth."""
        return sorted(
            self._warm,
            key=lambda each: (each.capacity_bytes < need_bytes, abs(each.capacity_bytes - need_bytes)),
        )


def is_sound(mapping: Mapping, generation: int, fingerprint: bytes) -> bool:
    """Return whether a mapping's payload matches its header's checksum; from any thread."""
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

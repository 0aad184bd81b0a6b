"""Memory of the RAM tier: a mapped file for each sequence, and some that are kept warm for the next ones."""

from __future__ import annotations

import mmap
import os
import secrets
import threading
import zlib
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from inferencecenter.engine.kv_cache import directory
from inferencecenter.engine.kv_cache.record import START_BYTES, SUSPECT_AT, Record, RecordError, decode

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_WARM = 4
# A warm mapping may exceed the need by this factor; beyond it, it is cut, which costs less than the wasted memory.
_SLACK = 1.25
# Extra capacity for sequences that grow with every turn, because a resized mapping is nearly as slow as a new one.
_HEADROOM = 1 / 8


def whole_pages(n_bytes: int) -> int:
    """Return ``n_bytes`` rounded up to whole pages."""
    return -(-n_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class Mapping:
    """Mapped memory that is reused for successive sequences.

    The owner's thread writes; a worker thread reads and completes headers. ``generation`` counts the contents: an
    operation with an older generation reads and changes nothing.
    """

    def __init__(self, memory: mmap.mmap, path: Path | None) -> None:
        self._memory = memory
        self._path = path
        self._lock = threading.Lock()
        self._generation = 0

    @classmethod
    def anonymous(cls, capacity_bytes: int) -> Mapping:
        """Map anonymous memory.

        Raises:
            OSError: There is not enough memory.
        """
        return cls(mmap.mmap(-1, capacity_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), None)

    @classmethod
    def create(cls, path: Path, capacity_bytes: int) -> Mapping:
        """Create and map a file that only this user can read.

        Raises:
            OSError: It cannot be created, or there is not enough room.
        """
        descriptor = os.open(path, _CREATE, 0o600)
        try:
            # Allocated now: writing into a mapped hole of a full file system ends the process with SIGBUS.
            os.posix_fallocate(descriptor, 0, capacity_bytes)
            return cls(mmap.mmap(descriptor, capacity_bytes), path)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

    @classmethod
    def open(cls, path: Path) -> Mapping:
        """Map an existing file.

        Raises:
            OSError: It cannot be opened, or is empty.
        """
        descriptor = os.open(path, _OPEN)
        try:
            length = os.fstat(descriptor).st_size
            os.posix_fallocate(descriptor, 0, length)
            return cls(mmap.mmap(descriptor, length), path)
        finally:
            os.close(descriptor)

    @property
    def capacity_bytes(self) -> int:
        """Capacity, equal to the size of the file."""
        return len(self._memory)

    @property
    def generation(self) -> int:
        """Number of the current content."""
        return self._generation

    def begin(self) -> int:
        """Invalidate the content, also for a later reader of the file; return the next content's generation."""
        with self._lock:
            self._generation += 1
            self._memory[:START_BYTES] = bytes(START_BYTES)
            return self._generation

    def seal(self, header: bytes, generation: int) -> bool:
        """Write the header, its start last; ``False`` when the generation has passed."""
        with self._lock:
            if self._generation != generation:
                return False
            self._memory[START_BYTES : len(header)] = header[START_BYTES:]
            self._memory[:START_BYTES] = header[:START_BYTES]
            return True

    def suspect(self, *, whether: bool) -> None:
        """Mark the content as being restored, so that a later engine can tell that this one crashed on it."""
        with self._lock:
            self._memory[SUSPECT_AT] = whether

    @contextmanager
    def view(self, start: int, n_bytes: int, *, readonly: bool = False) -> Iterator[memoryview]:
        """Lend ``n_bytes`` starting at ``start``."""
        whole = memoryview(self._memory)
        part = (whole.toreadonly() if readonly else whole)[start : start + n_bytes]
        with _lent(whole), _lent(part):
            yield part

    @contextmanager
    def reading(self, generation: int) -> Iterator[memoryview | None]:
        """Lend everything, or ``None`` when the generation has passed; it may pass during the loan."""
        with self._lock:
            whole = memoryview(self._memory).toreadonly() if self._generation == generation else None
        if whole is None:
            yield None
            return
        with _lent(whole):
            yield whole

    def resize(self, capacity_bytes: int) -> bool:
        """Change the capacity; ``False``, with nothing changed, while a view is lent or without room."""
        path = self._path
        try:
            if path is not None and capacity_bytes > self.capacity_bytes:
                _allocate(path, self.capacity_bytes, capacity_bytes)
            self._memory.resize(capacity_bytes)
        except (BufferError, OSError):
            if path is not None:
                with suppress(OSError):
                    os.truncate(path, self.capacity_bytes)
            return False
        return True

    def release(self) -> None:
        """Unmap, and leave the file to a later engine."""
        with suppress(BufferError):  # still being read: unmapped with the last view
            self._memory.close()

    def discard(self) -> None:
        """Unmap and delete the file."""
        with self._lock:
            self._generation += 1
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
        self.release()


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
        capacity_bytes = need_bytes + more_pages * mmap.PAGESIZE
        if capacity_bytes > min(at_most_bytes, room_bytes):
            capacity_bytes = need_bytes
        mapping = self.take_warm(
            need_bytes, at_most_bytes=at_most_bytes, room_bytes=room_bytes, capacity_bytes=capacity_bytes
        )
        return mapping or self.create(capacity_bytes)

    def take_warm(
        self, need_bytes: int, *, at_most_bytes: int, room_bytes: int, capacity_bytes: int = 0
    ) -> Mapping | None:
        """Return a warm mapping as ``take`` does, or ``None``; a resized one gets ``capacity_bytes``."""
        capacity_bytes = max(need_bytes, capacity_bytes)
        for mapping in self._best_first(need_bytes):
            if mapping not in self._warm:  # trimmed to make room for one that could not be resized
                continue
            fits = need_bytes <= mapping.capacity_bytes <= min(need_bytes * _SLACK, at_most_bytes)
            self._warm.remove(mapping)
            self.trim(room_bytes - (mapping.capacity_bytes if fits else capacity_bytes))
            if fits or mapping.resize(capacity_bytes):
                return mapping
            self._warm.append(mapping)
        self.trim(room_bytes - capacity_bytes)
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
        return directory.adopt(self._path, ".ram", read=lambda path: _opened(path, self._fingerprint))

    def clear(self) -> None:
        """Delete an earlier engine's files.

        Raises:
            OSError: The directory cannot be read.
        """
        assert self._path is not None
        directory.clear(self._path, ".ram")

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


def _allocate(path: Path, held_bytes: int, n_bytes: int) -> None:
    descriptor = os.open(path, _OPEN)
    try:
        # Only the added part: the kernel visits every page in the range, existing ones included.
        os.posix_fallocate(descriptor, held_bytes, n_bytes - held_bytes)
    finally:
        os.close(descriptor)


@contextmanager
def _lent(view: memoryview) -> Iterator[memoryview]:
    try:
        yield view
    finally:
        with suppress(BufferError):  # a slice is still referenced: the memory cannot be resized until it is freed
            view.release()

"""Memory of one parked sequence: a mapped file of the RAM tier, or anonymous memory."""

from __future__ import annotations

import mmap
import os
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from inferencecenter.engine.kv_cache.record import START_BYTES, SUSPECT_AT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


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

"""Memory for one parked sequence: a mapped file of the RAM tier, or memory of no file."""

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
    """Mapped memory that is filled again and again.

    Its owner's thread writes; a worker thread reads and completes headers. ``generation`` counts the times that it was
    given new content: a worker that comes with an older one finds nothing and changes nothing.
    """

    def __init__(self, memory: mmap.mmap, path: Path | None) -> None:
        self._memory = memory
        self._path = path
        self._lock = threading.Lock()
        self._generation = 0

    @classmethod
    def anonymous(cls, capacity_bytes: int) -> Mapping:
        """Map memory of no file.

        Raises:
            OSError: There is not so much.
        """
        return cls(mmap.mmap(-1, capacity_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), None)

    @classmethod
    def create(cls, path: Path, capacity_bytes: int) -> Mapping:
        """Make and map a file that only this user can read.

        Raises:
            OSError: It cannot be made, or there is not so much room.
        """
        descriptor = os.open(path, _CREATE, 0o600)
        try:
            # Room is taken now: writing into a mapped hole of a full file system ends the process with SIGBUS.
            os.posix_fallocate(descriptor, 0, capacity_bytes)
            return cls(mmap.mmap(descriptor, capacity_bytes), path)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

    @classmethod
    def open(cls, path: Path) -> Mapping:
        """Map a file as it is.

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
        """How much fits; the size of the file."""
        return len(self._memory)

    @property
    def generation(self) -> int:
        """Which content this is."""
        return self._generation

    def begin(self) -> int:
        """Mark what is here as worthless, also for who opens the file later; return the next content's generation."""
        with self._lock:
            self._generation += 1
            self._memory[:START_BYTES] = bytes(START_BYTES)
            return self._generation

    def seal(self, header: bytes, generation: int) -> bool:
        """Write the header, its start last; ``False`` when the content is another one already."""
        with self._lock:
            if self._generation != generation:
                return False
            self._memory[START_BYTES : len(header)] = header[START_BYTES:]
            self._memory[:START_BYTES] = header[:START_BYTES]
            return True

    def suspect(self, *, whether: bool) -> None:
        """Mark what is here as about to be restored, for who opens the file after an engine that died of it."""
        with self._lock:
            self._memory[SUSPECT_AT] = whether

    @contextmanager
    def view(self, start: int, n_bytes: int, *, readonly: bool = False) -> Iterator[memoryview]:
        """Lend ``n_bytes`` from ``start`` on."""
        whole = memoryview(self._memory)
        part = (whole.toreadonly() if readonly else whole)[start : start + n_bytes]
        with _lent(whole), _lent(part):
            yield part

    @contextmanager
    def reading(self, generation: int) -> Iterator[memoryview | None]:
        """Lend everything, or ``None`` when the content is another one already. It may become so meanwhile."""
        with self._lock:
            whole = memoryview(self._memory).toreadonly() if self._generation == generation else None
        if whole is None:
            yield None
            return
        with _lent(whole):
            yield whole

    def resize(self, capacity_bytes: int) -> bool:
        """Change the capacity; ``False`` when somebody reads, or there is no room: all is as it was."""
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
        """Unmap, and leave the file to who opens it later."""
        with suppress(BufferError):  # somebody reads still: unmapped with the last reader
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
        # From the old end on: the kernel looks at every page that it is told of, also at those that are there.
        os.posix_fallocate(descriptor, held_bytes, n_bytes - held_bytes)
    finally:
        os.close(descriptor)


@contextmanager
def _lent(view: memoryview) -> Iterator[memoryview]:
    try:
        yield view
    finally:
        with suppress(
            BufferError
        ):  # the borrower kept a piece: it is freed with that, and cannot be resized until then
            view.release()

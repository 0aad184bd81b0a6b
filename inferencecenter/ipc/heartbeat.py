"""A memory page mapped by both processes: the engine's progress and current turns, readable after its death.

The engine counts its progress there and names the turns of the step it is about to run and those its workers tokenize.
The front reads the counter while turns are in the engine, to distinguish a hang from a long step, and reads the names
once the engine has exited. Nothing is sent, and nothing is written while the engine is idle.

Layout, in native byte order:

========  =========  ==============================================================================
offset    bytes      content
========  =========  ==============================================================================
0         8          progress counter; only changes are meaningful
8         8          length in bytes of the names of the step's turns, 0 between steps
64        8,448      the names, UTF-8, separated by NUL: 256 of 32 bytes
8,512     256 x 40   per worker: a byte with the length of a turn's name, 0 for none; the name; 7 bytes unused
========  =========  ==============================================================================

Names are written before their length, and the length is 0 while they change: an engine that dies in between blames no
turn. Names that do not fit are cut off and match no turn.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MAX_STEP_TURNS: Final = 256
MAX_WORKERS: Final = 256
MAX_NAME_BYTES: Final = 32

_BEATS: Final = 0
_STEP_LENGTH: Final = 1
_STEP_AT: Final = 64
_STEP_BYTES: Final = MAX_STEP_TURNS * (MAX_NAME_BYTES + 1)
_WORKERS_AT: Final = _STEP_AT + _STEP_BYTES
_WORKER_BYTES: Final = 40
_SIZE_BYTES: Final = _WORKERS_AT + MAX_WORKERS * _WORKER_BYTES
_SEPARATOR: Final = "\0"


class Heartbeat:
    """One end of the page; made by ``create`` in the front and by ``attach`` in the engine.

    In the engine ``tick`` and ``step`` are called by one thread, ``preparing`` by any.
    """

    def __init__(self, page: mmap.mmap, fd: int) -> None:
        self._page = page
        self._fd = fd
        self._bytes = memoryview(page)
        self._words = self._bytes[:_STEP_AT].cast("Q")
        self._named: tuple[str, ...] = ()
        self._named_bytes = 0
        self._free = list(range(MAX_WORKERS))
        self._taking = threading.Lock()

    @classmethod
    def create(cls) -> Heartbeat:
        """Return a new page, all zero, with a sealed size.

        Raises:
            OSError: There is no memory or no descriptor for it.
        """
        fd = os.memfd_create("inferencecenter-heartbeat", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, _SIZE_BYTES)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            return cls(mmap.mmap(fd, _SIZE_BYTES), fd)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int) -> Heartbeat:
        """Return the page behind an inherited descriptor, and own the descriptor.

        Raises:
            OSError: The descriptor is not open, or cannot be mapped.
            ValueError: The file behind it is shorter than the page.
        """
        return cls(mmap.mmap(fd, _SIZE_BYTES), fd)

    @property
    def fd(self) -> int:
        """The descriptor to be inherited by the engine."""
        return self._fd

    # The engine's side.

    def tick(self) -> None:
        """Count that there was progress."""
        self._words[_BEATS] += 1

    def step(self, turn_ids: Sequence[str]) -> None:
        """Name the turns of the step that begins, none at its end; counts as progress."""
        names = tuple(turn_ids)
        if not names:
            self._words[_STEP_LENGTH] = 0
        else:
            if names != self._named:
                self._name(names)
            self._words[_STEP_LENGTH] = self._named_bytes
        self._words[_BEATS] += 1

    @contextmanager
    def preparing(self, turn_id: str) -> Iterator[None]:
        """Name a turn while a worker tokenizes it. Does not count as progress of the engine's loop."""
        with self._taking:
            worker = self._free.pop() if self._free else None
        if worker is None:
            yield
            return
        at = _WORKERS_AT + worker * _WORKER_BYTES
        name = turn_id.encode()[:MAX_NAME_BYTES]
        self._bytes[at + 1 : at + 1 + len(name)] = name
        self._bytes[at] = len(name)
        try:
            yield
        finally:
            self._bytes[at] = 0
            with self._taking:
                self._free.append(worker)

    # The front's side.

    @property
    def ticks(self) -> int:
        """The progress counter; a change means that the engine is not stuck."""
        return int(self._words[_BEATS])

    @property
    def suspects(self) -> tuple[str, ...]:
        """Turns of the running step and turns being tokenized: those that may have crashed a dead engine."""
        length = min(self._words[_STEP_LENGTH], _STEP_BYTES)
        names = bytes(self._bytes[_STEP_AT : _STEP_AT + length]).decode(errors="replace")
        return tuple(dict.fromkeys((*(name for name in names.split(_SEPARATOR) if name), *self._prepared())))

    def close(self) -> None:
        """Release the page and its descriptor; to be called once."""
        self._words.release()
        self._bytes.release()
        self._page.close()
        os.close(self._fd)

    def _name(self, names: tuple[str, ...]) -> None:
        self._words[_STEP_LENGTH] = 0
        encoded = _SEPARATOR.join(names).encode()[:_STEP_BYTES]
        self._bytes[_STEP_AT : _STEP_AT + len(encoded)] = encoded
        self._named, self._named_bytes = names, len(encoded)

    def _prepared(self) -> Iterator[str]:
        for at in range(_WORKERS_AT, _SIZE_BYTES, _WORKER_BYTES):
            if length := min(self._bytes[at], MAX_NAME_BYTES):
                yield bytes(self._bytes[at + 1 : at + 1 + length]).decode(errors="replace")

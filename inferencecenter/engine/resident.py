"""The memory that this process holds, read now and then."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_STATM: Final = Path("/proc/self/statm")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_EVERY_S: Final = 1.0


class ResidentMemory:
    """Bytes of this process that are in memory, at most a second old.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._n_bytes = 0
        self._read_at_s = float("-inf")

    def read(self) -> int:
        """Return the bytes."""
        now = self._clock()
        if now - self._read_at_s >= _EVERY_S:
            self._n_bytes = int(_STATM.read_text().split()[1]) * _PAGE_BYTES
            self._read_at_s = now
        return self._n_bytes

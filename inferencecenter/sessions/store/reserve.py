"""Room on the disk for the one thing that makes room: writing the log back into the file.

On a full disk the log holds committed pages, and the file has no room to take them: the log cannot become shorter, and
nothing can be written, though both hold the same conversations. So some room is taken beforehand, and given up for the
time of a checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import tempfile
from typing import TYPE_CHECKING, Final

from inferencecenter.sqlite_file import MAX_LOG_BYTES

if TYPE_CHECKING:
    from pathlib import Path

RESERVE_BYTES: Final = MAX_LOG_BYTES
"""As much as the log grows to before it is written back."""
_LEAST_BYTES: Final = 64 * 1024


class DiskReserve:
    """A file without a name that takes room in ``directory``, as much as there is up to ``RESERVE_BYTES``.

    It goes with the process. On a file system without room, or that gives none beforehand, it is empty.
    """

    def __init__(self, directory: Path) -> None:
        self._file: int | None = None
        with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=directory) as file:
            self._file = os.dup(file.fileno())
        self.fill()

    def fill(self) -> None:
        """Take the room again."""
        n_bytes = RESERVE_BYTES
        while self._file is not None and n_bytes >= _LEAST_BYTES:
            try:
                os.posix_fallocate(self._file, 0, n_bytes)
            except OSError:
                # What a failed attempt has taken is part of what there is.
                self.release()
                n_bytes //= 2
            else:
                return

    def release(self) -> None:
        """Give the room up."""
        if self._file is not None:
            os.ftruncate(self._file, 0)

    def close(self) -> None:
        """Give the room up for good."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


def shorten_log(database: sqlite3.Connection, reserve: DiskReserve) -> bool:
    """Write the log of a file back and empty it; ``False`` if there is no room for that, or another program reads."""
    reserve.release()
    try:
        return bool(database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0)
    except sqlite3.OperationalError:
        return False
    finally:
        reserve.fill()

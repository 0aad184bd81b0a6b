"""A log file that is renamed when it gets too large, and whose disk may be full."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
from logging.handlers import RotatingFileHandler
from typing import TYPE_CHECKING

from inferencecenter.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from pathlib import Path

    from typing_extensions import Buffer


class LogFile(RotatingFileHandler):
    """A file as a stream of lines, for structlog and the standard library's handlers alike.

    Only its owner may read it and those that it was renamed to. What cannot be written is dropped: nobody's turn ends
    with a log line. Safe to use from any thread.

    Args:
        path: The file.
        max_bytes: Size at which it is renamed and a new one begun; 0 lets it grow.
        backups: Renamed files that are kept.

    Raises:
        InferenceCenterError: ``invalid_config`` when it cannot be opened.
    """

    def __init__(self, path: Path, *, max_bytes: int, backups: int) -> None:
        try:
            super().__init__(path, maxBytes=max_bytes, backupCount=backups, encoding="utf-8")
        except OSError as error:
            raise InferenceCenterError(
                ErrorCode.INVALID_CONFIG,
                f"{path} cannot be written: {error.strerror}",
                hint="Its directory must be there and be the daemon's.",
                field="log.file",
            ) from error

    def write(self, text: str) -> None:
        """Write a line."""
        if line := text.rstrip("\n"):
            self.handle(logging.makeLogRecord({"msg": line}))

    def isatty(self) -> bool:
        """Tell that it is no terminal."""
        return False

    def doRollover(self) -> None:  # noqa: N802 - the base class names it so
        """Begin a new file; where the old one cannot be renamed it is written on."""
        with contextlib.suppress(OSError):
            super().doRollover()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Drop a line that could not be written."""

    def _open(self) -> io.TextIOWrapper:
        descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # Without a buffer nothing waits in it that a full disk would not take.
        return io.TextIOWrapper(_WholeLines(descriptor, "a"), encoding=self.encoding, write_through=True)


class _WholeLines(io.FileIO):
    """Takes what is written to it whole, or not at all."""

    def write(self, data: Buffer) -> int:
        """Write; what a full disk takes only half of is taken back.

        Raises:
            OSError: It could not be written.
        """
        n_bytes, size = super().write(data), memoryview(data).nbytes
        if n_bytes < size:
            self.truncate(self.tell() - n_bytes)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return n_bytes

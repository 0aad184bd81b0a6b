"""Opens the session file, for writing or read-only, and describes its faults."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import structlog

from inferencecenter.core.sqlite_file import (
    DAMAGE_CODES,
    DamagedFileError,
    FileMovedError,
    check_version,
    code_of,
    connect,
    connect_reading,
    integrity_error,
    is_damage,
    limit_wal,
    make_private,
    migrate,
    unusable,
    version_of,
)
from inferencecenter.sessions.journal import RETRY_LATER_MS, RETRY_SOON_MS, StorageFault
from inferencecenter.sessions.store.schema import MIGRATIONS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class OpenFile:
    """An open file. With a ``fault`` it is read-only; without a ``database`` it cannot be read either."""

    database: sqlite3.Connection | None
    fault: StorageFault | None = None


def open_file(path: Path) -> OpenFile:
    """Open or create the daemon's file. A file that is damaged or not writable is left untouched.

    Raises:
        InferenceCenterError: ``storage_unavailable`` for a file of a newer version, or one that another process locks.
    """
    try:
        return OpenFile(open_writing(path))
    except (OSError, sqlite3.Error) as error:
        if is_busy(error):
            raise unusable(path, str(error), hint="Another program has it open: stop that program.") from error
        fault = fault_of(error, name=path.name)
        reason = f"{path.name} cannot be written: {reason_of(error)}"
        _log.error("store_read_only", path=str(path), reason=reason, hint=hint_of(error))
    try:
        return OpenFile(open_reading(path), fault)
    except (OSError, sqlite3.Error) as error:
        _log.error("store_unreadable", path=str(path), reason=reason_of(error))
        return OpenFile(None, fault)


def open_writing(path: Path) -> sqlite3.Connection:
    """Open or create the file and migrate it.

    Raises:
        InferenceCenterError: ``storage_unavailable`` for a file of a newer version.
        OSError: It cannot be created, or has another owner.
        sqlite3.Error: It is damaged or cannot be written.
    """
    make_private(path)
    database = connect(path)
    try:
        if (found := integrity_error(database)) is not None:
            raise DamagedFileError(found)
        check_version(database, MIGRATIONS, path=path)
        database.execute("PRAGMA journal_mode = WAL")
        limit_wal(database)
        database.execute("PRAGMA foreign_keys = ON")
        # Overwrites deleted data: a closed or purged conversation leaves nothing in the file.
        database.execute("PRAGMA secure_delete = ON")
        migrate(database, MIGRATIONS, path=path)
    except BaseException:
        database.close()
        raise
    return database


def open_reading(path: Path) -> sqlite3.Connection:
    """Open an existing file of the current version read-only.

    Raises:
        InferenceCenterError: ``storage_unavailable`` for a file of a newer version.
        sqlite3.Error: It cannot be read, or is of an older version.
    """
    database = connect_reading(path)
    try:
        check_version(database, MIGRATIONS, path=path)
        version = version_of(database)
    except BaseException:
        database.close()
        raise
    if version == len(MIGRATIONS):
        return database
    database.close()
    raise sqlite3.DatabaseError(f"it has version {version}, which the daemon migrates when it can write the file")


HINT: Final = "Check that you own the file and its directory, that both are writable, and that the disk has room."
"""Hint for a file that is intact."""

DAMAGED_HINT: Final = (
    "Stop the daemon and run `inferencecenter session salvage`: it copies the readable rows into a new file and keeps"
    " the damaged one under another name. Or `inferencecenter restore` a backup."
)
"""Hint for a damaged file."""

MOVED_HINT: Final = (
    "If it was moved, move it back while the daemon runs: later writes to it are lost when the daemon ends."
)
"""Hint for a file that was moved or deleted after it was opened."""

_BUSY: Final = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
_NOT_WRITABLE: Final = frozenset({sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_CANTOPEN})
_FAULTS: Final[Mapping[int, tuple[str, int]]] = MappingProxyType(
    dict.fromkeys(DAMAGE_CODES, ("it is damaged", RETRY_LATER_MS))
    | dict.fromkeys(_BUSY, ("another program holds it", RETRY_SOON_MS))
    | dict.fromkeys(_NOT_WRITABLE, ("it is not writable", RETRY_LATER_MS))
    | {
        sqlite3.SQLITE_FULL: ("the disk is full", RETRY_SOON_MS),
        sqlite3.SQLITE_IOERR: ("its disk reports an error", RETRY_SOON_MS),
    }
)


def fault_of(error: BaseException, *, name: str) -> StorageFault:
    """Return the fault that clients see when ``error`` prevents writes to the file called ``name``."""
    reason, retry_after_ms = "an internal error", RETRY_LATER_MS
    if isinstance(error, FileMovedError):
        reason = "it was deleted or moved" if error.is_missing else "it was replaced by another file"
    elif is_damage(error):
        reason = "it is damaged"
    elif isinstance(error, OSError):
        reason = "it is not writable"
    elif isinstance(error, sqlite3.Error):
        reason, retry_after_ms = _FAULTS.get(code_of(error) or 0, ("an internal error", RETRY_SOON_MS))
    return StorageFault(f"{name} cannot be written: {reason}", retry_after_ms)


def hint_of(error: BaseException) -> str:
    """Return the hint for operators about ``error``."""
    if isinstance(error, FileMovedError):
        return MOVED_HINT
    return DAMAGED_HINT if is_damage(error) else HINT


def is_busy(error: BaseException) -> bool:
    """Return whether another process locks the file."""
    return isinstance(error, sqlite3.Error) and code_of(error) in _BUSY


def is_full(error: BaseException) -> bool:
    return isinstance(error, sqlite3.Error) and code_of(error) == sqlite3.SQLITE_FULL


def reason_of(error: BaseException) -> str:
    """Return the message of SQLite or of the system, for operators and the log."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)

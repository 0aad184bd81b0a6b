"""The file of sessions is opened: to be written, or if it cannot be, to be read as far as that goes."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from inferencecenter.sessions.store.faults import fault_of, hint_of, is_busy, reason_of
from inferencecenter.sessions.store.schema import MIGRATIONS
from inferencecenter.sqlite_file import (
    DamagedFileError,
    bound_log,
    check_version,
    connect,
    connect_reading,
    damage,
    make_private,
    migrate,
    unusable,
    version_of,
)

if TYPE_CHECKING:
    from pathlib import Path

    from inferencecenter.sessions.journal import StorageFault

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class OpenFile:
    """An open file. With a ``fault`` it is for reading only, and without a ``database`` not even for that."""

    database: sqlite3.Connection | None
    fault: StorageFault | None = None


def open_file(path: Path) -> OpenFile:
    """Open or make the file of a daemon. One that is damaged or cannot be written is left as it is.

    Raises:
        InferenceCenterError: ``storage_unavailable`` for a file of a newer version, or one that somebody else holds.
    """
    try:
        return OpenFile(open_writing(path))
    except (OSError, sqlite3.Error) as error:
        if is_busy(error):
            raise unusable(path, str(error), hint="Another program has it open: end that.") from error
        fault = fault_of(error, name=path.name)
        reason = f"{path.name} cannot be written: {reason_of(error)}"
        _log.error("store_read_only", path=str(path), reason=reason, hint=hint_of(error))
    try:
        return OpenFile(open_reading(path), fault)
    except (OSError, sqlite3.Error) as error:
        _log.error("store_unreadable", path=str(path), reason=reason_of(error))
        return OpenFile(None, fault)


def open_writing(path: Path) -> sqlite3.Connection:
    """Open or make the file and bring it up to date.

    Raises:
        InferenceCenterError: ``storage_unavailable`` for a file of a newer version.
        OSError: It cannot be made, or is not ours.
        sqlite3.Error: It is damaged or cannot be written.
    """
    make_private(path)
    database = connect(path)
    try:
        if (found := damage(database)) is not None:
            raise DamagedFileError(found)
        check_version(database, MIGRATIONS, path=path)
        database.execute("PRAGMA journal_mode = WAL")
        bound_log(database)
        database.execute("PRAGMA foreign_keys = ON")
        # What was deleted is overwritten: a conversation that is closed or purged is gone.
        database.execute("PRAGMA secure_delete = ON")
        migrate(database, MIGRATIONS, path=path)
    except BaseException:
        database.close()
        raise
    return database


def open_reading(path: Path) -> sqlite3.Connection:
    """Open a file that is there, of this version, for reading.

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
    raise sqlite3.DatabaseError(f"it is of version {version}, which the daemon brings up to date when it can write it")

"""SQLite files that are ours alone: private from their first byte, migrated step by step, never overwritten."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from inferencecenter import __version__
from inferencecenter.core.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

BUSY_TIMEOUT_S: Final = 2.0
"""How long a statement waits for another process to let go of the file."""

MAX_LOG_BYTES: Final = 1024 * 1024
"""What the log beside a file has at most, but for transactions that are larger, and while another program reads."""
PAGE_BYTES: Final = 4096
"""SQLite's own choice, which all files here have."""

DAMAGE_CODES: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
"""Result codes that say that a file is damaged."""

Steps: TypeAlias = "Sequence[Sequence[str]]"
"""Statements by the version that they lead to; append, never change: ``PRAGMA user_version`` counts them."""


class DamagedFileError(sqlite3.DatabaseError):
    """The pages of a file contradict each other."""


class FileMovedError(Exception):
    """The path of an open file no longer leads to it: what is written there is gone when the file is closed."""

    def __init__(self, path: Path, *, is_missing: bool) -> None:
        super().__init__(f"{path} was {'deleted or moved away' if is_missing else 'replaced by another file'}")
        self.is_missing = is_missing


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """Which files, by device and inode, a database, its log and the index of that were when they were opened."""

    inodes: tuple[tuple[Path, int, int], ...]

    @classmethod
    def of(cls, path: Path) -> FileIdentity:
        """Return the identity of the files at ``path``, which is open for writing.

        Raises:
            OSError: There is none.
        """
        found = [(each, each.stat()) for each in (path, *_beside(path)) if each == path or each.exists()]
        return cls(tuple((each, stat.st_dev, stat.st_ino) for each, stat in found))

    def check(self) -> None:
        """Compare with what is there now; three system calls.

        Raises:
            FileMovedError: A file is gone, or another one is in its place.
        """
        for path, device, inode in self.inodes:
            try:
                found = os.stat(path)  # noqa: PTH116 - after every commit, and twice as fast
            except OSError as error:
                raise FileMovedError(path, is_missing=True) from error
            if (found.st_dev, found.st_ino) != (device, inode):
                raise FileMovedError(path, is_missing=False)


def make_private(path: Path) -> None:
    """Make the file where there is none, and keep it and what SQLite has beside it from everybody else.

    Raises:
        OSError: It cannot be made, or is not ours to write.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # SQLite gives the files beside it (-wal, -shm) the mode of this one.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    for each in (path, *_beside(path)):
        if each.exists() and each.stat().st_mode & 0o077:
            each.chmod(0o600)


def connect(path: Path) -> sqlite3.Connection:
    """Open a file in autocommit mode, for one thread at a time."""
    return sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)


def bound_log(database: sqlite3.Connection) -> None:
    """Have the log beside the file written back when it has 1 MiB, and cut to that: it may have the disk for itself."""
    database.execute(f"PRAGMA wal_autocheckpoint = {MAX_LOG_BYTES // PAGE_BYTES}")
    database.execute(f"PRAGMA journal_size_limit = {MAX_LOG_BYTES}")


def connect_reading(path: Path) -> sqlite3.Connection:
    """Open a file that is there for reading, also in a directory that cannot be written.

    Raises:
        sqlite3.Error: It cannot be read, or only without what was written last.
    """
    log = _beside(path)[0]
    try:
        return _connect_reading(path, "mode=ro")
    except sqlite3.OperationalError:
        # Reading without locks sees the file alone; what is still in its log would be missing.
        if log.exists() and log.stat().st_size:
            raise
        return _connect_reading(path, "immutable=1")


def damage(database: sqlite3.Connection) -> str | None:
    """Return what is wrong with the file, ``None`` if nothing is.

    Raises:
        sqlite3.DatabaseError: It is no database.
    """
    found = str(database.execute("PRAGMA quick_check(1)").fetchone()[0])
    return None if found == "ok" else found


def is_damage(error: BaseException) -> bool:
    """Tell whether an error says that a file contradicts itself, or is none of SQLite's."""
    return isinstance(error, DamagedFileError) or (isinstance(error, sqlite3.Error) and code_of(error) in DAMAGE_CODES)


def code_of(error: sqlite3.Error) -> int | None:
    """Return SQLite's primary result code; ``None`` for errors that did not come from SQLite itself."""
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


def version_of(database: sqlite3.Connection) -> int:
    """Return how many steps the file has been through."""
    return int(database.execute("PRAGMA user_version").fetchone()[0])


def check_version(database: sqlite3.Connection, steps: Steps, *, path: Path) -> None:
    """Refuse a file that has been through more than ``steps``.

    Raises:
        InferenceCenterError: ``storage_unavailable``; it says which program wrote the file, if that is known.
        sqlite3.Error: It cannot be read.
    """
    version = version_of(database)
    if version <= len(steps):
        return
    writer = _writer_of(database)
    raise InferenceCenterError(
        ErrorCode.STORAGE_UNAVAILABLE,
        f"{path} was written by {writer or 'a newer inferencecenter'} and is of version {version};"
        f" this is inferencecenter {__version__}, which knows versions up to {len(steps)}",
        hint=f"The file is whole, leave it where it is: run {writer or 'the newer inferencecenter'} or a later one, or"
        " `inferencecenter restore` a backup that this version made.",
    )


def migrate(database: sqlite3.Connection, steps: Steps, *, path: Path) -> None:
    """Take the file through the steps that it has not been through, all or none, and note which program did.

    Raises:
        InferenceCenterError: ``storage_unavailable`` for a file that has been through more.
        sqlite3.Error: It cannot be written.
    """
    with transaction(database):
        check_version(database, steps, path=path)
        version = version_of(database)
        for step in steps[version:]:
            for statement in step:
                database.execute(statement)
        if version < len(steps):
            database.execute(f"PRAGMA user_version = {len(steps)}")
            # No step of ``steps``: programs of every version read it.
            database.execute("CREATE TABLE IF NOT EXISTS written_by (program TEXT NOT NULL) STRICT")
            database.execute("DELETE FROM written_by")
            database.execute("INSERT INTO written_by VALUES (?)", (f"inferencecenter {__version__}",))


@contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[None]:
    """Have all statements happen together or not at all."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        # On a full disk SQLite has done it already.
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise


def copy(source: Path, target: Path) -> None:
    """Copy a file as it stands at one moment, also while others write it, to one that is not there yet.

    Raises:
        OSError: The target is there, or cannot be made.
        sqlite3.Error: The source cannot be read, or the target not be written.
    """
    os.close(os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    reading = connect_reading(source)
    try:
        writing = connect(target)
        try:
            # In one piece: a copy in several begins anew with every change that another process makes.
            reading.backup(writing)
        finally:
            writing.close()
    finally:
        reading.close()


def put_in_place(new: Path, path: Path, *, aside: Path | None, write_back: bool = True) -> None:
    """Give the file ``new`` the name ``path``; what is there, with its log, gets the name ``aside``.

    A log that is there without its file goes as well: it would be read as that of ``new``.

    No other program may have any of them open. ``path`` leads to one of the two at each moment. ``write_back`` has the
    log written back before, which changes the file.

    Raises:
        OSError: A name cannot be given; ``aside`` is there already.
    """
    _sync(new)
    if aside is not None:
        if write_back and path.exists():
            # A log that is empty needs no other name, and no moment at which its file is without it.
            with contextlib.suppress(sqlite3.Error), contextlib.closing(connect(path)) as database:
                database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        if path.exists():
            aside.hardlink_to(path)
        for log, other in zip(_beside(path), _beside(aside), strict=True):
            if log.exists():
                log.rename(other)
    new.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_there(path: Path) -> bool:
    """Tell whether there is a file, or what SQLite has beside it."""
    return any(each.exists() for each in (path, *_beside(path)))


def unusable(path: Path, reason: str, *, hint: str) -> InferenceCenterError:
    """Return the error for a file that cannot be used because of ``reason``."""
    return InferenceCenterError(ErrorCode.STORAGE_UNAVAILABLE, f"{path} cannot be used: {reason}", hint=hint)


def _connect_reading(path: Path, how: str) -> sqlite3.Connection:
    database = sqlite3.connect(
        f"{path.absolute().as_uri()}?{how}",
        uri=True,
        timeout=BUSY_TIMEOUT_S,
        isolation_level=None,
        check_same_thread=False,
    )
    try:
        # The file is opened with the first statement.
        version_of(database)
    except sqlite3.Error:
        database.close()
        raise
    return database


def _writer_of(database: sqlite3.Connection) -> str | None:
    """Return the program that last took the file through a step; ``None`` where none has noted that."""
    try:
        row = database.execute("SELECT program FROM written_by").fetchone()
    except sqlite3.OperationalError:
        return None
    return None if row is None else str(row[0])


def _beside(path: Path) -> tuple[Path, Path]:
    """Return where SQLite keeps the log of a file and its index."""
    return path.with_name(path.name + "-wal"), path.with_name(path.name + "-shm")

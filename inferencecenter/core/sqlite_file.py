"""SQLite files of the daemon: private from the first byte, migrated step by step, never overwritten."""

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
"""How long a statement waits for another process to release the file."""

MAX_WAL_BYTES: Final = 1024 * 1024
"""Maximum size of the write-ahead log, except for larger transactions and while another program reads."""
PAGE_BYTES: Final = 4096
"""SQLite's default, which all files here have."""

DAMAGE_CODES: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
"""Result codes for a damaged file."""

Steps: TypeAlias = "Sequence[Sequence[str]]"
"""Statements by the schema version they lead to; append, never change: ``PRAGMA user_version`` counts them."""


class DamagedFileError(sqlite3.DatabaseError):
    """The pages of a file are inconsistent."""


class FileMovedError(Exception):
    """The path of an open file no longer leads to it: what is written is lost when the file is closed."""

    def __init__(self, path: Path, *, is_missing: bool) -> None:
        super().__init__(f"{path} was {'deleted or moved away' if is_missing else 'replaced by another file'}")
        self.is_missing = is_missing


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """Device and inode of a database, its log and the log's index when they were opened."""

    inodes: tuple[tuple[Path, int, int], ...]

    @classmethod
    def of(cls, path: Path) -> FileIdentity:
        """Return the identity of the files at ``path``, which is open for writing.

        Raises:
            OSError: A file does not exist.
        """
        found = [(each, each.stat()) for each in (path, *_wal_files(path)) if each == path or each.exists()]
        return cls(tuple((each, stat.st_dev, stat.st_ino) for each, stat in found))

    def check(self) -> None:
        """Compare with the files that exist now; three system calls.

        Raises:
            FileMovedError: A file is gone, or was replaced.
        """
        for path, device, inode in self.inodes:
            try:
                current = os.stat(path)  # noqa: PTH116 - after every commit, and twice as fast
            except OSError as error:
                raise FileMovedError(path, is_missing=True) from error
            if (current.st_dev, current.st_ino) != (device, inode):
                raise FileMovedError(path, is_missing=False)


def make_private(path: Path) -> None:
    """Create the file if it does not exist, and restrict it and SQLite's files beside it to the owner.

    Raises:
        OSError: It cannot be created, or is not writable.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # SQLite gives the files beside it (-wal, -shm) the mode of this one.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    for each in (path, *_wal_files(path)):
        if each.exists() and each.stat().st_mode & 0o077:
            each.chmod(0o600)


def connect(path: Path) -> sqlite3.Connection:
    """Open a file in autocommit mode, for one thread at a time."""
    return sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)


def limit_wal(database: sqlite3.Connection) -> None:
    """Have the WAL checkpointed at 1 MiB and truncated to that; otherwise it may fill the disk."""
    database.execute(f"PRAGMA wal_autocheckpoint = {MAX_WAL_BYTES // PAGE_BYTES}")
    database.execute(f"PRAGMA journal_size_limit = {MAX_WAL_BYTES}")


def checkpoint(database: sqlite3.Connection) -> bool:
    """Write the WAL back and truncate it; ``False`` while another process is reading.

    Raises:
        sqlite3.Error: It cannot be written.
    """
    return bool(database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0)


def connect_reading(path: Path) -> sqlite3.Connection:
    """Open an existing file for reading, also in a directory that cannot be written.

    Raises:
        sqlite3.Error: It cannot be read, or only without the latest transactions.
    """
    log = _wal_files(path)[0]
    try:
        return _connect_reading(path, "mode=ro")
    except sqlite3.OperationalError:
        # Reading without locks ignores the log: its transactions would be missing.
        if log.exists() and log.stat().st_size:
            raise
        return _connect_reading(path, "immutable=1")


def integrity_error(database: sqlite3.Connection) -> str | None:
    """Return what is wrong with the file, ``None`` if it is intact.

    Raises:
        sqlite3.DatabaseError: It is not a database.
    """
    result = str(database.execute("PRAGMA quick_check(1)").fetchone()[0])
    return None if result == "ok" else result


def is_damage(error: BaseException) -> bool:
    """Return whether an error reports a damaged file, or one that is not SQLite's."""
    return isinstance(error, DamagedFileError) or (isinstance(error, sqlite3.Error) and code_of(error) in DAMAGE_CODES)


def code_of(error: sqlite3.Error) -> int | None:
    """Return SQLite's primary result code; ``None`` for errors that did not come from SQLite."""
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


def version_of(database: sqlite3.Connection) -> int:
    return int(database.execute("PRAGMA user_version").fetchone()[0])


def check_version(database: sqlite3.Connection, steps: Steps, *, path: Path) -> None:
    """Refuse a file with a newer schema than ``steps``.

    Raises:
        InferenceCenterError: ``storage_unavailable``; it names the program that wrote the file, if known.
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
        hint=f"The file is intact, leave it where it is: run {writer or 'the newer inferencecenter'} or a later one, or"
        " `inferencecenter restore` a backup that this version made.",
    )


def migrate(database: sqlite3.Connection, steps: Steps, *, path: Path) -> None:
    """Apply the missing migration steps, all or none, and record which program did.

    Raises:
        InferenceCenterError: ``storage_unavailable`` for a file with a newer schema.
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
            # Not one of ``steps``: programs of every version read it.
            database.execute("CREATE TABLE IF NOT EXISTS written_by (program TEXT NOT NULL) STRICT")
            database.execute("DELETE FROM written_by")
            database.execute("INSERT INTO written_by VALUES (?)", (f"inferencecenter {__version__}",))


@contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[None]:
    """Commit all statements of the block together, or none."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        # On a full disk SQLite has rolled back already.
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise


def copy(source: Path, target: Path) -> None:
    """Copy a consistent snapshot of a file, also while others write it, to a new one.

    Raises:
        OSError: The target exists, or cannot be created.
        sqlite3.Error: The source cannot be read, or the target cannot be written.
    """
    os.close(os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    reading = connect_reading(source)
    try:
        writing = connect(target)
        try:
            # In one step: a copy in several restarts with every change by another process.
            reading.backup(writing)
        finally:
            writing.close()
    finally:
        reading.close()


def replace_file(new: Path, path: Path, *, aside: Path | None, write_back: bool = True) -> None:
    """Rename the file ``new`` to ``path``; an existing one and its log are renamed to ``aside``.

    A log without its file is moved as well: it would be read as that of ``new``.

    No other program may have any of them open. ``path`` leads to one of the two at each moment. With ``write_back`` the
    log is checkpointed before, which changes the file.

    Raises:
        OSError: A file cannot be renamed; ``aside`` exists already.
    """
    _sync(new)
    if aside is not None:
        if write_back and path.exists():
            # An empty log needs no rename, and no moment at which its file is without it.
            with contextlib.suppress(sqlite3.Error), contextlib.closing(connect(path)) as database:
                checkpoint(database)
        if path.exists():
            aside.hardlink_to(path)
        for log, other in zip(_wal_files(path), _wal_files(aside), strict=True):
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


def database_exists(path: Path) -> bool:
    """Return whether the file, or one of SQLite's files beside it, exists."""
    return any(each.exists() for each in (path, *_wal_files(path)))


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
        # SQLite opens the file at the first statement.
        version_of(database)
    except sqlite3.Error:
        database.close()
        raise
    return database


def _writer_of(database: sqlite3.Connection) -> str | None:
    """Return the program that last migrated the file; ``None`` if none was recorded."""
    try:
        row = database.execute("SELECT program FROM written_by").fetchone()
    except sqlite3.OperationalError:
        return None
    return None if row is None else str(row[0])


def _wal_files(path: Path) -> tuple[Path, Path]:
    """Return the paths of a file's log and of the log's index."""
    return path.with_name(path.name + "-wal"), path.with_name(path.name + "-shm")

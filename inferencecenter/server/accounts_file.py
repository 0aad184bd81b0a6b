"""The SQLite file under the accounts: made private, migrated step by step, never overwritten."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from inferencecenter import sqlite_file
from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.sqlite_file import DamagedFileError, FileIdentity, FileMovedError, is_damage

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from inferencecenter.sqlite_file import Steps

_HINT: Final = "Check that it and its directory are yours and writable, and that the disk has room."
DAMAGED_HINT: Final = (
    "`inferencecenter restore` a backup. Without one, move it away while no daemon runs, which forgets all clients and"
    " tokens."
)
"""What an operator can do about a damaged file."""
_MOVED_HINT: Final = (
    "Put it back, or restore a backup, and start the daemon again: what is open here is not what others change."
)

MIGRATIONS: Final[Steps] = (
    (
        """
        CREATE TABLE clients (
            client_id TEXT PRIMARY KEY,
            max_sessions INTEGER NOT NULL,
            priority TEXT NOT NULL,
            scopes TEXT NOT NULL,
            created_at REAL NOT NULL
        ) STRICT
        """,
        """
        CREATE TABLE tokens (
            token_id TEXT PRIMARY KEY,
            client_id TEXT NOT NULL REFERENCES clients ON DELETE CASCADE,
            name TEXT NOT NULL,
            secret_sha256 BLOB NOT NULL,
            created_at REAL NOT NULL,
            expires_at REAL,
            last_used_at REAL,
            revoked_at REAL
        ) STRICT
        """,
        "CREATE INDEX tokens_by_client ON tokens (client_id)",
    ),
    (
        "ALTER TABLE clients ADD COLUMN retention_days REAL",
        """
        CREATE TABLE audit (
            id INTEGER PRIMARY KEY,
            at REAL NOT NULL,
            last_at REAL NOT NULL,
            count INTEGER NOT NULL,
            event TEXT NOT NULL,
            client_id TEXT,
            token_id TEXT,
            address TEXT,
            detail TEXT NOT NULL
        ) STRICT
        """,
        "CREATE INDEX audit_by_event ON audit (event)",
        "CREATE INDEX audit_by_address ON audit (event, address, at)",
    ),
    (
        # As JSON, only those that are set.
        "ALTER TABLE clients ADD COLUMN limits TEXT NOT NULL DEFAULT '{}'",
        "ALTER TABLE tokens ADD COLUMN limits TEXT NOT NULL DEFAULT '{}'",
    ),
)


class AccountsFile:
    """An open database; may be used from any thread. Who reads does not wait for who writes."""

    def __init__(self, path: Path, *, reader: sqlite3.Connection, writer: sqlite3.Connection) -> None:
        self._path = path
        self.identity: FileIdentity | None = None
        self._reader = reader
        self._writer = writer
        self._reading = threading.Lock()
        self._writing = threading.Lock()

    @classmethod
    def open(cls, path: Path) -> AccountsFile:
        """Open or make the file at ``path`` and bring it up to date.

        Raises:
            InferenceCenterError: ``storage_unavailable``.
        """
        try:
            sqlite_file.make_private(path)
        except OSError as error:
            raise unusable(path, error.strerror or str(error)) from error
        file = cls(path, reader=sqlite_file.connect(path), writer=sqlite_file.connect(path))
        try:
            file._prepare()
        except InferenceCenterError:
            file.close()
            raise
        return file

    def close(self) -> None:
        """Close the file."""
        with self._reading:
            self._reader.close()
        with self._writing:
            self._writer.close()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Lend the database for queries; its errors become ``storage_unavailable``."""
        with self._reading, self._mapped_errors():
            self.check()
            yield self._reader

    @contextmanager
    def transaction(self, *, durable: bool = True) -> Iterator[sqlite3.Connection]:
        """Lend the database for statements that happen together or not at all; errors become ``storage_unavailable``.

        Args:
            durable: Whether they survive a power cut from then on; otherwise a crash of this process, and no wait for
                the disk.
        """
        with self._writing, self._mapped_errors():
            self.check()
            database = self._writer
            database.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            with sqlite_file.transaction(database):
                yield database
            self.check()

    @contextmanager
    def _mapped_errors(self) -> Iterator[None]:
        try:
            yield
        except FileMovedError as error:
            raise InferenceCenterError(ErrorCode.STORAGE_UNAVAILABLE, str(error), hint=_MOVED_HINT) from error
        except sqlite3.Error as error:
            raise unusable(self._path, str(error), damaged=is_damage(error)) from error

    def check(self) -> None:
        """Compare the file that is open with the one at its path; three system calls.

        Raises:
            FileMovedError: It was deleted, moved or replaced: accounts that others change are not those here.
        """
        if self.identity is not None:
            self.identity.check()

    def _prepare(self) -> None:
        with self._mapped_errors():
            sqlite_file.check_version(self._writer, MIGRATIONS, path=self._path)
            if (found := sqlite_file.damage(self._writer)) is not None:
                raise DamagedFileError(found)
            self._writer.execute("PRAGMA journal_mode = WAL")
            sqlite_file.bound_log(self._writer)
            self._writer.execute("PRAGMA foreign_keys = ON")
            self._reader.execute("PRAGMA query_only = ON")
            self._writer.execute("PRAGMA synchronous = FULL")
            sqlite_file.migrate(self._writer, MIGRATIONS, path=self._path)
            self.identity = FileIdentity.of(self._path)


def unusable(path: Path, reason: str, *, damaged: bool = False) -> InferenceCenterError:
    """Return the error for a file of accounts that cannot be used because of ``reason``."""
    return sqlite_file.unusable(path, reason, hint=DAMAGED_HINT if damaged else _HINT)

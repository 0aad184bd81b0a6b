"""The SQLite file under the accounts: made private, migrated step by step, never overwritten."""

from __future__ import annotations

import os
import sqlite3
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from inferencecenter.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_BUSY_TIMEOUT_S: Final = 2.0

# ``PRAGMA user_version`` counts the steps a file has been through; append, never change.
_MIGRATIONS: Final = (
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
)


class AccountsFile:
    """An open database. Not for use by two threads at once."""

    def __init__(self, path: Path, database: sqlite3.Connection) -> None:
        self._path = path
        self._database = database

    @classmethod
    def open(cls, path: Path) -> AccountsFile:
        """Open or make the file at ``path`` and bring it up to date.

        Raises:
            InferenceCenterError: ``storage_unavailable``.
        """
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # SQLite gives the files beside it (-wal, -shm) the mode of this one.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise unusable(path, error.strerror or str(error)) from error
        database = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        file = cls(path, database)
        try:
            file._prepare()
        except InferenceCenterError:
            database.close()
            raise
        return file

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    @contextmanager
    def mapped_errors(self) -> Iterator[sqlite3.Connection]:
        """Lend the database; its errors become ``storage_unavailable``."""
        try:
            yield self._database
        except sqlite3.Error as error:
            raise unusable(self._path, str(error)) from error

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Lend the database for statements that happen together or not at all."""
        with self.mapped_errors() as database:
            database.execute("BEGIN IMMEDIATE")
            try:
                yield database
            except BaseException:
                database.execute("ROLLBACK")
                raise
            database.execute("COMMIT")

    def _prepare(self) -> None:
        with self.mapped_errors() as database:
            if (found := database.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
                raise unusable(self._path, str(found))
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA foreign_keys = ON")
        with self.transaction() as database:
            version = database.execute("PRAGMA user_version").fetchone()[0]
            if version > len(_MIGRATIONS):
                raise unusable(self._path, f"it is of version {version}, made by a newer inferencecenter")
            for step in _MIGRATIONS[version:]:
                for statement in step:
                    database.execute(statement)
            database.execute(f"PRAGMA user_version = {len(_MIGRATIONS)}")


def unusable(path: Path, reason: str) -> InferenceCenterError:
    """Return the error for a file of accounts that cannot be used because of ``reason``."""
    return InferenceCenterError(
        ErrorCode.STORAGE_UNAVAILABLE,
        f"{path} cannot be used: {reason}",
        hint="Check that it and its directory are yours and writable and the disk has room; a damaged file may be"
        " moved away, which forgets all clients and tokens.",
    )

"""The SQLite database of accounts: private file, stepwise migrations, rows. An existing file is never overwritten.

Limits are stored as a JSON object of those that are set.
"""

from __future__ import annotations

import sqlite3
import threading
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from inferencecenter.auth.account import ClientInfo, TokenInfo
from inferencecenter.config.limits import AccessLimits
from inferencecenter.core import sqlite_file
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.core.sqlite_file import DamagedFileError, FileIdentity, FileMovedError, is_damage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from inferencecenter.core.sqlite_file import Steps


_HINT: Final = "Check that it and its directory are yours and writable, and that the disk has room."
DAMAGED_HINT: Final = (
    "`inferencecenter restore` a backup. Without one, move it away while no daemon runs, which forgets all clients and"
    " tokens."
)
"""Hint for a damaged file."""
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
        # JSON object of the limits that are set.
        "ALTER TABLE clients ADD COLUMN limits TEXT NOT NULL DEFAULT '{}'",
        "ALTER TABLE tokens ADD COLUMN limits TEXT NOT NULL DEFAULT '{}'",
    ),
    ("ALTER TABLE audit ADD COLUMN actor TEXT",),
    ("ALTER TABLE clients ADD COLUMN archive_mib INTEGER",),
)


class AccountsFile:
    """An open database; thread-safe. Readers do not wait for a writer."""

    def __init__(self, path: Path, *, reader: sqlite3.Connection, writer: sqlite3.Connection) -> None:
        self._path = path
        self.identity: FileIdentity | None = None
        self._reader = reader
        self._writer = writer
        self._reading = threading.Lock()
        self._writing = threading.Lock()

    @classmethod
    def open(cls, path: Path) -> AccountsFile:
        """Open or create the file at ``path`` and migrate it.

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
        with self._reading:
            self._reader.close()
        with self._writing:
            self._writer.close()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Context manager for queries; SQLite errors become ``storage_unavailable``."""
        with self._reading, self._mapped_errors():
            self.check()
            yield self._reader

    @contextmanager
    def transaction(self, *, durable: bool = True) -> Iterator[sqlite3.Connection]:
        """Context manager for a transaction; SQLite errors become ``storage_unavailable``.

        Args:
            durable: Whether it survives a power failure; otherwise it survives a crash of this process and does not
                wait for the disk.
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
        """Compare the open file with the one at its path, by three system calls.

        Raises:
            FileMovedError: It was deleted, moved or replaced, so changes by other processes are not seen.
        """
        if self.identity is not None:
            self.identity.check()

    def _prepare(self) -> None:
        with self._mapped_errors():
            sqlite_file.check_version(self._writer, MIGRATIONS, path=self._path)
            if (found := sqlite_file.integrity_error(self._writer)) is not None:
                raise DamagedFileError(found)
            self._writer.execute("PRAGMA journal_mode = WAL")
            sqlite_file.limit_wal(self._writer)
            self._writer.execute("PRAGMA foreign_keys = ON")
            self._reader.execute("PRAGMA query_only = ON")
            self._writer.execute("PRAGMA synchronous = FULL")
            sqlite_file.migrate(self._writer, MIGRATIONS, path=self._path)
            self.identity = FileIdentity.of(self._path)


def unusable(path: Path, reason: str, *, damaged: bool = False) -> InferenceCenterError:
    return sqlite_file.unusable(path, reason, hint=DAMAGED_HINT if damaged else _HINT)


def limits_to_json(limits: AccessLimits) -> str:
    return limits.model_dump_json(include=set(limits.given()))


@lru_cache(maxsize=4096)
def limits_from_json(text: str) -> AccessLimits:
    return AccessLimits.model_validate_json(text)


def read_limits(database: sqlite3.Connection, wanted: Iterable[tuple[str, str]]) -> dict[tuple[str, str], AccessLimits]:
    """Return the limits of the wanted tokens that exist, by client and token id; clients have the empty token id."""
    found: dict[tuple[str, str], AccessLimits] = {}
    for client_id, token_id in wanted:
        row = database.execute(
            "SELECT c.limits, t.limits FROM clients c"
            " LEFT JOIN tokens t ON t.token_id = ?2 AND t.client_id = c.client_id WHERE c.client_id = ?1",
            (client_id, token_id),
        ).fetchone()
        if row is None or (token_id and row[1] is None):
            continue
        own = limits_from_json(row[0])
        found[client_id, token_id] = limits_from_json(row[1]).over(own) if token_id else own
    return found


def client_from_row(row: tuple[Any, ...]) -> ClientInfo:
    """Return a client from the columns ``client_id`` to ``limits`` and the number of its tokens."""
    client_id, max_sessions, priority, scopes, retention_days, archive_mib, created_at, limits, n_tokens = row
    return ClientInfo(
        client_id=client_id,
        max_sessions=max_sessions,
        priority=priority,
        scopes=tuple(scopes.split()),
        retention_days=retention_days,
        archive_mib=archive_mib,
        created_at=created_at,
        tokens=n_tokens,
        limits=limits_from_json(limits),
    )


def token_from_row(row: tuple[Any, ...]) -> TokenInfo:
    """Return a token from the columns ``token_id`` to ``last_used_at``, whether it is revoked, and ``limits``."""
    token_id, client_id, name, created_at, expires_at, last_used_at, is_revoked, limits = row
    return TokenInfo(
        token_id=token_id,
        client_id=client_id,
        name=name,
        created_at=created_at,
        expires_at=expires_at,
        last_used_at=last_used_at,
        revoked=bool(is_revoked),
        limits=limits_from_json(limits),
    )


def format_limits(limits: AccessLimits) -> str:
    """Return the limits that are set, for display: ``tokens_per_day=5000 models=a,b``; empty for none."""
    return " ".join(f"{name}={_display(value)}" for name, value in limits.given().items())


def _display(value: object) -> str:
    if value is None:
        return "none"
    return ",".join(value) if isinstance(value, tuple) else str(value)

"""The accounts database: migrations, transactions, and reads beside a writer."""

from __future__ import annotations

import hashlib
import sqlite3
import threading
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from inferencecenter.auth.accounts import Accounts
from inferencecenter.auth.accounts_db import AccountsFile
from inferencecenter.core.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SECRET = "5" * 64
VERSION_1 = f"""
    CREATE TABLE clients (
        client_id TEXT PRIMARY KEY, max_sessions INTEGER NOT NULL, priority TEXT NOT NULL, scopes TEXT NOT NULL,
        created_at REAL NOT NULL
    ) STRICT;
    CREATE TABLE tokens (
        token_id TEXT PRIMARY KEY, client_id TEXT NOT NULL REFERENCES clients ON DELETE CASCADE, name TEXT NOT NULL,
        secret_sha256 BLOB NOT NULL, created_at REAL NOT NULL, expires_at REAL, last_used_at REAL, revoked_at REAL
    ) STRICT;
    CREATE INDEX tokens_by_client ON tokens (client_id);
    INSERT INTO clients VALUES ('ada', 5, 'normal', 'user', 1000.0);
    INSERT INTO tokens VALUES
        ('00112233aabb', 'ada', 'phone', x'{hashlib.sha256(SECRET.encode()).hexdigest()}', 1000.0, NULL, 1500.0, NULL);
    PRAGMA user_version = 1;
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of the file."""
    return tmp_path / "accounts.sqlite3"


@pytest.fixture
def file(path: Path) -> Iterator[AccountsFile]:
    """A new file with a table of numbers."""
    opened = AccountsFile.open(path)
    with opened.transaction() as database:
        database.execute("CREATE TABLE numbers (number INTEGER)")
    yield opened
    opened.close()


def numbers(file: AccountsFile) -> list[int]:
    """Return the committed numbers."""
    with file.reading() as database:
        return [row[0] for row in database.execute("SELECT number FROM numbers ORDER BY number")]


def add(file: AccountsFile, number: int, *, durable: bool = True) -> None:
    """Commit a number."""
    with file.transaction(durable=durable) as database:
        database.execute("INSERT INTO numbers VALUES (?)", (number,))


def test_version_1_is_migrated(path: Path) -> None:
    """Clients and tokens are unchanged, without a retention, and the audit log is empty."""
    with closing(sqlite3.connect(path)) as database:
        database.executescript(VERSION_1)
    with closing(Accounts.open(path, clock=lambda: 2000.0)) as accounts:
        account = accounts.verify_token(f"ic_00112233aabb_{SECRET}")
        assert account is not None
        assert (account.client_id, account.max_sessions, account.retention_days) == ("ada", 5, None)
        assert [token.name for token in accounts.list_tokens()] == ["phone"]
        assert accounts.audit_lines(last=10) == []
        accounts.ensure_client("bob", max_sessions=1, priority="normal", retention_days=2)
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (5,)
        assert database.execute("SELECT client_id, retention_days FROM clients ORDER BY 1").fetchall() == [
            ("ada", None),
            ("bob", 2.0),
        ]


def test_migrated_schema_equals_a_new_one(tmp_path: Path) -> None:
    """Tables and indexes are equal."""
    schemas = []
    for name, script in (("old", VERSION_1), ("new", "")):
        with closing(sqlite3.connect(tmp_path / name)) as database:
            database.executescript(script)
        AccountsFile.open(tmp_path / name).close()
        with closing(sqlite3.connect(tmp_path / name)) as database:
            tables = [row[0] for row in database.execute("SELECT name FROM sqlite_master ORDER BY name")]
            columns = {table: database.execute(f"PRAGMA table_xinfo({table})").fetchall() for table in tables}
            # Migrations append columns, so their order differs.
            schemas.append({table: sorted(column[1:] for column in found) for table, found in columns.items()})
    assert schemas[0] == schemas[1]


def test_failed_migration_changes_nothing(path: Path) -> None:
    """The file stays at version 1 and is refused."""
    with closing(sqlite3.connect(path)) as database:
        database.executescript(VERSION_1 + "CREATE TABLE audit (x);")
    with pytest.raises(InferenceCenterError, match="audit already exists") as caught:
        AccountsFile.open(path)
    assert caught.value.code is ErrorCode.STORAGE_UNAVAILABLE
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (1,)
        assert len(database.execute("PRAGMA table_info(clients)").fetchall()) == 5


def test_reads_do_not_wait_for_a_transaction(file: AccountsFile) -> None:
    """Another thread reads the last committed state."""
    seen: list[list[int]] = []
    with file.transaction() as database:
        database.execute("INSERT INTO numbers VALUES (1)")
        reader = threading.Thread(target=lambda: seen.append(numbers(file)))
        reader.start()
        reader.join(timeout=60)
    assert seen == [[]]
    assert numbers(file) == [1]


def test_read_connection_cannot_write(file: AccountsFile) -> None:
    """A write outside a transaction is refused."""
    with pytest.raises(InferenceCenterError, match="readonly"), file.reading() as database:
        database.execute("INSERT INTO numbers VALUES (1)")
    assert numbers(file) == []


def test_concurrent_transactions_are_serialized(file: AccountsFile) -> None:
    """Transactions of several threads are all applied."""
    threads = [threading.Thread(target=add, args=(file, number)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert numbers(file) == list(range(8))


@pytest.mark.parametrize(("durable", "level"), [(True, 2), (False, 1)])
def test_only_durable_transactions_are_synced(file: AccountsFile, durable: bool, level: int) -> None:
    """``durable`` uses SQLite's FULL, otherwise NORMAL, independently of the previous transaction."""
    add(file, 1, durable=not durable)
    with file.transaction(durable=durable) as database:
        assert database.execute("PRAGMA synchronous").fetchone() == (level,)


def test_failed_commit_leaves_the_file_usable(file: AccountsFile) -> None:
    """Only that transaction is lost."""
    with file.transaction() as database:
        database.execute("CREATE TABLE parents (id INTEGER PRIMARY KEY)")
        database.execute("CREATE TABLE children (id INTEGER REFERENCES parents DEFERRABLE INITIALLY DEFERRED)")
    with pytest.raises(InferenceCenterError, match="FOREIGN KEY"), file.transaction() as database:
        database.execute("INSERT INTO children VALUES (1)")
    add(file, 1)
    assert numbers(file) == [1]


def test_full_disk_is_reported_and_recovers(file: AccountsFile) -> None:
    """The error is about the disk although SQLite has ended the transaction, and later writes work."""
    with file.transaction() as database:
        pages = database.execute("PRAGMA page_count").fetchone()[0]
        database.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(InferenceCenterError, match="full"), file.transaction() as database:
        database.execute("INSERT INTO numbers SELECT value FROM json_each(?)", (str(list(range(9999))),))
    with file.transaction() as database:
        database.execute("PRAGMA max_page_count = 1000000")
    add(file, 1)
    assert numbers(file) == [1]

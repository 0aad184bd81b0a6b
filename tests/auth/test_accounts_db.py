"""Tests of the file under the accounts: migrations, transactions, readers beside writers."""

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
    """Where the file is."""
    return tmp_path / "accounts.sqlite3"


@pytest.fixture
def file(path: Path) -> Iterator[AccountsFile]:
    """A new file with a table that counts."""
    opened = AccountsFile.open(path)
    with opened.transaction() as database:
        database.execute("CREATE TABLE numbers (number INTEGER)")
    yield opened
    opened.close()


def numbers(file: AccountsFile) -> list[int]:
    """Return what was committed."""
    with file.reading() as database:
        return [row[0] for row in database.execute("SELECT number FROM numbers ORDER BY number")]


def add(file: AccountsFile, number: int, *, durable: bool = True) -> None:
    """Commit a number."""
    with file.transaction(durable=durable) as database:
        database.execute("INSERT INTO numbers VALUES (?)", (number,))


def test_a_file_of_version_1_is_brought_up_to_date(path: Path) -> None:
    """Clients and tokens are as before, without a retention of their own, and there is an empty audit log."""
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
        assert database.execute("PRAGMA user_version").fetchone() == (3,)
        assert database.execute("SELECT client_id, retention_days FROM clients ORDER BY 1").fetchall() == [
            ("ada", None),
            ("bob", 2.0),
        ]


def test_a_migrated_file_is_the_same_as_a_new_one(tmp_path: Path) -> None:
    """Both ways lead to the same tables and indexes."""
    schemas = []
    for name, script in (("old", VERSION_1), ("new", "")):
        with closing(sqlite3.connect(tmp_path / name)) as database:
            database.executescript(script)
        AccountsFile.open(tmp_path / name).close()
        with closing(sqlite3.connect(tmp_path / name)) as database:
            tables = [row[0] for row in database.execute("SELECT name FROM sqlite_master ORDER BY name")]
            columns = {table: database.execute(f"PRAGMA table_xinfo({table})").fetchall() for table in tables}
            # Columns come in the order that they were added.
            schemas.append({table: sorted(column[1:] for column in found) for table, found in columns.items()})
    assert schemas[0] == schemas[1]


def test_a_migration_that_fails_changes_nothing(path: Path) -> None:
    """A file whose second step cannot be done stays at version 1 and is refused."""
    with closing(sqlite3.connect(path)) as database:
        database.executescript(VERSION_1 + "CREATE TABLE audit (x);")
    with pytest.raises(InferenceCenterError, match="audit already exists") as caught:
        AccountsFile.open(path)
    assert caught.value.code is ErrorCode.STORAGE_UNAVAILABLE
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (1,)
        assert len(database.execute("PRAGMA table_info(clients)").fetchall()) == 5


def test_reading_does_not_wait_for_a_transaction(file: AccountsFile) -> None:
    """While one thread writes, another reads what was committed before."""
    seen: list[list[int]] = []
    with file.transaction() as database:
        database.execute("INSERT INTO numbers VALUES (1)")
        reader = threading.Thread(target=lambda: seen.append(numbers(file)))
        reader.start()
        reader.join(timeout=60)
    assert seen == [[]]
    assert numbers(file) == [1]


def test_what_reads_cannot_write(file: AccountsFile) -> None:
    """A statement that writes outside a transaction is refused."""
    with pytest.raises(InferenceCenterError, match="readonly"), file.reading() as database:
        database.execute("INSERT INTO numbers VALUES (1)")
    assert numbers(file) == []


def test_threads_take_turns_to_write(file: AccountsFile) -> None:
    """Transactions of several threads all happen."""
    threads = [threading.Thread(target=add, args=(file, number)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert numbers(file) == list(range(8))


@pytest.mark.parametrize(("durable", "level"), [(True, 2), (False, 1)])
def test_a_transaction_waits_for_the_disk_only_if_it_must_last(file: AccountsFile, durable: bool, level: int) -> None:
    """``durable`` is SQLite's FULL, otherwise NORMAL, whatever the one before was."""
    add(file, 1, durable=not durable)
    with file.transaction(durable=durable) as database:
        assert database.execute("PRAGMA synchronous").fetchone() == (level,)


def test_a_commit_that_fails_leaves_the_file_usable(file: AccountsFile) -> None:
    """What goes wrong only at the commit costs that transaction and not those after it."""
    with file.transaction() as database:
        database.execute("CREATE TABLE parents (id INTEGER PRIMARY KEY)")
        database.execute("CREATE TABLE children (id INTEGER REFERENCES parents DEFERRABLE INITIALLY DEFERRED)")
    with pytest.raises(InferenceCenterError, match="FOREIGN KEY"), file.transaction() as database:
        database.execute("INSERT INTO children VALUES (1)")
    add(file, 1)
    assert numbers(file) == [1]


def test_a_full_disk_is_told_and_passes(file: AccountsFile) -> None:
    """When SQLite itself has ended the transaction, the error is still about the disk, and later writes work."""
    with file.transaction() as database:
        pages = database.execute("PRAGMA page_count").fetchone()[0]
        database.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(InferenceCenterError, match="full"), file.transaction() as database:
        database.execute("INSERT INTO numbers SELECT value FROM json_each(?)", (str(list(range(9999))),))
    with file.transaction() as database:
        database.execute("PRAGMA max_page_count = 1000000")
    add(file, 1)
    assert numbers(file) == [1]

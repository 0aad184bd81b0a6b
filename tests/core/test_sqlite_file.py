"""The daemon's SQLite files."""

from __future__ import annotations

import contextlib
import sqlite3
import stat
from typing import TYPE_CHECKING

import pytest

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.core.sqlite_file import (
    FileIdentity,
    FileMovedError,
    connect,
    copy,
    integrity_error,
    make_private,
    migrate,
    transaction,
    version_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

STEPS = (("CREATE TABLE a (x)",), ("CREATE TABLE b (x)", "INSERT INTO b VALUES (1)"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of the file."""
    return tmp_path / "state" / "file.sqlite3"


@pytest.fixture
def database(path: Path) -> Iterator[sqlite3.Connection]:
    """An empty file."""
    make_private(path)
    with contextlib.closing(connect(path)) as opened:
        yield opened


def _tables(database: sqlite3.Connection) -> set[str]:
    return {name for (name,) in database.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}


def test_file_is_created_private(path: Path) -> None:
    """File and directory are the owner's; existing files lose foreign permissions and keep their content."""
    make_private(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    log = path.with_name("file.sqlite3-wal")
    log.write_bytes(b"x")
    for each in (path, log):
        each.chmod(0o644)
    make_private(path)
    assert {stat.S_IMODE(each.stat().st_mode) for each in (path, log)} == {0o600}
    assert log.read_bytes() == b"x"


def test_each_migration_runs_once(path: Path, database: sqlite3.Connection) -> None:
    """A file continues from its version."""
    migrate(database, STEPS[:1], path=path)
    assert (_tables(database), version_of(database)) == ({"a", "written_by"}, 1)
    for _ in range(2):
        migrate(database, STEPS, path=path)
        assert (_tables(database), version_of(database)) == ({"a", "b", "written_by"}, 2)
    assert database.execute("SELECT * FROM b").fetchall() == [(1,)]


def test_failed_migration_is_rolled_back(path: Path, database: sqlite3.Connection) -> None:
    """The earlier steps of the same attempt are rolled back, too."""
    with pytest.raises(sqlite3.OperationalError):
        migrate(database, (*STEPS, ("CREATE TABLE c (x)", "nonsense")), path=path)
    assert (_tables(database), version_of(database)) == (set(), 0)


def test_newer_file_is_refused(path: Path, database: sqlite3.Connection) -> None:
    """The error names the file, its program and a remedy; the file is unchanged."""
    migrate(database, STEPS, path=path)
    database.execute("UPDATE written_by SET program = 'inferencecenter 9.1'")
    with pytest.raises(
        InferenceCenterError, match=r"file\.sqlite3 was written by inferencecenter 9\.1 .* version 2"
    ) as caught:
        migrate(database, STEPS[:1], path=path)
    assert caught.value.code is ErrorCode.STORAGE_UNAVAILABLE
    assert caught.value.hint is not None
    assert "run inferencecenter 9.1 or a later one" in caught.value.hint
    assert "move" not in caught.value.hint
    assert version_of(database) == 2


def test_newer_file_without_program_name_is_refused(path: Path, database: sqlite3.Connection) -> None:
    """The error has the version instead."""
    migrate(database, STEPS, path=path)
    database.execute("DROP TABLE written_by")
    with pytest.raises(InferenceCenterError, match="a newer inferencecenter and is of version 2"):
        migrate(database, STEPS[:1], path=path)


def _gone(path: Path) -> None:
    path.unlink()


def _replaced(path: Path) -> None:
    path.with_name("other").write_bytes(path.read_bytes())
    path.with_name("other").replace(path)


def _log_gone(path: Path) -> None:
    path.with_name(path.name + "-wal").unlink()


def _index_gone(path: Path) -> None:
    path.with_name(path.name + "-shm").unlink()


@pytest.mark.parametrize(
    ("hurt", "is_missing"), [(_gone, True), (_replaced, False), (_log_gone, True), (_index_gone, True)]
)
def test_moved_or_replaced_file_is_detected(
    path: Path, database: sqlite3.Connection, hurt: Callable[[Path], None], *, is_missing: bool
) -> None:
    """A file that was deleted or replaced, or that lost its WAL or index, raises, because writes would be lost."""
    database.execute("PRAGMA journal_mode = WAL")
    migrate(database, STEPS, path=path)
    identity = FileIdentity.of(path)
    identity.check()
    hurt(path)
    with pytest.raises(FileMovedError, match=r"file\.sqlite3") as caught:
        identity.check()
    assert caught.value.is_missing is is_missing


def test_transactions_are_atomic(database: sqlite3.Connection) -> None:
    """This holds however one ends early, even if SQLite has ended it."""
    database.execute("CREATE TABLE a (x)")
    with pytest.raises(sqlite3.OperationalError, match="nonsense"):
        _insert_and(database, "nonsense")
    trigger = "CREATE TRIGGER t BEFORE INSERT ON a WHEN NEW.x = 3 BEGIN SELECT RAISE(ROLLBACK, 'rolled back'); END"
    database.execute(trigger)
    with pytest.raises(sqlite3.IntegrityError, match="rolled back"):
        _insert_and(database, "INSERT INTO a VALUES (3)")
    assert database.execute("SELECT * FROM a").fetchall() == []
    with transaction(database):
        database.execute("INSERT INTO a VALUES (2)")
    assert database.execute("SELECT * FROM a").fetchall() == [(2,)]


def test_backup_holds_committed_data_during_writes(path: Path, database: sqlite3.Connection) -> None:
    """It is private and complete without open transactions; an existing target is refused."""
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("CREATE TABLE a (x)")
    database.execute("INSERT INTO a VALUES (1)")
    target = path.with_name("copy.sqlite3")
    with transaction(database):
        database.execute("INSERT INTO a VALUES (2)")
        copy(path, target)
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    with contextlib.closing(connect(target)) as copied:
        assert integrity_error(copied) is None
        assert copied.execute("SELECT * FROM a").fetchall() == [(1,)]
    with pytest.raises(FileExistsError):
        copy(path, target)


def _insert_and(database: sqlite3.Connection, statement: str) -> None:
    with transaction(database):
        database.execute("INSERT INTO a VALUES (1)")
        database.execute(statement)

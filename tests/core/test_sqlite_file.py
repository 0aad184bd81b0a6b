"""Tests of SQLite files of ours."""

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
    damage,
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
    """Where the file will be."""
    return tmp_path / "state" / "file.sqlite3"


@pytest.fixture
def database(path: Path) -> Iterator[sqlite3.Connection]:
    """An empty file."""
    make_private(path)
    with contextlib.closing(connect(path)) as opened:
        yield opened


def _tables(database: sqlite3.Connection) -> set[str]:
    return {name for (name,) in database.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}


def test_a_file_is_private_before_anything_is_in_it(path: Path) -> None:
    """It and its directory are the owner's; what others may read loses that, what is there stays."""
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


def test_steps_are_taken_once_each(path: Path, database: sqlite3.Connection) -> None:
    """A file goes on from where it is, and one that is there stays as it is."""
    migrate(database, STEPS[:1], path=path)
    assert (_tables(database), version_of(database)) == ({"a", "written_by"}, 1)
    for _ in range(2):
        migrate(database, STEPS, path=path)
        assert (_tables(database), version_of(database)) == ({"a", "b", "written_by"}, 2)
    assert database.execute("SELECT * FROM b").fetchall() == [(1,)]


def test_a_step_that_fails_leaves_nothing(path: Path, database: sqlite3.Connection) -> None:
    """Neither of it nor of those before it in the same attempt."""
    with pytest.raises(sqlite3.OperationalError):
        migrate(database, (*STEPS, ("CREATE TABLE c (x)", "nonsense")), path=path)
    assert (_tables(database), version_of(database)) == (set(), 0)


def test_a_newer_file_is_refused_by_name(path: Path, database: sqlite3.Connection) -> None:
    """It says which file, which program wrote it, and what to do; the file is left alone, and need not be moved."""
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


def test_a_newer_file_of_an_unknown_program_is_refused(path: Path, database: sqlite3.Connection) -> None:
    """Where no program has noted its name the version has to do."""
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
def test_an_open_file_that_is_elsewhere_is_noticed(
    path: Path, database: sqlite3.Connection, hurt: Callable[[Path], None], *, is_missing: bool
) -> None:
    """Deleted, replaced, or without what SQLite has beside it: what is written to it now would be lost."""
    database.execute("PRAGMA journal_mode = WAL")
    migrate(database, STEPS, path=path)
    identity = FileIdentity.of(path)
    identity.check()
    hurt(path)
    with pytest.raises(FileMovedError, match=r"file\.sqlite3") as caught:
        identity.check()
    assert caught.value.is_missing is is_missing


def test_a_transaction_happens_or_does_not(database: sqlite3.Connection) -> None:
    """Whatever ends it early, also where SQLite has ended it already."""
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


def test_a_copy_holds_what_is_committed_while_others_write(path: Path, database: sqlite3.Connection) -> None:
    """It is private, whole, and without what is not finished; a second one to the same place is refused."""
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("CREATE TABLE a (x)")
    database.execute("INSERT INTO a VALUES (1)")
    target = path.with_name("copy.sqlite3")
    with transaction(database):
        database.execute("INSERT INTO a VALUES (2)")
        copy(path, target)
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    with contextlib.closing(connect(target)) as copied:
        assert damage(copied) is None
        assert copied.execute("SELECT * FROM a").fetchall() == [(1,)]
    with pytest.raises(FileExistsError):
        copy(path, target)


def _insert_and(database: sqlite3.Connection, statement: str) -> None:
    with transaction(database):
        database.execute("INSERT INTO a VALUES (1)")
        database.execute(statement)

"""Reading rows page by page finds what SQLite finds in an intact file."""

from __future__ import annotations

import contextlib
import random
import sqlite3
import struct
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inferencecenter.sessions.store.sqlite_pages import PageFile

if TYPE_CHECKING:
    from pathlib import Path

PAGE_BYTES = 4096
NUMBERS = st.integers(-(2**63), 2**63 - 1)
TEXTS = st.one_of(
    st.text(max_size=30), st.integers(0, 20_000).map(lambda n: "ü" * n), st.sampled_from(["", "x" * 4061, "y" * 998])
)
BLOBS = st.one_of(st.binary(max_size=30), st.integers(0, 20_000).map(lambda n: b"\x01" * n))
ROWS = st.lists(
    st.tuples(NUMBERS, st.one_of(st.none(), NUMBERS, st.floats(allow_nan=False), TEXTS, BLOBS), TEXTS), max_size=40
)


def written(path: Path, rows: list[tuple[Any, ...]], *, rowid: bool) -> sqlite3.Connection:
    """Create a table with these rows, half of which are only in the WAL."""
    database = sqlite3.connect(path, isolation_level=None)
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = OFF")
    kind = "" if rowid else ", WITHOUT ROWID"
    database.execute(f"CREATE TABLE t (n INTEGER, a ANY, b TEXT, place INTEGER, PRIMARY KEY (place, n)) STRICT{kind}")
    for parity in (0, 1):
        values = [(*row, place) for place, row in enumerate(rows) if place % 2 == parity]
        database.execute("BEGIN")
        database.executemany("INSERT INTO t VALUES (?, ?, ?, ?)", values)
        database.execute("COMMIT")
        if parity == 0:
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    database.execute("PRAGMA cache_size = 5")
    database.execute("BEGIN")
    database.execute("INSERT INTO t VALUES (0, 0, ?, -1)", ("of a transaction that was not committed " * 9000,))
    return database


@given(rows=ROWS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_page_reader_equals_sqlite(tmp_path: Path, rows: list[tuple[Any, ...]]) -> None:
    """Committed rows of any length are read, with and without row ids, from the file and its WAL."""
    for rowid in (True, False):
        path = tmp_path / "file"
        for each in tmp_path.iterdir():
            each.unlink()
        with contextlib.closing(written(path, rows, rowid=rowid)):
            log = path.with_name("file-wal")
            found = PageFile(path.read_bytes(), log.read_bytes() if log.exists() else b"")
            values = [
                row.values if rowid else (row.values[1], row.values[2], row.values[3], row.values[0])
                for row in found.rows()
                if len(row.values) == 4
            ]
        expected = [(*row, place) for place, row in enumerate(rows)]
        assert sorted(values, key=lambda row: str(row[3]).zfill(3)) == expected
        assert found.n_damaged == 0


def test_orphaned_pages_are_read(tmp_path: Path) -> None:
    """Without the first page, which leads to all others, only its own rows are lost."""
    path = tmp_path / "file"
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("CREATE TABLE t (a TEXT) STRICT")
        database.execute("BEGIN")
        database.executemany("INSERT INTO t VALUES (?)", [(f"{number} " * 20,) for number in range(500)])
        database.execute("COMMIT")
    found = PageFile(bytes(PAGE_BYTES) + path.read_bytes()[PAGE_BYTES:])
    assert {row.values for row in found.rows()} == {(f"{number} " * 20,) for number in range(500)}


@given(seed=st.integers(0, 2**32), n_bytes=st.integers(0, 3 * PAGE_BYTES))
@settings(deadline=None)
def test_reading_any_bytes_terminates(seed: int, n_bytes: int) -> None:
    """Random pages do not raise."""
    content = random.Random(seed).randbytes(n_bytes)
    log = struct.pack(">6I", 0x377F0682, 0, PAGE_BYTES, 0, 0, 0) + content
    for beginning in (b"", b"\r\0\0\0\x40", b"\n\0\0\0\x40", b"\x02\0\0\0\x40"):
        list(PageFile(beginning + content, log).rows())

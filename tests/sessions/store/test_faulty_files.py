"""Unusable files are loaded as far as possible and left untouched."""

from __future__ import annotations

import contextlib
import sqlite3
from dataclasses import replace
from typing import TYPE_CHECKING

import orjson
import pytest

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.core.sqlite_file import migrate
from inferencecenter.sessions.store import loader
from inferencecenter.sessions.store.database import open_writing
from inferencecenter.sessions.store.recorder import Recorder
from inferencecenter.sessions.store.rows import facts_column, order_row
from inferencecenter.sessions.store.schema import DATABASE_NAME, MIGRATIONS
from inferencecenter.sessions.store.store import SessionStore
from tests.sessions.store.conftest import as_nobody
from tests.sessions.store.stores import kept_in
from tests.sessions.store.values import CLOCK, ended, make_facts, make_history, make_order, opened, ordered, packed

if TYPE_CHECKING:
    from pathlib import Path

PAGE_BYTES = 4096


def _fill(path: Path, n_sessions: int = 40) -> None:
    """Create a file with long histories, several pages per session."""
    with contextlib.closing(open_writing(path)) as database:
        recorder = Recorder(database, {})
        for index in range(n_sessions):
            session_id = f"s_{index}"
            text = f"{index} " * 1000
            recorder.commit([opened(session_id), ended(session_id, text=text)], durable=False)
        recorder.finish()


def _read(path: Path) -> bytes:
    return path.read_bytes()


def _overwrite(path: Path, content: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)


async def _is_read_only(store: SessionStore) -> None:
    """Assert that the store reports a fault, writes nothing and holds nothing back."""
    assert store.fault is not None
    assert DATABASE_NAME in store.fault.message
    told: list[int] = []
    store.write(opened("s_new"), flush=True)
    store.release(lambda: told.append(1))
    assert told == [1]
    await store.close()


@pytest.mark.parametrize(
    "content", [b"not a database, but long enough to be looked at" * 90, b"SQLite format 3\0" * 300]
)
async def test_file_that_is_no_database_is_kept(path: Path, content: bytes) -> None:
    """Nothing is loaded, and the file is unchanged."""
    _overwrite(path, content)
    store = SessionStore.open(path)
    assert store.load() == []
    await _is_read_only(store)
    assert _read(path) == content


async def test_rest_of_a_damaged_file_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever page is overwritten: a fault is reported, nothing is written, and the loaded data is correct."""
    monkeypatch.setattr(loader, "RECENT_PER_CLIENT", 40)
    _fill(path)
    whole = _read(path)
    right = await kept_in(path)
    assert len(right) == 40
    n_pages = len(whole) // PAGE_BYTES
    loaded = []
    for page in range(0, n_pages, n_pages // 25):
        damaged = bytearray(whole)
        damaged[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] = b"\xff" * PAGE_BYTES
        _overwrite(path, bytes(damaged))
        store = SessionStore.open(path)
        found = {each.config.session_id: each for each in store.load()}
        await _is_read_only(store)
        assert all(right[session_id] == kept for session_id, kept in found.items())
        assert _read(path) == bytes(damaged)
        loaded.append(len(found))
    assert 0 in loaded, "without its first page it is no database"
    assert sum(n_found >= 20 for n_found in loaded) > len(loaded) / 2, loaded


async def test_truncated_file_is_not_modified(path: Path) -> None:
    """A truncated copy is not modified."""
    _fill(path, 5)
    cut = _read(path)[: -PAGE_BYTES * 2]
    _overwrite(path, cut)
    store = SessionStore.open(path)
    store.load()
    await _is_read_only(store)
    assert _read(path) == cut


async def test_read_only_file_is_loaded() -> None:
    """Everything is loaded, and nothing is written."""
    with as_nobody() as directory:
        path = directory / DATABASE_NAME
        _fill(path, 3)
        path.chmod(0o400)
        store = SessionStore.open(path)
        assert len(store.load()) == 3
        await _is_read_only(store)
        assert path.stat().st_mode & 0o777 == 0o400


async def test_file_in_a_read_only_directory_is_loaded() -> None:
    """The file is readable without the files that SQLite would create beside it."""
    with as_nobody() as directory:
        path = directory / DATABASE_NAME
        _fill(path, 3)
        path.chmod(0o400)
        directory.chmod(0o500)
        store = SessionStore.open(path)
        assert len(store.load()) == 3
        await _is_read_only(store)


async def test_file_with_an_unreadable_log_is_not_read() -> None:
    """A file whose WAL cannot be read is not loaded, since its content would be stale."""
    with as_nobody() as directory:
        path = directory / DATABASE_NAME
        _fill(path, 3)
        (directory / f"{DATABASE_NAME}-wal").write_bytes(b"x" * 100)
        path.chmod(0o400)
        directory.chmod(0o500)
        store = SessionStore.open(path)
        assert store.load() == []
        await _is_read_only(store)


async def test_without_a_file_there_are_no_sessions() -> None:
    """A directory of another owner is a fault, not a crash."""
    with as_nobody() as directory:
        directory.chmod(0o500)
        store = SessionStore.open(directory / "state" / DATABASE_NAME)
        assert store.load() == []
        await _is_read_only(store)


def test_file_of_a_newer_version_is_refused(path: Path) -> None:
    """A downgrade does not touch an unknown version."""
    _fill(path, 1)
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    before = path.read_bytes()
    with pytest.raises(InferenceCenterError, match="which knows versions up to") as caught:
        SessionStore.open(path)
    assert caught.value.code is ErrorCode.STORAGE_UNAVAILABLE
    assert path.read_bytes() == before


def test_file_locked_by_another_process_is_refused(path: Path) -> None:
    """A daemon that started anyway would never write."""
    _fill(path, 1)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("PRAGMA locking_mode = EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(InferenceCenterError, match="locked") as caught:
            SessionStore.open(path)
    assert caught.value.code is ErrorCode.STORAGE_UNAVAILABLE


@pytest.mark.parametrize("version", range(1, len(MIGRATIONS) + 1))
async def test_files_of_earlier_versions_are_migrated(path: Path, version: int) -> None:
    """Every earlier version can be opened, written and read."""
    path.parent.mkdir()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        migrate(database, MIGRATIONS[:version], path=path)
        assert database.execute("PRAGMA user_version").fetchone() == (version,)
    store = SessionStore.open(path)
    assert store.was_clean
    store.write(opened(), flush=True)
    await store.close()
    assert set(await kept_in(path)) == {"s_1"}


async def test_file_of_a_single_model_version_is_read(path: Path) -> None:
    """Its sessions have no chosen model, and its unfinished turns name none."""
    config, order = make_facts(), make_order()
    column = orjson.loads(facts_column(config))
    del column["chosen_model"]
    path.parent.mkdir()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        migrate(database, MIGRATIONS[:1], path=path)
        database.execute(
            "INSERT INTO sessions VALUES (1, ?, ?, ?, 5, ?, ?, 'fingerprint', 0, 0, ?)",
            (config.session_id, config.client_id, config.epoch, CLOCK, CLOCK, orjson.dumps(column).decode()),
        )
        database.execute("INSERT INTO orders VALUES (1, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", order_row(order)[:10])
        database.execute("INSERT INTO said VALUES (1, 5, ?, 'Hi')", (packed([72, 105]),))
    kept = (await kept_in(path))[config.session_id]
    assert kept.config == config
    assert kept.pending_turn is not None
    assert (kept.pending_turn.spec, kept.pending_turn.text) == (replace(order, model=""), "Hi")


@pytest.mark.parametrize("chosen", [None, "toy", "another: model/with any name"])
async def test_chosen_model_is_stored(path: Path, chosen: str | None) -> None:
    """The model of an unfinished turn is stored too."""
    store = SessionStore.open(path)
    store.write(opened(chosen_model=chosen), flush=True)
    store.write(ordered(order=make_order(model="large")), flush=True)
    await store.close()
    kept = (await kept_in(path))["s_1"]
    assert kept.config.chosen_model == chosen
    assert kept.pending_turn is not None
    assert kept.pending_turn.spec.model == "large"


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE messages SET more = '[]' WHERE n = 1",
        "UPDATE messages SET more = '{' WHERE n = 1",
        """UPDATE messages SET more = '{"tool_calls": [{}]}' WHERE n = 1""",
        """INSERT INTO said SELECT id, 9, x'', '', '[["argued", 0, "x"]]' FROM sessions""",
    ],
)
async def test_invalid_calls_affect_only_their_session(path: Path, damage: str) -> None:
    """Other sessions are loaded, and the invalid rows are left untouched."""
    store = SessionStore.open(path)
    for session_id in ("s_1", "s_2"):
        store.write(opened(session_id, history=make_history("Hello")), flush=True)
    store.write(ordered("s_1"), flush=True)
    await store.close()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute(
            damage.replace("WHERE n", "WHERE session = 1 AND n").replace("FROM sessions", "FROM sessions LIMIT 1")
        )
    assert set(await kept_in(path)) == {"s_2"}

"""The command ``inferencecenter session salvage``."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from inferencecenter.server import control
from inferencecenter.sessions.store.database import open_reading, open_writing
from inferencecenter.sessions.store.loader import read_all
from inferencecenter.sessions.store.recorder import Recorder
from inferencecenter.sessions.store.schema import DATABASE_NAME
from tests.sessions.store.values import ended, opened

if TYPE_CHECKING:
    from tests.cli.conftest import Cli

PAGE_BYTES = 4096


@pytest.fixture
def path(state_dir: Path) -> Path:
    """An intact sessions file."""
    path = state_dir / DATABASE_NAME
    with contextlib.closing(open_writing(path)) as database:
        recorder = Recorder(database, {})
        for name in ("s_1", "s_2", "s_3"):
            recorder.commit([opened(name), ended(name, text=f"{name} " * 3000)], durable=False)
        recorder.finish()
    return path


def damage(path: Path, needle: bytes) -> None:
    """Zero a page that contains a text."""
    content = bytearray(path.read_bytes())
    page = content.index(needle) // PAGE_BYTES * PAGE_BYTES
    content[page : page + PAGE_BYTES] = bytes(PAGE_BYTES)
    path.write_bytes(content)


def test_readable_data_is_recovered(cli: Cli, path: Path) -> None:
    """Intact sessions stay whole; losses are reported, and the damaged file is kept."""
    damage(path, b"s_2 " * 500)
    before = path.read_bytes()
    result = cli.run("session", "salvage", "--json")
    assert result.code == 0, result.err
    answer = json.loads(result.out)
    assert answer["salvaged"]["whole"] == 2
    assert answer["salvaged"]["cut"] == [{"session_id": "s_2", "client_id": "ada", "messages": 1, "lost_messages": 1}]
    assert Path(answer["damaged"]).read_bytes() == before
    with contextlib.closing(open_reading(path)) as database:
        assert {found.session.config.session_id for found in read_all(database).found} == {"s_1", "s_2", "s_3"}
    assert not [each for each in path.parent.iterdir() if "salvaging" in each.name]


def test_losses_are_reported_as_text(cli: Cli, path: Path) -> None:
    """Losses are listed by session id."""
    damage(path, b"s_2 " * 500)
    result = cli.run("session", "salvage")
    assert "2 sessions are complete, 1 truncated, 0 lost." in result.out
    assert "s_2 of ada: the first 1 messages were saved, at least 1 are lost." in result.out
    assert f"{path}.damaged-" in result.out


def test_intact_file_is_unchanged(cli: Cli, path: Path) -> None:
    """No data is lost, and the file is not replaced."""
    before = path.read_bytes()
    result = cli.run("session", "salvage", "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out) == {"salvaged": None, "damaged": None}
    assert path.read_bytes() == before


def test_newer_file_is_not_salvaged(cli: Cli, path: Path) -> None:
    """It is not damaged and stays unchanged."""
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA user_version = 99")
    before = path.read_bytes()
    result = cli.run("session", "salvage")
    assert result.code == 73
    assert "version 99" in result.err
    assert path.read_bytes() == before


def test_unreadable_file_is_unchanged(cli: Cli, path: Path) -> None:
    """It is not replaced by an empty one."""
    path.write_bytes(b"no database" * 1000)
    result = cli.run("session", "salvage")
    assert result.code == 73
    assert "restore" in result.err
    assert path.read_bytes() == b"no database" * 1000
    assert not [each for each in path.parent.iterdir() if "salvaging" in each.name]


def test_running_daemon_prevents_salvage(cli: Cli, path: Path) -> None:
    """It has the damaged file open."""
    damage(path, b"s_2 " * 500)
    before = path.read_bytes()
    with control.try_lock_state_dir(path.parent):
        result = cli.run("session", "salvage")
    assert result.code == 73
    assert path.read_bytes() == before

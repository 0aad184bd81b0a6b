"""The command ``inferencecenter restore``."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
import stat
import time
from typing import TYPE_CHECKING

import pytest

from inferencecenter.auth.accounts import DATABASE_NAME as ACCOUNTS_NAME
from inferencecenter.auth.accounts import Accounts
from inferencecenter.server import control
from inferencecenter.sessions.store.database import open_reading, open_writing
from inferencecenter.sessions.store.loader import read_all
from inferencecenter.sessions.store.recorder import Recorder
from inferencecenter.sessions.store.schema import DATABASE_NAME
from tests.sessions.store.values import opened, ordered, said

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cli.conftest import Cli


@pytest.fixture
def backup(cli: Cli, state_dir: Path, tmp_path: Path) -> Path:
    """A backup of an account and of a session with an unfinished answer; the state directory still has both."""
    fill(state_dir, "s_1")
    target = tmp_path / "backup"
    assert cli.run("backup", str(target)).code == 0
    return target


def fill(state_dir: Path, *names: str) -> None:
    """Create a state directory with an account and sessions."""
    with contextlib.closing(Accounts.open(state_dir / ACCOUNTS_NAME, clock=time.time)) as accounts:
        accounts.ensure_client("ada", max_sessions=3, priority="normal")
    with contextlib.closing(open_writing(state_dir / DATABASE_NAME)) as database:
        recorder = Recorder(database, {})
        for name in names:
            recorder.commit([opened(name), ordered(name), said("Well", name)], durable=True)


def sessions_in(path: Path) -> set[str]:
    """Return the ids of the sessions that a daemon would load."""
    with contextlib.closing(open_reading(path)) as database:
        return {found.session.config.session_id for found in read_all(database).found}


def contents(directory: Path) -> dict[str, bytes]:
    """Return every file but the lock."""
    return {each.name: each.read_bytes() for each in directory.iterdir() if each.name != control.DAEMON_LOCK_NAME}


def test_backup_is_restored(cli: Cli, state_dir: Path, backup: Path) -> None:
    """Accounts and sessions are private again, in a new epoch, since clients may have received more."""
    shutil.rmtree(state_dir)
    result = cli.run("restore", str(backup), "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out) == {"source": str(backup), "restored": [ACCOUNTS_NAME, DATABASE_NAME], "kept": {}}
    assert set(contents(state_dir)) == {ACCOUNTS_NAME, DATABASE_NAME}
    assert {stat.S_IMODE(path.stat().st_mode) for path in state_dir.iterdir()} == {0o600}
    assert stat.S_IMODE(state_dir.stat().st_mode) == 0o700
    assert sessions_in(state_dir / DATABASE_NAME) == {"s_1"}
    with contextlib.closing(sqlite3.connect(state_dir / DATABASE_NAME)) as database:
        assert database.execute("SELECT clean FROM meta").fetchone() == (0,)
    with contextlib.closing(Accounts.open(state_dir / ACCOUNTS_NAME, clock=time.time)) as accounts:
        assert accounts.has_client("ada")


def test_existing_files_are_not_replaced_by_default(cli: Cli, state_dir: Path, backup: Path) -> None:
    """No byte changes."""
    before = contents(state_dir)
    result = cli.run("restore", str(backup))
    assert result.code == 64
    assert "--replace" in result.err
    assert contents(state_dir) == before


def test_replaced_files_are_renamed(cli: Cli, state_dir: Path, backup: Path) -> None:
    """Their WAL is renamed, too, since it must not be applied to another file."""
    with contextlib.closing(open_writing(state_dir / DATABASE_NAME)) as database:
        Recorder(database, {}).commit([opened("s_later")], durable=True)
        shutil.copytree(state_dir, state_dir.with_name("killed"))
    shutil.rmtree(state_dir)
    state_dir.with_name("killed").rename(state_dir)
    assert (state_dir / f"{DATABASE_NAME}-wal").stat().st_size
    result = cli.run("restore", str(backup), "--replace", "--json")
    assert result.code == 0, result.err
    moved = json.loads(result.out)["kept"]
    assert set(moved) == {ACCOUNTS_NAME, DATABASE_NAME}
    assert sessions_in(state_dir / DATABASE_NAME) == {"s_1"}
    assert sessions_in(state_dir / moved[DATABASE_NAME]) == {"s_1", "s_later"}


def test_stale_wal_is_moved_aside(cli: Cli, state_dir: Path, backup: Path) -> None:
    """Without its database it must not be applied to the restored one."""
    path = state_dir / DATABASE_NAME
    with contextlib.closing(open_writing(path)) as database:
        recorder = Recorder(database, {})
        for number in range(30):
            recorder.commit([opened(f"s_later{number}")], durable=True)
        log = (state_dir / f"{DATABASE_NAME}-wal").read_bytes()
    path.unlink()
    (state_dir / f"{DATABASE_NAME}-wal").write_bytes(log)
    (state_dir / ACCOUNTS_NAME).unlink()
    assert cli.run("restore", str(backup)).code == 64
    result = cli.run("restore", str(backup), "--replace", "--json")
    assert result.code == 0, result.err
    assert sessions_in(path) == {"s_1"}
    aside = json.loads(result.out)["kept"][DATABASE_NAME]
    assert (state_dir / f"{aside}-wal").read_bytes() == log


def test_running_daemon_prevents_a_restore(cli: Cli, state_dir: Path, backup: Path) -> None:
    """It would keep writing to its open files."""
    before = contents(state_dir)
    with control.try_lock_state_dir(state_dir) as alone:
        assert alone
        result = cli.run("restore", str(backup), "--replace")
    assert result.code == 73
    assert "a daemon uses" in result.err
    assert contents(state_dir) == before


def damage_page(path: Path) -> None:
    """Overwrite a page."""
    content = bytearray(path.read_bytes())
    content[3 * 4096 : 6 * 4096] = b"\xa5" * (3 * 4096)
    path.write_bytes(content)


def cut(path: Path) -> None:
    """Keep the first half."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    """Truncate it."""
    path.write_bytes(b"")


def make_newer(path: Path) -> None:
    """Set an unknown newer version."""
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA user_version = 99")


@pytest.mark.parametrize("name", [ACCOUNTS_NAME, DATABASE_NAME])
@pytest.mark.parametrize("damage", [damage_page, cut, empty, make_newer])
def test_damaged_backup_changes_nothing(
    cli: Cli, state_dir: Path, backup: Path, damage: Callable[[Path], None], name: str
) -> None:
    """Neither file is replaced if one is unusable."""
    damage(backup / name)
    before = contents(state_dir)
    result = cli.run("restore", str(backup), "--replace")
    assert result.code == 73
    assert name in result.err
    assert contents(state_dir) == before


@pytest.mark.parametrize("exists", [True, False])
def test_directory_without_a_backup_is_refused(cli: Cli, state_dir: Path, tmp_path: Path, *, exists: bool) -> None:
    """Nothing is created."""
    if exists:
        (tmp_path / "nothing").mkdir()
    result = cli.run("restore", str(tmp_path / "nothing"))
    assert result.code == 73
    assert not state_dir.exists()

"""The command ``inferencecenter backup``."""

from __future__ import annotations

import asyncio
import contextlib
import json
import stat
import time
from typing import TYPE_CHECKING

import pytest

from inferencecenter.auth.accounts import DATABASE_NAME as ACCOUNTS_NAME
from inferencecenter.auth.accounts import Accounts
from inferencecenter.protocol.values import MessageImage
from inferencecenter.server import control
from inferencecenter.sessions.images.store import IMAGES_NAME, ImageFile
from inferencecenter.sessions.store.schema import DATABASE_NAME
from inferencecenter.sessions.store.store import SessionStore
from tests.sessions.store.stores import kept_in, settled, was_clean
from tests.sessions.store.values import opened, ordered, said

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from tests.cli.conftest import Cli


@pytest.fixture
async def running(state_dir: Path) -> AsyncIterator[SessionStore]:
    """The store and accounts of a running daemon with an unfinished answer."""
    with contextlib.closing(Accounts.open(state_dir / ACCOUNTS_NAME, clock=time.time)) as accounts:
        accounts.ensure_client("ada", max_sessions=3, priority="normal")
        store = SessionStore.open(state_dir / DATABASE_NAME)
        for record in (opened(), ordered(), said("Well")):
            store.write(record, flush=False)
        await settled(store)
        yield store
        await store.close()


async def test_backup_contains_both_files(cli: Cli, running: SessionStore, tmp_path: Path) -> None:
    """Taken during writes it is private, complete, and usable as a state directory."""
    target = tmp_path / "backup"
    copying = asyncio.get_running_loop().run_in_executor(None, cli.run, "backup", str(target), "--json")
    n_written = 0
    while not copying.done():
        running.write(said("."), flush=False)
        await settled(running)
        n_written += 1
    result = await copying
    assert json.loads(result.out) == {"target": str(target), "files": [ACCOUNTS_NAME, DATABASE_NAME]}
    assert stat.S_IMODE(target.stat().st_mode) == 0o700
    assert {path.name for path in target.iterdir()} == {ACCOUNTS_NAME, DATABASE_NAME}
    assert {stat.S_IMODE(path.stat().st_mode) for path in target.iterdir()} == {0o600}
    unfinished = (await kept_in(target / DATABASE_NAME))["s_1"].pending_turn
    assert unfinished is not None
    assert "Well" + "." * n_written == unfinished.text.ljust(len("Well") + n_written, ".")
    with contextlib.closing(Accounts.open(target / ACCOUNTS_NAME, clock=time.time)) as accounts:
        assert accounts.has_client("ada")
    assert running.fault is None


def test_backup_and_restore_include_images(cli: Cli, state_dir: Path, tmp_path: Path) -> None:
    """With the files of all images."""
    state_dir.mkdir(parents=True, exist_ok=True)
    image = MessageImage(digest="5" * 64, width=2, height=1, media_type="image/png")
    with contextlib.closing(ImageFile(state_dir / IMAGES_NAME, sessions=state_dir / DATABASE_NAME)) as file:
        file.add("ada", image, b"sun", now=0.0, max_bytes=10)
    assert json.loads(cli.run("backup", str(tmp_path / "backup"), "--json").out)["files"] == [IMAGES_NAME]
    restored = cli.run("restore", str(tmp_path / "backup"), "--replace")
    assert restored.code == 0, restored.err
    with contextlib.closing(ImageFile(state_dir / IMAGES_NAME, sessions=state_dir / DATABASE_NAME)) as file:
        assert file.find("ada", image.digest, now=1.0) == image
        assert file.read(image.digest) == b"sun"


async def test_backup_is_marked_unclean(cli: Cli, state_dir: Path, tmp_path: Path) -> None:
    """Its daemon must assume that clients have received more since, even after a clean stop."""
    store = SessionStore.open(state_dir / DATABASE_NAME)
    store.write(opened(), flush=True)
    await store.close()
    result = await asyncio.to_thread(cli.run, "backup", str(tmp_path / "backup"))
    assert result.code == 0, result.err
    assert DATABASE_NAME in result.out
    assert not await was_clean(tmp_path / "backup" / DATABASE_NAME)
    assert await was_clean(state_dir / DATABASE_NAME)


async def test_existing_target_is_refused(cli: Cli, running: SessionStore, tmp_path: Path) -> None:
    """A directory is not overwritten, empty or not."""
    result = await asyncio.to_thread(cli.run, "backup", str(tmp_path))
    assert result.code == 73
    assert "never overwritten" in result.err


def delete(path: Path) -> None:
    """Delete a file of a daemon."""
    path.unlink()


def replace(path: Path) -> None:
    """Replace a daemon's file by another one."""
    path.with_name("new").write_bytes(path.read_bytes())
    path.with_name("new").rename(path)


@pytest.mark.parametrize("change", [delete, replace])
async def test_moved_database_is_not_backed_up(
    cli: Cli, running: SessionStore, state_dir: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    """The daemon writes to the deleted or replaced file, so a copy would lack recent data."""
    with control.try_lock_state_dir(state_dir) as alone:
        assert alone
        control.record_open_files(state_dir, [running.identity])
        change(state_dir / DATABASE_NAME)
        result = await asyncio.to_thread(cli.run, "backup", str(tmp_path / "backup"))
    assert result.code == 73
    assert DATABASE_NAME in result.err
    assert not (tmp_path / "backup").exists()


async def test_backup_after_a_killed_daemon(cli: Cli, running: SessionStore, state_dir: Path, tmp_path: Path) -> None:
    """Its record of open files remains, but the lock is free."""
    with control.try_lock_state_dir(state_dir):
        control.record_open_files(state_dir, [running.identity])
    await running.close()
    replace(state_dir / DATABASE_NAME)
    result = await asyncio.to_thread(cli.run, "backup", str(tmp_path / "backup"))
    assert result.code == 0, result.err


def test_missing_state_directory_creates_nothing(cli: Cli, state_dir: Path, tmp_path: Path) -> None:
    """The message names the directory."""
    result = cli.run("backup", str(tmp_path / "backup"))
    assert result.code == 73
    assert str(state_dir) in result.err
    assert not (tmp_path / "backup").exists()


@pytest.mark.parametrize("content", [b"no database" * 500, b""])
def test_incomplete_copy_is_removed(cli: Cli, state_dir: Path, tmp_path: Path, content: bytes) -> None:
    """A partial backup could be mistaken for a whole one."""
    state_dir.mkdir()
    Accounts.open(state_dir / ACCOUNTS_NAME, clock=time.time).close()
    (state_dir / DATABASE_NAME).write_bytes(content)
    result = cli.run("backup", str(tmp_path / "backup"))
    assert result.code == 73
    assert DATABASE_NAME in result.err
    assert not (tmp_path / "backup").exists()

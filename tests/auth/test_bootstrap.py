"""Tests of the first account."""

from __future__ import annotations

import stat
import time
from typing import TYPE_CHECKING

import pytest

from inferencecenter.auth.accounts import Accounts
from inferencecenter.auth.bootstrap import ensure_admin
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.scopes import Scope

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def accounts(tmp_path: Path) -> Iterator[Accounts]:
    """Accounts nobody is in yet."""
    opened = Accounts.open(tmp_path / "accounts.sqlite3", clock=time.time)
    yield opened
    opened.close()


def test_the_first_run_makes_an_admin(accounts: Accounts, tmp_path: Path) -> None:
    """The token has every scope, and stands in a file that only the owner can read."""
    token = ensure_admin(accounts, tmp_path)
    assert token is not None
    account = accounts.verify_token(token)
    assert account is not None
    assert (account.client_id, account.scopes) == ("admin", frozenset(Scope))
    file = tmp_path / "admin.token"
    assert file.read_text() == token + "\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_later_runs_make_nothing(accounts: Accounts, tmp_path: Path) -> None:
    """With a client there, even one that is not admin, no token is made or written."""
    accounts.ensure_client("ada", max_sessions=1, priority="normal")
    assert ensure_admin(accounts, tmp_path) is None
    assert not (tmp_path / "admin.token").exists()


def test_a_token_file_left_over_is_replaced_and_made_private(accounts: Accounts, tmp_path: Path) -> None:
    """A file of an older database does not survive, nor does its mode."""
    (tmp_path / "admin.token").write_text("old")
    (tmp_path / "admin.token").chmod(0o644)
    token = ensure_admin(accounts, tmp_path)
    assert (tmp_path / "admin.token").read_text() == f"{token}\n"
    assert stat.S_IMODE((tmp_path / "admin.token").stat().st_mode) == 0o600


def test_a_file_that_cannot_be_written_leaves_no_admin(accounts: Accounts, tmp_path: Path) -> None:
    """The next start tries again, instead of locking everybody out."""
    with pytest.raises(InferenceCenterError, match=r"admin\.token") as caught:
        ensure_admin(accounts, tmp_path / "missing")
    assert caught.value.code is ErrorCode.STORAGE_UNAVAILABLE
    assert not accounts.has_clients()

"""The first administrator account."""

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
    """Empty accounts."""
    opened = Accounts.open(tmp_path / "accounts.sqlite3", clock=time.time)
    yield opened
    opened.close()


def test_first_run_creates_an_administrator(accounts: Accounts, tmp_path: Path) -> None:
    """The token has every scope and is written to a file that only the owner can read."""
    token = ensure_admin(accounts, tmp_path)
    assert token is not None
    account = accounts.verify_token(token)
    assert account is not None
    assert (account.client_id, account.scopes) == ("admin", frozenset(Scope))
    file = tmp_path / "admin.token"
    assert file.read_text() == token + "\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_later_runs_create_nothing(accounts: Accounts, tmp_path: Path) -> None:
    """With any existing client no token is created or written."""
    accounts.ensure_client("ada", max_sessions=1, priority="normal")
    assert ensure_admin(accounts, tmp_path) is None
    assert not (tmp_path / "admin.token").exists()


def test_stale_token_file_is_replaced_and_made_private(accounts: Accounts, tmp_path: Path) -> None:
    """Neither the token nor the mode of an older database's file survives."""
    (tmp_path / "admin.token").write_text("old")
    (tmp_path / "admin.token").chmod(0o644)
    token = ensure_admin(accounts, tmp_path)
    assert (tmp_path / "admin.token").read_text() == f"{token}\n"
    assert stat.S_IMODE((tmp_path / "admin.token").stat().st_mode) == 0o600


def test_unwritable_token_file_creates_no_administrator(accounts: Accounts, tmp_path: Path) -> None:
    """The next start tries again, so that no installation is locked out."""
    with pytest.raises(InferenceCenterError, match=r"admin\.token") as caught:
        ensure_admin(accounts, tmp_path / "missing")
    assert caught.value.code is ErrorCode.STORAGE_UNAVAILABLE
    assert not accounts.has_clients()

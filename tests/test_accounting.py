"""Tests of what is read of usage when a daemon starts, and while it runs."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from inferencecenter.config.settings import Settings
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.daemon import other_accounts, usage_reader, used_today
from inferencecenter.sessions.store.database import open_writing
from inferencecenter.sessions.store.schema import DATABASE_NAME

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Settings of a daemon whose clients have used something today and before."""
    today = datetime.now(UTC).date().isoformat()
    with contextlib.closing(open_writing(tmp_path / DATABASE_NAME)) as database:
        database.executemany(
            "INSERT INTO usage VALUES (?, ?, ?, 1, 100, 60, 7)",
            [("ada", "aabb", today), ("ada", "", today), ("ada", "aabb", "2026-01-02"), ("bob", "ccdd", "2026-01-02")],
        )
    return Settings(state_dir=tmp_path)


def test_what_counts_today_is_known_by_token(settings: Settings) -> None:
    """Tokens of prompts that were read, not those that were still there, and those generated."""
    assert used_today(settings) == {("ada", "aabb"): 47, ("ada", ""): 47}


def test_a_client_has_one_line_a_day(settings: Settings) -> None:
    """Whatever its tokens; what is older than asked is left out."""
    lines = usage_reader(settings)("ada", "2026-01-02")
    assert next((line.day, line.turns) for line in lines) == ("2026-01-02", 1)
    assert [line.turns for line in usage_reader(settings)("ada", "2026-01-03")] == [2]
    assert usage_reader(settings)("eve", "") == []


def test_where_sessions_are_not_kept_nothing_is(settings: Settings) -> None:
    """Also if another daemon kept them there before."""
    not_kept = Settings.model_validate({"state_dir": settings.state_dir, "sessions": {"store": False}})
    assert usage_reader(not_kept)("ada", "") == ()


def test_a_file_that_cannot_be_read_keeps_no_daemon_from_starting(settings: Settings) -> None:
    """Counts begin anew then, with a warning; who asks for usage is told."""
    (settings.state_dir / DATABASE_NAME).write_bytes(b"no database at all" * 100)
    with capture_logs() as logs:
        assert used_today(settings) == {}
    assert [line["event"] for line in logs] == ["usage_unreadable"]
    with pytest.raises(InferenceCenterError) as caught:
        usage_reader(settings)("ada", "")
    assert caught.value.code is ErrorCode.STORAGE_UNAVAILABLE
    assert caught.value.message == "usage cannot be read at the moment", "no path, and nothing that SQLite says"


async def test_another_program_is_asked_only_if_there_is_one(settings: Settings) -> None:
    """Without an address there is none."""
    assert other_accounts(settings) is None
    asked = other_accounts(Settings.model_validate({"external_auth": {"url": "https://localhost/"}}))
    assert asked is not None
    await asked.close()

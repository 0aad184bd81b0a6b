"""Usage that is read at start and while the daemon runs."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from inferencecenter.config.settings import Settings
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.daemon import external_auth, usage_page_reader, usage_reader, used_today
from inferencecenter.sessions.store.archive import Archive
from inferencecenter.sessions.store.database import open_writing
from inferencecenter.sessions.store.schema import DATABASE_NAME

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Settings of a daemon with usage of today and earlier."""
    today = datetime.now(UTC).date().isoformat()
    with contextlib.closing(open_writing(tmp_path / DATABASE_NAME)) as database:
        database.executemany(
            "INSERT INTO usage VALUES (?, ?, ?, 1, 100, 60, 7)",
            [("ada", "aabb", today), ("ada", "", today), ("ada", "aabb", "2026-01-02"), ("bob", "ccdd", "2026-01-02")],
        )
    return Settings(state_dir=tmp_path)


def test_todays_usage_is_restored_by_token(settings: Settings) -> None:
    """Prefilled and generated tokens count, cached ones do not."""
    assert used_today(settings) == {("ada", "aabb"): 47, ("ada", ""): 47}


def test_client_usage_has_one_line_a_day(settings: Settings) -> None:
    """It is the sum over the client's tokens, and days before the requested ones are absent."""
    lines = usage_reader(settings)("ada", "2026-01-02")
    assert next((line.day, line.turns) for line in lines) == ("2026-01-02", 1)
    assert [line.turns for line in usage_reader(settings)("ada", "2026-01-03")] == [2]
    assert usage_reader(settings)("eve", "") == []


def test_pages_of_usage_have_the_accounts_with_the_most_tokens_first(settings: Settings) -> None:
    """Each account once, with its days in order; accounts with equal tokens by their names."""
    with contextlib.closing(open_writing(settings.state_dir / DATABASE_NAME)) as database:
        database.execute("INSERT INTO usage VALUES ('cay', 'eeff', '2026-01-02', 1, 100, 60, 7)")
    read, found, after = usage_page_reader(settings), [], None
    for n_more in (2, 1, 0):
        page = read("2026-01-02", after, 1)
        assert page.n_more == n_more
        found.append([(line.client_id, line.turns) for line in page.lines])
        after = page.lines[-1].client_id
    assert found == [[("ada", 1), ("ada", 2)], [("bob", 1)], [("cay", 1)]]
    assert read("2026-01-02", after, 1).lines == ()
    assert read("2026-01-03", None, 5).n_more == 0


def test_reading_usage_of_one_account_skips_all_others(settings: Settings) -> None:
    """A client may ask for it often: SQLite's steps do not grow with the other accounts."""
    path, steps = settings.state_dir / DATABASE_NAME, []
    with contextlib.closing(open_writing(path)) as database:
        database.executemany(
            "INSERT INTO usage VALUES (?, '', '2026-01-02', 1, 1, 1, 1)", [(f"x{n}",) for n in range(2000)]
        )
        database.set_progress_handler(lambda: steps.append(1), 1)
        assert len(Archive(path, database).usage("ada")) == 2
    assert len(steps) < 1000


def test_without_stored_sessions_there_is_no_usage(settings: Settings) -> None:
    """An earlier daemon may have stored some."""
    not_kept = Settings.model_validate({"state_dir": settings.state_dir, "sessions": {"store": False}})
    assert usage_reader(not_kept)("ada", "") == ()
    assert usage_page_reader(not_kept)("", None, 50).lines == ()


def test_unreadable_file_does_not_prevent_the_start(settings: Settings) -> None:
    """Counters start at zero with a warning, and a usage request is an error."""
    (settings.state_dir / DATABASE_NAME).write_bytes(b"no database at all" * 100)
    with capture_logs() as logs:
        assert used_today(settings) == {}
    assert [line["event"] for line in logs] == ["usage_unreadable"]
    with pytest.raises(InferenceCenterError) as caught:
        usage_reader(settings)("ada", "")
    assert caught.value.code is ErrorCode.STORAGE_UNAVAILABLE
    assert caught.value.message == "usage cannot be read at the moment", "no path, and nothing that SQLite says"


async def test_external_auth_requires_an_address(settings: Settings) -> None:
    """Without one there is no provider."""
    assert external_auth(settings) is None
    asked = external_auth(Settings.model_validate({"external_auth": {"url": "https://localhost/"}}))
    assert asked is not None
    await asked.close()

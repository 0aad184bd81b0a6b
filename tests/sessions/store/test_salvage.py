"""Recovery of a damaged file into a new one."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from inferencecenter.sessions.store.database import open_writing
from inferencecenter.sessions.store.loader import read_all
from inferencecenter.sessions.store.recorder import Recorder
from inferencecenter.sessions.store.salvage import salvage
from inferencecenter.sessions.store.schema import DATABASE_NAME
from tests.sessions.store.values import ended, make_order, opened, ordered, said

if TYPE_CHECKING:
    from pathlib import Path

    from inferencecenter.sessions.journal import StoredSession

PAGE_BYTES = 4096
N_SESSIONS = 30


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file of sessions, several pages each, the last with an unfinished turn."""
    path = tmp_path_factory.mktemp("whole") / DATABASE_NAME
    with contextlib.closing(open_writing(path)) as database:
        recorder = Recorder(database, {})
        for number in range(N_SESSIONS):
            name = f"s_{number}"
            recorder.commit([opened(name), ended(name, text=f"{number} " * 900)], durable=False)
        order = replace(make_order(), turn_id="t_under_way")
        recorder.commit([ordered(name, order=order), said("We", name)], durable=False)
        recorder.finish()
    return path.read_bytes()


def loaded(path: Path) -> dict[str, StoredSession]:
    """The sessions that a daemon would load from the intact file."""
    with contextlib.closing(open_writing(path)) as database:
        contents = read_all(database)
    assert not contents.unreadable
    return {found.session.config.session_id: found.session for found in contents.found}


def damaged(tmp_path: Path, content: bytes) -> Path:
    """Write a file with this content."""
    path = tmp_path / DATABASE_NAME
    path.write_bytes(content)
    return path


def test_complete_file_is_salvaged_completely(tmp_path: Path, whole: bytes) -> None:
    """Settings, results and usage are recovered too; the unfinished turn is restarted."""
    path = damaged(tmp_path, whole)
    report = salvage(path, tmp_path / "made")
    assert (report.whole, report.cut, report.lost, report.reset, report.damaged) == (N_SESSIONS, [], [], [], 0)
    assert (report.restarted, report.dropped) == ([f"s_{N_SESSIONS - 1}"], [])
    assert path.read_bytes() == whole
    made, before = loaded(tmp_path / "made"), loaded(path)
    last = before[f"s_{N_SESSIONS - 1}"]
    assert last.pending_turn is not None
    before[f"s_{N_SESSIONS - 1}"] = replace(
        last, seq=made[f"s_{N_SESSIONS - 1}"].seq, pending_turn=replace(last.pending_turn, text="", tokens=b"")
    )
    assert made == before
    with contextlib.closing(open_writing(tmp_path / "made")) as database:
        assert database.execute("SELECT sum(turns) FROM usage").fetchone() == (N_SESSIONS,)
        assert database.execute("SELECT clean FROM meta").fetchone() == (0,)


@pytest.mark.parametrize("filler", [b"\0", b"\xa5"])
@pytest.mark.slow
def test_salvage_with_missing_pages_is_correct(tmp_path: Path, whole: bytes, filler: bytes) -> None:
    """Any three consecutive pages, interior ones included, cost at most the sessions on them."""
    right = loaded(damaged(tmp_path, whole))
    for first in range(len(whole) // PAGE_BYTES - 2):
        content = bytearray(whole)
        content[first * PAGE_BYTES : (first + 3) * PAGE_BYTES] = filler * (3 * PAGE_BYTES)
        for each in tmp_path.iterdir():
            each.unlink()
        path = damaged(tmp_path, bytes(content))
        report = salvage(path, tmp_path / "made")
        assert path.read_bytes() == content
        made = loaded(tmp_path / "made")
        assert len(made) == report.n_saved
        assert len(made) + len(report.lost) == N_SESSIONS
        for name, kept in made.items():
            messages = right[name].history.messages
            assert kept.history.messages == messages[: len(kept.history.messages)]
        for cut in report.cut:
            assert len(made[cut.session_id].history.messages) == cut.messages
            assert cut.messages + cut.lost_messages == len(right[cut.session_id].history.messages)
        named = {each.session_id for each in report.cut} | {*report.reset, *report.uncertain}
        assert len(made.keys() - named) == report.whole
        for name in made.keys() - named:
            assert made[name].history.messages == right[name].history.messages
            assert made[name].config == right[name].config
        assert len(made) >= N_SESSIONS - 10, (first, report)


def test_without_its_first_page_nothing_is_lost(tmp_path: Path, whole: bytes) -> None:
    """SQLite does not open the file, but the tables are recognized."""
    path = damaged(tmp_path, bytes(PAGE_BYTES) + whole[PAGE_BYTES:])
    assert salvage(path, tmp_path / "made").whole == N_SESSIONS
    assert len(loaded(tmp_path / "made")) == N_SESSIONS


def test_salvage_includes_the_log(tmp_path: Path, whole: bytes) -> None:
    """The WAL of a killed daemon is recovered."""
    path = damaged(tmp_path, whole)
    with contextlib.closing(open_writing(path)) as database:
        Recorder(database, {}).commit([opened("s_later"), ended("s_later", text="z" * 9000)], durable=True)
        content, log = path.read_bytes(), path.with_name(f"{DATABASE_NAME}-wal").read_bytes()
    path = damaged(tmp_path, content)
    path.with_name(f"{DATABASE_NAME}-wal").write_bytes(log)
    assert salvage(path, tmp_path / "made").whole == N_SESSIONS + 1
    assert loaded(tmp_path / "made")["s_later"].history.messages[-1].content == "z" * 9000


@pytest.mark.parametrize("content", [b"", b"no database" * 2000])
def test_salvage_of_no_database_is_empty(tmp_path: Path, content: bytes) -> None:
    """Arbitrary content recovers nothing and does not raise."""
    assert salvage(damaged(tmp_path, content), tmp_path / "made").n_saved == 0

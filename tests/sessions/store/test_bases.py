"""Forks that share rows with another session: what is written, and what stays when others are deleted."""

from __future__ import annotations

import contextlib
import sqlite3
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from inferencecenter.core.sqlite_file import migrate
from inferencecenter.sessions.history import History, HistoryView, TurnCheckpoint
from inferencecenter.sessions.journal import HistoryChanged, SessionDeleted, SessionOpened, TurnEnded
from inferencecenter.sessions.store.archive import Archive, purge_file
from inferencecenter.sessions.store.database import open_writing
from inferencecenter.sessions.store.loader import read_all
from inferencecenter.sessions.store.recorder import Purge, Recorder
from inferencecenter.sessions.store.salvage import salvage
from inferencecenter.sessions.store.schema import MIGRATIONS
from tests.sessions.store.leftovers import REACHES, assert_nothing_is_left
from tests.sessions.store.stores import kept_in, storing
from tests.sessions.store.values import (
    CLOCK,
    ended,
    make_end,
    make_facts,
    make_history,
    make_turn,
    opened,
    packed,
    said_by,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from inferencecenter.protocol.values import TranscriptTurn
    from inferencecenter.sessions.journal import StoredSession

MIB = 1024 * 1024


@pytest.fixture
def database(path: Path) -> Iterator[sqlite3.Connection]:
    """An empty file."""
    with contextlib.closing(open_writing(path)) as opened_file:
        yield opened_file


@pytest.fixture
def recorder(database: sqlite3.Connection) -> Recorder:
    """The recorder of the file."""
    return Recorder(database, {})


def history_of(n_turns: int) -> History:
    """A history of so many turns: messages, a piece and a mark of each."""
    history = History(model_fingerprint="toy")
    for n in range(n_turns):
        answer = f"said {n} "
        now = replace(
            history,
            messages=(*history.messages, said_by("assistant", answer)),
            tokens=history.tokens + packed([ord(each) for each in answer]),
            covered=history.covered + answer,
        )
        mark = TurnCheckpoint(f"t_{n}", n, n + 1, now.n_tokens, len(now.covered), HistoryView())
        history = replace(now, turns=(*history.turns, mark))
    return history


def turns_of(n_turns: int) -> tuple[TranscriptTurn, ...]:
    """The turns of ``history_of``."""
    return tuple(make_turn(f"t_{n}", messages=n + 1) for n in range(n_turns))


def talk(recorder: Recorder, session_id: str, n_turns: int, *, first: int | None = None) -> None:
    """Finish turns with idempotency keys in a session, which is created or extended from ``first``."""
    if first is None:
        recorder.commit([opened(session_id)], durable=False)
    for n in range(first or 0, n_turns):
        history, turn = history_of(n + 1), turns_of(n + 1)[-1]
        end = make_end(turn.turn_id, session_id=session_id)
        record = ended(session_id, history=history, turn=turn, end=end, turn_key=f"key {n}")
        recorder.commit([record], durable=False)


def fork_of(parent: str, session_id: str, n_turns: int) -> SessionOpened:
    """A fork at the first turns of another session."""
    return SessionOpened(
        config=make_facts(session_id),
        history=history_of(n_turns),
        turns=turns_of(n_turns),
        last_used_at=CLOCK,
        parent=parent,
    )


def rewound(session_id: str, n_turns: int) -> HistoryChanged:
    """A rewind to the end of a turn."""
    return HistoryChanged(
        session_id=session_id,
        seq=20,
        last_used_at=CLOCK,
        history=history_of(n_turns),
        turns=turns_of(n_turns),
        rewound=True,
    )


def kept_of(database: sqlite3.Connection) -> dict[str, StoredSession]:
    """The sessions that another daemon would load."""
    contents = read_all(database)
    assert not contents.unreadable
    return {found.session.config.session_id: found.session for found in contents.found}


def count(database: sqlite3.Connection, table: str) -> int:
    """The number of rows of a table."""
    (n_rows,) = database.execute(f"SELECT count(*) FROM {table}").fetchone()
    return int(n_rows)


def assert_is(kept: StoredSession, n_turns: int) -> None:
    """Assert that a session has exactly so many turns."""
    assert (kept.history, kept.turns) == (history_of(n_turns), turns_of(n_turns))


def test_fork_of_16_mib_writes_a_row(database: sqlite3.Connection, recorder: Recorder, path: Path) -> None:
    """A fork writes one row whatever its size, and its deletion removes one."""
    messages = tuple(said_by("user", "x" * MIB) for _ in range(16))
    history = replace(make_history("Hello"), messages=messages)
    recorder.commit([opened("s_1", history=history)], durable=False)
    tables = {table: count(database, table) for table in REACHES}
    database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    log = path.with_name(f"{path.name}-wal")
    for n in range(10):
        fork = replace(opened(f"s_fork_{n}", history=history), parent="s_1")
        recorder.commit([fork], durable=False)
    assert {table: count(database, table) for table in REACHES} == tables
    assert kept_of(database)["s_fork_9"].history == history
    for n in range(10):
        recorder.commit([SessionDeleted(session_id=f"s_fork_{n}", n_chars=16 * MIB)], durable=False)
    assert recorder.unswept == frozenset()
    assert log.stat().st_size < MIB, "sixteen would have been written and overwritten for each"
    assert {table: count(database, table) for table in REACHES} == tables


@pytest.mark.parametrize("n_turns", [0, 1, 3, 5])
def test_fork_is_independent(database: sqlite3.Connection, recorder: Recorder, n_turns: int) -> None:
    """Parent and fork are independent, and only the parent has its idempotency keys."""
    talk(recorder, "s_1", 5)
    recorder.commit([fork_of("s_1", "s_2", n_turns)], durable=False)
    talk(recorder, "s_2", 7, first=n_turns)
    talk(recorder, "s_1", 6, first=5)
    kept = kept_of(database)
    assert_is(kept["s_1"], 6)
    assert_is(kept["s_2"], 7)
    assert list(kept["s_1"].ends) == [f"key {n}" for n in range(6)]
    assert list(kept["s_2"].ends) == [f"key {n}" for n in range(n_turns, 7)]
    assert count(database, "messages") == 6 + 7 - n_turns


@pytest.mark.parametrize("purges", [False, True])
def test_closing_the_parent_keeps_the_fork(
    database: sqlite3.Connection, recorder: Recorder, path: Path, *, purges: bool
) -> None:
    """Everything that only the parent held is overwritten: later turns, settings and keys."""
    talk(recorder, "s_parent", 3)
    recorder.commit([fork_of("s_parent", "s_2", 2)], durable=False)
    recorder.commit([Purge("session", "s_parent") if purges else SessionDeleted(session_id="s_parent")], durable=False)
    kept = kept_of(database)
    assert set(kept) == {"s_2"}
    assert_is(kept["s_2"], 2)
    assert_nothing_is_left(database)
    recorder.finish()
    content = b"".join(each.read_bytes() for each in path.parent.iterdir())
    assert b"said 1" in content
    for secret in (b"said 2", b"key 0", b"s_parent"):
        assert secret not in content


def test_base_is_deleted_with_its_last_user(database: sqlite3.Connection, recorder: Recorder) -> None:
    """Until then it has exactly the rows that others share."""
    talk(recorder, "s_1", 5)
    recorder.commit([fork_of("s_1", "s_2", 4), fork_of("s_1", "s_3", 2)], durable=False)
    for gone, n_left in (("s_1", 4), ("s_2", 2), ("s_3", 0)):
        recorder.commit([SessionDeleted(session_id=gone)], durable=False)
        assert count(database, "messages") == n_left
        assert_nothing_is_left(database)
    assert count(database, "sessions") == 0


def test_rewind_below_a_fork_keeps_the_fork(database: sqlite3.Connection, recorder: Recorder) -> None:
    """The parent continues in a new row, with its keys, results and numbering."""
    talk(recorder, "s_1", 5)
    recorder.commit([fork_of("s_1", "s_2", 4), rewound("s_1", 2)], durable=False)
    talk(recorder, "s_1", 3, first=2)
    kept = kept_of(database)
    assert_is(kept["s_1"], 3)
    assert_is(kept["s_2"], 4)
    assert list(kept["s_1"].ends) == ["key 0", "key 1", "key 2"]
    assert kept["s_1"].config == make_facts("s_1")
    assert count(database, "messages") == 4 + 1
    assert_nothing_is_left(database)
    recorder.commit([SessionDeleted(session_id="s_2")], durable=False)
    assert_is(kept_of(database)["s_1"], 3)
    assert_nothing_is_left(database)


@pytest.mark.parametrize("n_turns", [0, 1, 3])
def test_rewound_part_of_a_closed_parent_is_deleted(
    database: sqlite3.Connection, recorder: Recorder, n_turns: int
) -> None:
    """A rewind of a fork releases rows of its base, and of the base of that."""
    talk(recorder, "s_1", 2)
    recorder.commit([fork_of("s_1", "s_2", 2)], durable=False)
    talk(recorder, "s_2", 4, first=2)
    recorder.commit(
        [fork_of("s_2", "s_3", 4), SessionDeleted(session_id="s_1"), SessionDeleted(session_id="s_2")], durable=False
    )
    recorder.commit([rewound("s_3", n_turns)], durable=False)
    assert_is(kept_of(database)["s_3"], n_turns)
    assert count(database, "messages") == n_turns
    assert_nothing_is_left(database)


def test_repeated_rewinds_share_the_common_prefix(database: sqlite3.Connection, recorder: Recorder) -> None:
    """After repeated forks and rewinds, rows refer to the first base and do not form a chain."""
    talk(recorder, "s_1", 3)
    for n in range(5):
        recorder.commit([fork_of("s_1", f"s_fork_{n}", 3), rewound("s_1", 2)], durable=False)
        talk(recorder, "s_1", 3, first=2)
    (n_bases,) = database.execute("SELECT count(DISTINCT base) FROM sessions").fetchone()
    assert n_bases <= 6
    bases = dict(database.execute("SELECT id, base FROM sessions"))
    assert all(bases[base] is None or bases[bases[base]] is None for base in bases.values() if base is not None)
    assert all(len(kept.turns) == 3 for kept in kept_of(database).values())


def test_new_rendering_keeps_messages_shared_with_a_fork(database: sqlite3.Connection, recorder: Recorder) -> None:
    """Its tokens are replaced, those of the fork stay, and nothing else of the parent's is left."""
    talk(recorder, "s_1", 3)
    recorder.commit([fork_of("s_1", "s_2", 3)], durable=False)
    now = replace(history_of(4), tokens=packed([1, 2]), covered="anew", turns=(), model_fingerprint="other")
    record: TurnEnded = ended("s_1", history=now, turn=turns_of(4)[-1], end=make_end("t_3"))
    recorder.commit([record], durable=False)
    kept = kept_of(database)
    assert kept["s_1"].history == now
    assert_is(kept["s_2"], 3)
    assert count(database, "messages") == 4
    assert_nothing_is_left(database)


def test_forks_of_forks_of_any_depth_are_read_and_deleted(database: sqlite3.Connection, recorder: Recorder) -> None:
    """If all sessions between have ended, their rows are deleted with the last one, in bounded steps."""
    depth = 1100
    messages = tuple(said_by("user", str(n)) for n in range(depth))
    recorder.commit([opened("s_0", history=History(messages[:1]))], durable=False)
    for n in range(1, depth):
        fork = replace(opened(f"s_{n}", history=History(messages[:n])), parent=f"s_{n - 1}")
        more = replace(rewound(f"s_{n}", 0), history=History(messages[: n + 1]))
        recorder.commit([fork, more, SessionDeleted(session_id=f"s_{n - 1}")], durable=False)
    (kept,) = kept_of(database).values()
    assert kept.history.messages == messages
    assert count(database, "messages") == depth
    assert count(database, "sessions") == depth
    recorder.commit([SessionDeleted(session_id=kept.config.session_id)], durable=False)
    assert count(database, "sessions") > depth // 2
    while recorder.unswept:
        recorder.commit([], durable=False)
    assert count(database, "sessions") == 0


def test_shared_base_is_loaded_once(database: sqlite3.Connection, recorder: Recorder) -> None:
    """Before and after a restart, messages, turns, marks and equal tokens are shared objects."""
    talk(recorder, "s_1", 3)
    recorder.commit(
        [fork_of("s_1", "s_2", 3), fork_of("s_1", "s_3", 2), SessionDeleted(session_id="s_1")], durable=False
    )
    kept = kept_of(database)
    whole, part = kept["s_2"], kept["s_3"]
    assert all(a is b for a, b in zip(whole.history.messages, part.history.messages, strict=False))
    assert all(a is b for a, b in zip(whole.turns, part.turns, strict=False))
    recorder.commit([replace(fork_of("s_2", "s_4", 3))], durable=False)
    kept = kept_of(database)
    assert kept["s_4"].history.tokens is kept["s_2"].history.tokens
    assert kept["s_4"].history.covered is kept["s_2"].history.covered


def test_fork_of_an_unsaved_parent_is_written_in_full(database: sqlite3.Connection, recorder: Recorder) -> None:
    """The parent may have been purged in the meantime."""
    recorder.commit([fork_of("s_unknown", "s_2", 3)], durable=False)
    assert_is(kept_of(database)["s_2"], 3)


def test_fork_writes_records_that_its_parent_lacks(database: sqlite3.Connection, recorder: Recorder) -> None:
    """It shares the stored rows of its parent and writes the rest itself."""
    talk(recorder, "s_1", 2)
    recorder.commit([fork_of("s_1", "s_2", 4)], durable=False)
    assert_is(kept_of(database)["s_2"], 4)
    assert_is(kept_of(database)["s_1"], 2)
    assert count(database, "messages") == 4


@pytest.mark.parametrize(
    "damage",
    [
        "DELETE FROM messages WHERE session = 1 AND n = 0",
        "DELETE FROM messages WHERE session = 1 AND n = 2",
        "UPDATE tokens SET ids = x'010203' WHERE session = 1",
        "UPDATE turns SET n = 9 WHERE session = 1 AND n = 1",
        "UPDATE sessions SET base = id WHERE id = 2",
        "UPDATE sessions SET base_messages = 9 WHERE id = 2",
    ],
)
def test_damaged_base_affects_only_its_users(database: sqlite3.Connection, recorder: Recorder, damage: str) -> None:
    """All other sessions are loaded, and nothing is deleted."""
    talk(recorder, "s_1", 3)
    recorder.commit([fork_of("s_1", "s_2", 3), SessionDeleted(session_id="s_1"), opened("s_3")], durable=False)
    database.execute(damage)
    contents = read_all(database)
    assert set(contents.unreadable) == {"s_2"}
    assert [found.session.config.session_id for found in contents.found] == ["s_3"]


def test_list_counts_the_base(path: Path, recorder: Recorder) -> None:
    """A listing counts shared rows and omits bases."""
    talk(recorder, "s_1", 3)
    recorder.commit([fork_of("s_1", "s_2", 2)], durable=False)
    talk(recorder, "s_2", 4, first=2)
    recorder.commit([SessionDeleted(session_id="s_1")], durable=False)
    with Archive.open(path) as archive:
        (line,) = archive.sessions()
        assert archive.read("s_2").history == history_of(4)
        assert archive.matches("client", "ada") == ["s_2"]
    assert (line.messages, line.turns, line.tokens) == (4, 4, history_of(4).n_tokens)


@pytest.mark.parametrize(("kind", "name"), [("session", "s_1"), ("client", "ada")])
def test_offline_purge_keeps_shared_bases(path: Path, kind: str, name: str) -> None:
    """Purging a session keeps shared rows; purging a client deletes everything."""
    with contextlib.closing(open_writing(path)) as database:
        recorder = Recorder(database, {})
        talk(recorder, "s_1", 3)
        recorder.commit([fork_of("s_1", "s_2", 2), opened("s_3", client_id="bob")], durable=False)
        recorder.finish()
    purge_file(path, "session" if kind == "session" else "client", name)
    with contextlib.closing(open_writing(path)) as database:
        assert set(kept_of(database)) == ({"s_2", "s_3"} if kind == "session" else {"s_3"})
        assert_nothing_is_left(database)
    assert b"said 2" not in path.read_bytes()


def test_salvaged_fork_has_its_own_rows(path: Path, recorder: Recorder, tmp_path: Path) -> None:
    """An intact file is recovered completely, with each key in the session that received it."""
    talk(recorder, "s_1", 3)
    recorder.commit([fork_of("s_1", "s_2", 3), rewound("s_1", 2), fork_of("s_2", "s_3", 1)], durable=False)
    recorder.commit([SessionDeleted(session_id="s_2")], durable=False)
    talk(recorder, "s_3", 3, first=1)
    report = salvage(path, tmp_path / "made")
    assert (report.whole, report.lost, report.cut, report.uncertain) == (2, [], [], [])
    with contextlib.closing(open_writing(tmp_path / "made")) as made, contextlib.closing(open_writing(path)) as whole:
        assert kept_of(made) == kept_of(whole)
        assert made.execute("SELECT count(*) FROM sessions WHERE base IS NOT NULL").fetchone() == (0,)


@pytest.mark.parametrize("table", ["sessions", "messages"])
def test_salvaged_fork_reports_losses_of_its_base(
    path: Path, database: sqlite3.Connection, recorder: Recorder, tmp_path: Path, table: str
) -> None:
    """A fork without own rows is not reported as an empty conversation."""
    talk(recorder, "s_1", 3)
    recorder.commit(
        [fork_of("s_1", "s_2", 3), fork_of("s_2", "s_3", 2), SessionDeleted(session_id="s_1")], durable=False
    )
    database.execute("PRAGMA foreign_keys = OFF")
    database.execute(f"DELETE FROM {table} WHERE {'id' if table == 'sessions' else 'session'} = 1")
    report = salvage(path, tmp_path / "made")
    lost = [(each.session_id, each.messages, each.lost_messages) for each in report.cut]
    assert lost == ([("s_2", 0, 3), ("s_3", 0, 2)] if table == "messages" else [])
    assert report.lost == []


async def test_file_without_bases_is_read_and_forked(path: Path) -> None:
    """Sessions are unchanged, and leftovers of a killed daemon are deleted."""
    path.parent.mkdir()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        migrate(database, MIGRATIONS[:7], path=path)
        for row, complete in ((1, 1), (2, 0)):
            database.execute(
                "INSERT INTO sessions SELECT ?, ?, 'ada', 'e_1', 5, ?, ?, 'toy', 0, 0, ?, ?",
                (row, f"s_{row}", CLOCK, CLOCK, "{}", complete),
            )
            database.execute("INSERT INTO messages VALUES (?, 0, 'user', 'Hi', NULL)", (row,))
    with contextlib.closing(open_writing(path)) as database:
        config = database.execute("SELECT facts FROM sessions").fetchall()
        assert config == [("{}",), ("{}",)]
        recorder = Recorder(database, {})
        recorder.sweep()
        assert count(database, "messages") == 1
        assert_nothing_is_left(database)


async def test_fork_is_written_after_its_base(path: Path) -> None:
    """A fork is written after its parent's queued records."""
    async with storing(path) as store:
        ada = store.of_client("ada")
        ada.write(opened("s_1"), flush=True)
        for n in range(3):
            record = ended("s_1", history=history_of(n + 1), turn=turns_of(n + 1)[-1], end=make_end(f"t_{n}"))
            ada.write(record, flush=True)
        ada.write(fork_of("s_1", "s_2", 3), flush=True)
        ada.write(SessionDeleted(session_id="s_1", n_chars=100), flush=True)
    kept = await kept_in(path)
    assert set(kept) == {"s_2"}
    assert_is(kept["s_2"], 3)

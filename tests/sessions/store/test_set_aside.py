"""An invalid row affects its own session only."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from inferencecenter.core.errors import InferenceCenterError
from inferencecenter.protocol import requests
from inferencecenter.sessions.context import Principal
from inferencecenter.sessions.store.database import open_writing
from inferencecenter.sessions.store.loader import read_all
from inferencecenter.sessions.store.recorder import Recorder
from inferencecenter.sessions.store.schema import DATABASE_NAME
from tests.sessions.conftest import SessionHarness
from tests.sessions.store.values import ended, make_order, opened, ordered, said

if TYPE_CHECKING:
    from pathlib import Path

CLIENT = Principal("ada", 4, "normal", frozenset({"user"}))
COLUMNS = {
    "sessions": (
        *("client_id", "epoch", "seq", "created_at", "last_used_at", "made_by", "view_kept", "view_resumes_at"),
        "facts",
    ),
    "messages": ("n", "role", "content", "more"),
    "turns": (
        *("n", "turn_id", "finish_reason", "messages", "prompt_tokens", "cached_tokens", "completion_tokens"),
        *("turn_key", "ending", "note", "reasoning_tokens", "ended_at"),
    ),
    "marks": ("n", "turn_id", "n_before", "n_messages", "n_tokens", "n_chars", "view_kept", "view_resumes_at"),
    "tokens": ("n", "ids", "covered"),
    "orders": (
        *("turn_id", "request", "params", "rank", "warnings", "submitted_at", "rendered_at", "made_by", "view_kept"),
        *("view_resumes_at", "model", "token_id", "note"),
    ),
    "said": ("seq", "ids", "text", "parts"),
}
CELLS = st.sampled_from([(table, column) for table, columns in COLUMNS.items() for column in columns])
NUMBERS = st.integers(-(2**63), 2**63 - 1)
VALUES = st.one_of(
    st.none(),
    NUMBERS,
    st.sampled_from([-1, 0, 1, 10**6]),
    st.floats(allow_nan=False),
    st.text(max_size=40),
    st.binary(max_size=16),
    st.sampled_from(
        ["{}", "[]", "null", "[[]]", '{"op": "infer"}', "[" * 5000, '{"mode": "chat"}', "\x00", "9" * 5000]
    ),
)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of three sessions, of which the first and the last have unfinished turns."""
    path = tmp_path_factory.mktemp("template") / DATABASE_NAME
    with contextlib.closing(open_writing(path)) as database:
        recorder = Recorder(database, {})
        for name in ("s_1", "s_2", "s_3"):
            recorder.commit([opened(name), ended(name, text="Hi")], durable=False)
        for name in ("s_1", "s_3"):
            order = replace(make_order(), turn_id=f"t_{name}")
            recorder.commit([ordered(name, order=order), said("We", name)], durable=False)
        recorder.finish()
    return path


def restored(path: Path) -> SessionHarness:
    """The sessions that a daemon restores from the file."""
    world = SessionHarness()
    with contextlib.closing(open_writing(path)) as database:
        world.sessions.restore([each.session for each in read_all(database).found], clean=True)
    return world


def alter(path: Path, table: str, column: str, value: Any) -> bool:
    """Change a cell of the first session; ``False`` if SQLite rejects the value."""
    which = "id = 1" if table == "sessions" else "session = 1"
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        try:
            database.execute(f"UPDATE {table} SET {column} = ? WHERE {which}", (value,))
        except (sqlite3.Error, OverflowError, UnicodeEncodeError):
            return False
    return True


@pytest.mark.slow
@given(cell=CELLS, value=VALUES)
@example(cell=("sessions", "last_used_at"), value=float("inf"))
@example(cell=("sessions", "created_at"), value=1e308)
@example(cell=("orders", "rendered_at"), value="yesterday")
@example(cell=("orders", "submitted_at"), value=float("-inf"))
@example(cell=("orders", "view_kept"), value=-(2**63))
@example(cell=("sessions", "view_kept"), value=2**63 - 1)
@example(cell=("marks", "n_messages"), value=-1)
@example(cell=("said", "ids"), value=b"x")
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_invalid_row_affects_only_its_session(
    template: Path, tmp_path: Path, cell: tuple[str, str], value: Any
) -> None:
    """The daemon starts and the other sessions are complete, also in listings."""
    path = tmp_path / DATABASE_NAME
    shutil.copyfile(template, path)
    if not alter(path, *cell, value):
        return
    world = restored(path)
    for name in ("s_2", "s_3"):
        session = world.sessions.get(CLIENT, requests.GetSession(op="get_session", session_id=name))
        assert [message.content for message in session.transcript][:2] == ["?", "Hi"]
    listed = world.sessions.list(CLIENT, requests.ListSessions(op="list_sessions"))
    assert {"s_2", "s_3"} <= {each.session_id for each in listed.sessions}
    with contextlib.suppress(InferenceCenterError):
        world.sessions.get(CLIENT, requests.GetSession(op="get_session", session_id="s_1"))
    with contextlib.closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT count(*) FROM sessions").fetchone() == (3,), "it stays in the file"

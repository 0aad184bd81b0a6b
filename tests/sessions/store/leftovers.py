"""Detects rows that belong to no session."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sqlite3

REACHES = {"messages": "base_messages", "tokens": "base_pieces", "marks": "base_marks", "turns": "base_turns"}
"""The columns that say how many rows of a table a session begins with."""


def assert_nothing_is_left(database: sqlite3.Connection) -> None:
    """Assert that each row belongs to a session, and each key to the session that received it."""
    sessions = [row for (row,) in database.execute("SELECT id FROM sessions WHERE complete")]
    for table in REACHES:
        held = {each for session in sessions for each in _held(database, session, table)}
        assert set(database.execute(f"SELECT session, n FROM {table}")) == held, table
    keyed = set(database.execute("SELECT session, n FROM turns WHERE turn_key IS NOT NULL OR ending IS NOT NULL"))
    own = {each for session in sessions for each in _held(database, session, "turns", own=True)}
    assert keyed <= own
    for table in ("orders", "failures", "said"):
        owners = {row for (row,) in database.execute(f"SELECT session FROM {table}")}
        assert owners <= set(sessions), table
    unowned = (
        "SELECT count(*) FROM sessions WHERE NOT complete AND id NOT IN (SELECT base FROM sessions WHERE base > 0)"
    )
    assert database.execute(unowned).fetchone() == (0,)
    assert not database.execute("PRAGMA foreign_key_check").fetchall()


def _held(database: sqlite3.Connection, row: int, table: str, *, own: bool = False) -> set[tuple[int, int]]:
    """The rows of a table that a session has, or only its own."""
    held: set[tuple[int, int]] = set()
    first, limit = 0, math.inf
    of: int | None = row
    while of is not None:
        query = f"SELECT n FROM {table} WHERE session = ? AND n >= ? AND n < ?"
        held |= {(of, n) for (n,) in database.execute(query, (of, first, limit))}
        base, reach, keys = database.execute(
            f"SELECT base, {REACHES[table]}, base_keys FROM sessions WHERE id = ?",
            (of,),
        ).fetchone()
        first = keys if own and of == row else first
        of, limit = base, min(limit, reach)
    return held

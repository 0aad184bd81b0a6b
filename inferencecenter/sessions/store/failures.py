"""Why turns failed that have a note: the event that told so, of the latest of each session."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inferencecenter.sessions.ledger import MAX_FAILURES, Failure
from inferencecenter.sessions.store import rows

if TYPE_CHECKING:
    import sqlite3

    from inferencecenter.sessions.records import Dropped


def keep(database: sqlite3.Connection, session: int, record: Dropped) -> None:
    """Write why a turn failed, if whoever asked for it has noted something."""
    if record.failure is None or not record.failure.note:
        return
    values = (session, record.seq, record.turn_id, rows.error_column(record.failure.error), record.failure.note)
    database.execute("INSERT OR REPLACE INTO failures VALUES (?, ?, ?, ?, ?)", values)
    database.execute(
        "DELETE FROM failures WHERE session = ?1 AND seq <="
        " (SELECT seq FROM failures WHERE session = ?1 ORDER BY seq DESC LIMIT 1 OFFSET ?2)",
        (session, MAX_FAILURES),
    )


def forget(database: sqlite3.Connection, session: int) -> None:
    """Delete all of a session's."""
    database.execute("DELETE FROM failures WHERE session = ?", (session,))


def read(database: sqlite3.Connection, session: int) -> dict[str, Failure]:
    """Return a session's by the ids of turns, the latest last.

    Raises:
        ValueError: A row does not say what it should.
    """
    held = database.execute("SELECT turn_id, error, note FROM failures WHERE session = ? ORDER BY seq", (session,))
    return {turn_id: Failure(rows.error_of(error), note) for turn_id, error, note in held.fetchall()}

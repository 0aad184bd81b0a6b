"""What turns took, added up by client, token and day."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sqlite3

    from inferencecenter.sessions.records import Spent


def count(database: sqlite3.Connection, record: Spent) -> None:
    """Count what was spent."""
    database.execute(
        "INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET turns = turns + excluded.turns,"
        " prompt_tokens = prompt_tokens + excluded.prompt_tokens,"
        " cached_tokens = cached_tokens + excluded.cached_tokens,"
        " completion_tokens = completion_tokens + excluded.completion_tokens",
        (
            *(record.client_id, record.token_id, day_of(record.at), record.turns),
            *(record.prompt_tokens, record.cached_tokens, record.completion_tokens),
        ),
    )


def day_of(at: float) -> str:
    """Return the day of a time in Unix seconds, in UTC, as 2026-11-21."""
    return datetime.fromtimestamp(at, UTC).date().isoformat()

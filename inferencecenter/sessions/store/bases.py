"""Copy-on-write sharing of row prefixes between sessions.

A fork does not copy its parent's rows. Its row in ``sessions`` refers to a *base* row and to how many of the base's
first messages, token pieces, marks and turns it shares (``Reach``); its own rows continue that numbering, and a base
may itself have a base. Invariant: rows within the reach of another session are never modified or deleted, only appended
to. A session that would truncate shared rows moves to a new row and leaves its old one as a base without a session; a
deleted session does the same. Such rows have ``complete`` unset, are invisible to readers, and ``sweep`` deletes what
nothing refers to any more, in bounded steps. References are stored only in the ``base`` column and its index, so a
start finds and sweeps what a killed daemon left.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    import sqlite3

ROW_BYTES: Final = 128
"""Approximate size of a row without its variable columns."""
_BASE_BYTES: Final = 4096
"""Budget charged for deleting a row of ``sessions``: a dozen statements."""
# SQL for the variable size in bytes of a row of each kind. To remove the words of a message from the search index takes
# four times as long as to delete it.
_WEIGHTS: Final = {
    "messages": "5 * length(content) + coalesce(length(more), 0)",
    "tokens": "length(ids) + length(covered)",
    "marks": "0",
    "turns": "length(note) + coalesce(length(ending), 0)",
}
KINDS: Final = tuple(_WEIGHTS)
"""The tables with shared rows, in the order of ``Reach``."""


class Reach(NamedTuple):
    """Length of a prefix: the number of leading rows of each kind."""

    messages: int = 0
    pieces: int = 0
    marks: int = 0
    turns: int = 0

    def is_within(self, other: Reach) -> bool:
        """Return whether ``other`` covers this prefix."""
        return all(map(operator.le, self, other))

    def shared(self, other: Reach) -> Reach:
        return Reach(*map(min, self, other))


_NOTHING: Final = Reach()


@dataclass(frozen=True, slots=True)
class Base:
    """The base ``row`` of a session and the prefix that the session shares.

    Turns from number ``keys`` on were its own, with idempotency keys of its client; earlier ones belong to another
    session.
    """

    row: int
    reach: Reach
    keys: int


def base_of(database: sqlite3.Connection, row: int) -> Base | None:
    held = database.execute(
        "SELECT base, base_messages, base_pieces, base_marks, base_turns, base_keys FROM sessions WHERE id = ?", (row,)
    ).fetchone()
    if held is None or held[0] is None:
        return None
    base, *reach, keys = held
    return Base(base, Reach(*reach), keys)


def referenced_prefix(database: sqlite3.Connection, row: int) -> Reach:
    """Return the prefix of a row that other rows refer to."""
    held = database.execute(
        "SELECT max(base_messages), max(base_pieces), max(base_marks), max(base_turns) FROM sessions WHERE base = ?",
        (row,),
    ).fetchone()
    return _NOTHING if held[0] is None else Reach(*held)


def set_base(database: sqlite3.Connection, row: int, base: Base | None) -> None:
    """Set the base of a row, or the base of that if it covers the same prefix."""
    found = None if base is None or base.reach == _NOTHING else base
    while found is not None and (below := base_of(database, found.row)) is not None:
        if not found.reach.is_within(below.reach):
            break
        found = Base(below.row, found.reach, found.keys)
    values = (None, *_NOTHING, 0) if found is None else (found.row, *found.reach, found.keys)
    database.execute(
        "UPDATE sessions SET base = ?, base_messages = ?, base_pieces = ?, base_marks = ?, base_turns = ?,"
        " base_keys = ? WHERE id = ?",
        (*values, row),
    )


def clear_turn_keys(database: sqlite3.Connection, row: int, first: int) -> None:
    """Delete the idempotency keys, and the stored results, of a session's turns from number ``first`` on."""
    end = math.inf
    base = base_of(database, row)
    if base is not None:
        _clear_keys(database, row, max(first, base.reach.turns), end)
        first = max(first, base.keys)
    else:
        _clear_keys(database, row, first, end)
    while base is not None and first < (end := min(end, base.reach.turns)):
        _clear_keys(database, base.row, first, end)
        base = base_of(database, base.row)


def relocate(database: sqlite3.Connection, row: int, kept: Reach) -> int:
    """Move a session to a new row that shares ``kept`` of its present one, and return the new row.

    The present row becomes a base without a session.
    """
    base = base_of(database, row)
    keys = 0 if base is None else min(base.keys, kept.turns)
    held = database.execute(f"SELECT {_OWN} FROM sessions WHERE id = ?", (row,)).fetchone()  # noqa: S608 - columns
    database.execute("UPDATE sessions SET session_id = 'b_' || id WHERE id = ?", (row,))
    insertion = f"INSERT INTO sessions ({_OWN}) VALUES ({', '.join('?' * len(held))})"  # noqa: S608 - columns
    new = database.execute(insertion, held).lastrowid
    assert new is not None, "an insertion gives a row"
    set_base(database, new, Base(row, kept, keys))
    for table in ("orders", "failures", "said"):
        database.execute(f"UPDATE {table} SET session = ? WHERE session = ?", (new, row))  # noqa: S608 - three names
    _detach(database, row)
    return new


def detach(database: sqlite3.Connection, row: int) -> None:
    """Detach a row from its session; ``sweep`` deletes the rows that no other session shares."""
    clear_turn_keys(database, row, 0)
    for table in ("orders", "failures", "said"):
        database.execute(f"DELETE FROM {table} WHERE session = ?", (row,))  # noqa: S608 - three names
    _detach(database, row)


def sweep(database: sqlite3.Connection, rows: list[int], budget: float = math.inf) -> float:
    """Delete what nothing refers to of ``rows`` and of their bases, about ``budget`` bytes of it.

    Finished rows are removed from ``rows``. Returns the rest of the budget.
    """
    while rows and budget > 0:
        row = rows[0]
        held = database.execute("SELECT complete FROM sessions WHERE id = ?", (row,)).fetchone()
        if held is not None and not held[0]:
            needed = referenced_prefix(database, row)
            for kind, n_needed in zip(KINDS, needed, strict=True):
                budget = _truncate(database, kind, row, n_needed, budget)
            if budget <= 0:
                break
            base = base_of(database, row)
            if base is not None and not base.reach.is_within(needed):
                set_base(database, row, Base(base.row, base.reach.shared(needed), 0))
                rows.append(base.row)
            if needed == _NOTHING:
                database.execute("DELETE FROM said WHERE session = ?", (row,))
                database.execute("DELETE FROM sessions WHERE id = ?", (row,))
        budget -= _BASE_BYTES
        del rows[0]
    return budget


def detached_rows(database: sqlite3.Connection) -> list[int]:
    """Return the rows that belong to no session."""
    return [row for (row,) in database.execute("SELECT id FROM sessions WHERE NOT complete")]


_OWN: Final = (
    "session_id, client_id, epoch, seq, created_at, last_used_at, made_by, view_kept, view_resumes_at, facts, complete"
)


def _clear_keys(database: sqlite3.Connection, row: int, first: int, end: float) -> None:
    database.execute(
        "UPDATE turns SET turn_key = NULL, ending = NULL WHERE session = ? AND n >= ? AND n < ? AND turn_key NOT NULL",
        (row, first, end),
    )


def _detach(database: sqlite3.Connection, row: int) -> None:
    database.execute(
        "UPDATE sessions SET session_id = 'b_' || id, epoch = '', seq = 0, created_at = 0, last_used_at = 0,"
        " made_by = '', view_kept = 0, view_resumes_at = 0, facts = '', complete = 0, archived = 0 WHERE id = ?",
        (row,),
    )


def _truncate(database: sqlite3.Connection, kind: str, row: int, n_kept: int, budget: float) -> float:
    """Delete the last own rows of a kind, within the budget, and return the rest of the budget."""
    if budget <= 0:
        return budget
    first = None
    held = database.execute(
        f"SELECT n, {_WEIGHTS[kind]} FROM {kind} WHERE session = ? AND n >= ? ORDER BY n DESC",  # noqa: S608 - four names
        (row, n_kept),
    )
    for n, n_bytes in held:
        first = n
        budget -= ROW_BYTES + n_bytes
        if budget <= 0:
            break
    held.close()
    if first is not None:
        database.execute(f"DELETE FROM {kind} WHERE session = ? AND n >= ?", (row, first))  # noqa: S608 - four names
    return budget

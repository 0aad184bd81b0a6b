"""Sessions out of the file, each on its own: what cannot be read of one takes nothing from the others."""

from __future__ import annotations

import contextlib
import gc
import sqlite3
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import structlog

from inferencecenter.sessions.history import TOKEN_BYTES, History, View
from inferencecenter.sessions.ledger import MAX_TURN_KEYS
from inferencecenter.sessions.records import Kept, Unfinished
from inferencecenter.sessions.speaking import decode_parts
from inferencecenter.sessions.store import failures, rows
from inferencecenter.sessions.store.difference import Written
from inferencecenter.sessions.store.recorder import Known

if TYPE_CHECKING:
    from collections.abc import Iterator

    from inferencecenter.protocol.events import End
    from inferencecenter.protocol.values import TranscriptTurn

_SESSION: Final = (
    "SELECT session_id, client_id, epoch, seq, created_at, last_used_at, made_by, view_kept, view_resumes_at, facts"
    " FROM sessions WHERE id = ?"
)
_MESSAGES: Final = "SELECT n, role, content, more FROM messages WHERE session = ? ORDER BY n"
_TOKENS: Final = "SELECT n, ids, covered FROM tokens WHERE session = ? ORDER BY n"
_MARKS: Final = (
    "SELECT n, turn_id, n_before, n_messages, n_tokens, n_chars, view_kept, view_resumes_at"
    " FROM marks WHERE session = ? ORDER BY n"
)
_TURNS: Final = (
    "SELECT n, turn_id, finish_reason, messages, prompt_tokens, cached_tokens, completion_tokens, reasoning_tokens,"
    " turn_key, ending, note FROM turns WHERE session = ? ORDER BY n"
)
_ORDER: Final = (
    "SELECT turn_id, request, params, rank, warnings, submitted_at, rendered_at, made_by, view_kept, view_resumes_at,"
    " model, token_id, note FROM orders WHERE session = ?"
)

_SCANS: Final = (
    "SELECT id, session_id FROM sessions NOT INDEXED ORDER BY id",
    "SELECT id, session_id FROM sessions NOT INDEXED ORDER BY id DESC",
    "SELECT id, session_id FROM sessions INDEXED BY sqlite_autoindex_sessions_1 ORDER BY session_id",
    "SELECT id, session_id FROM sessions INDEXED BY sqlite_autoindex_sessions_1 ORDER BY session_id DESC",
)
_SAID: Final = "SELECT session, seq, ids, text, parts FROM said ORDER BY rowid"

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Said:
    """What a session's unfinished turn has said, and the number of the last event of it."""

    seq: int = 0
    tokens: list[bytes] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Found:
    """A session in the file, and what of it is where."""

    kept: Kept
    known: Known


@dataclass(frozen=True, slots=True)
class Contents:
    """The sessions that can be read, oldest first, and why others cannot, by their names."""

    found: list[Found]
    unreadable: dict[str, str]


def read_all(database: sqlite3.Connection) -> Contents:
    """Return every session that can be read; the others stay in the file as they are."""
    said = read_said(database)
    found: list[Found] = []
    unreadable: dict[str, str] = {}
    with _no_collection():
        for row, name in session_rows(database).items():
            try:
                found.append(read_one(database, row, said))
            except Exception as error:  # noqa: BLE001 - the border to what other programs and disks made of a row
                unreadable[name] = _reason(error)
    return Contents(found, unreadable)


def session_rows(database: sqlite3.Connection) -> dict[int, str]:
    """Return the names of all sessions by their rows, oldest first.

    Where a page of the table is damaged its other pages are reached from both ends, and through its indexes.
    """
    names: dict[int, str] = {}
    for scan in _SCANS:
        try:
            for row, name in database.execute(scan):
                names[row] = name
        except sqlite3.Error as error:
            _log.warning("sessions_damaged", reason=_reason(error))
        else:
            break
    incomplete = _incomplete_rows(database)
    return {row: names[row] for row in sorted(names) if row not in incomplete}


def _incomplete_rows(database: sqlite3.Connection) -> set[int]:
    """Return the rows of sessions that are being written or deleted in parts, as far as that can be read."""
    try:
        return {row for (row,) in database.execute("SELECT id FROM sessions WHERE NOT complete")}
    except sqlite3.Error:
        return set()


def read_said(database: sqlite3.Connection) -> dict[int, Said] | None:
    """Return what unfinished turns have said by the rows of their sessions; ``None`` if it cannot be read."""
    said: defaultdict[int, Said] = defaultdict(Said)
    try:
        for row, seq, tokens, text, parts in database.execute(_SAID):
            here = said[row]
            here.seq = seq
            here.tokens.append(tokens)
            here.texts.append(text)
            if parts is not None:
                here.parts.append(parts)
    except sqlite3.Error as error:
        _log.error("answers_unreadable", reason=_reason(error))
        return None
    return dict(said)


def read_one(database: sqlite3.Connection, row: int, said: dict[int, Said] | None) -> Found:
    """Return the session in a row of ``sessions``.

    Raises:
        sqlite3.Error: Its rows cannot be read.
        ValueError: They do not say what they should.
    """
    held = database.execute(_SESSION, (row,)).fetchone()
    if held is None:
        raise ValueError("its row is missing")
    session_id, client_id, epoch, seq, created_at, last_used_at, made_by, kept, resumes_at, facts = held
    history, pieces = _history(database, row, view=View(kept, resumes_at), made_by=made_by)
    turns, ends, notes, first_turn = _turns(database, row)
    here = Said() if said is None else said.get(row, Said())
    unfinished = _unfinished(database, row, here)
    if unfinished is not None and said is None:
        raise ValueError("what its turn has said cannot be read")
    session = Kept(
        facts=rows.facts_of(facts, session_id=session_id, client_id=client_id, epoch=epoch, created_at=created_at),
        seq=max(seq, here.seq),
        last_used_at=last_used_at,
        history=history,
        turns=turns,
        ends=ends,
        unfinished=unfinished,
        notes=notes,
        failures=failures.read(database, row),
    )
    written = Written(history, pieces, turns, first_turn)
    return Found(session, Known(row, written, unfinished.order.turn_id if unfinished else None))


def _history(
    database: sqlite3.Connection, row: int, *, view: View, made_by: str
) -> tuple[History, tuple[tuple[int, int], ...]]:
    messages = rows.numbered(database.execute(_MESSAGES, (row,)).fetchall())
    marks = rows.numbered(database.execute(_MARKS, (row,)).fetchall())
    tokens, covered = bytearray(), ""
    pieces: list[tuple[int, int]] = []
    for ids, text in rows.numbered(database.execute(_TOKENS, (row,)).fetchall()):
        tokens += ids
        covered += text
        pieces.append((len(tokens), len(covered)))
    if len(tokens) % TOKEN_BYTES:
        raise ValueError("a token is cut")
    history = History(
        rows.messages_of(messages), bytes(tokens), covered, view, tuple(map(rows.mark_of, marks)), made_by
    )
    return history, tuple(pieces)


def _turns(
    database: sqlite3.Connection, row: int
) -> tuple[tuple[TranscriptTurn, ...], dict[str, End], dict[str, str], int]:
    """Return a session's turns, the ends of the latest that have keys, all notes, and the number of the first row."""
    held = database.execute(_TURNS, (row,)).fetchall()
    first = held[0][0] if held else 0
    numbered = rows.numbered(held, first)
    ends: dict[str, End] = {}
    for turn_key, ending in [each[-3:-1] for each in numbered if each[-3] is not None][-MAX_TURN_KEYS:]:
        ends.pop(turn_key, None)
        ends[turn_key] = rows.end_of(ending)
    turns = rows.turns_of([each[:-3] for each in numbered])
    notes = {turn.turn_id: each[-1] for turn, each in zip(turns, numbered, strict=True) if each[-1]}
    return turns, ends, notes, first


def _unfinished(database: sqlite3.Connection, row: int, said: Said) -> Unfinished | None:
    held = database.execute(_ORDER, (row,)).fetchone()
    if held is None:
        return None
    return Unfinished(
        order=rows.order_of(held),
        tokens=b"".join(said.tokens),
        text="".join(said.texts),
        parts=decode_parts(said.parts) if said.parts else None,
    )


def _reason(error: Exception) -> str:
    """Return what is wrong without what was said: other messages than SQLite's own quote the values."""
    return str(error) if hasattr(error, "sqlite_errorcode") else type(error).__name__


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python from looking for garbage where everything stays: two thirds of the time that reading would take."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()

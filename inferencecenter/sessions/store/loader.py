"""Loads sessions from the file one by one; an unreadable session does not affect the others.

Rows that several sessions share are read once, and the sessions share them in memory too.
"""

from __future__ import annotations

import contextlib
import gc
import sqlite3
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Final, TypeVar

import structlog
from pydantic import ValidationError

from inferencecenter.core.sqlite_file import transaction
from inferencecenter.protocol.values import Preset
from inferencecenter.sessions.history import MAX_TURN_KEYS, TOKEN_BYTES, History, HistoryView, TurnFailure
from inferencecenter.sessions.journal import PendingTurn, StoredSession
from inferencecenter.sessions.output_parsing.assembler import decode_parts
from inferencecenter.sessions.store import rows
from inferencecenter.sessions.store.bases import Reach, base_of
from inferencecenter.sessions.store.diff import PersistedState
from inferencecenter.sessions.store.recorder import SessionRow

if TYPE_CHECKING:
    from collections.abc import Iterator

    from inferencecenter.protocol.events import End
    from inferencecenter.protocol.values import ChatMessage, TranscriptTurn
    from inferencecenter.sessions.history import TurnCheckpoint
    from inferencecenter.sessions.store.bases import Base

_SESSION: Final = (
    "SELECT session_id, client_id, epoch, seq, created_at, last_used_at, made_by, view_kept, view_resumes_at, facts,"
    " mcp_calls FROM sessions WHERE id = ?"
)
_MESSAGES: Final = "SELECT n, role, content, more FROM messages WHERE session = ? AND n >= ? ORDER BY n"
_TOKENS: Final = "SELECT n, ids, covered FROM tokens WHERE session = ? AND n >= ? ORDER BY n"
_MARKS: Final = (
    "SELECT n, turn_id, n_before, n_messages, n_tokens, n_chars, view_kept, view_resumes_at"
    " FROM marks WHERE session = ? AND n >= ? ORDER BY n"
)
_TURNS: Final = (
    "SELECT n, turn_id, finish_reason, messages, prompt_tokens, cached_tokens, completion_tokens, reasoning_tokens,"
    " ended_at, turn_key, ending, note FROM turns WHERE session = ? AND n >= ? ORDER BY n"
)
_BASES: Final = "SELECT DISTINCT base FROM sessions WHERE base IS NOT NULL"
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
RECENT: Final = 256
"""Sessions without an unfinished turn that a start loads, all clients together; the others are archived."""
RECENT_PER_CLIENT: Final = 16
"""Of these, how many of one client."""
# Sessions whose settings cannot be read are loaded, so that they are reported.
_ARCHIVE_UNUSED: Final = """
    WITH RECURSIVE unused (id) AS (
        SELECT id FROM (
            SELECT id, facts, row_number() OVER (PARTITION BY client_id ORDER BY last_used_at DESC, id DESC) AS n_own,
                row_number() OVER (ORDER BY last_used_at DESC, id DESC) AS n_all
            FROM sessions WHERE complete AND NOT archived
        )
        WHERE (n_own > ?1 OR n_all > ?2) AND id NOT IN (SELECT session FROM orders)
            AND CASE WHEN json_valid(facts) THEN facts ->> 'on_disconnect' = 'detach' ELSE 0 END
    ), held (session, row, messages, pieces) AS (
        SELECT id, id, 1e99, 1e99 FROM unused
        UNION ALL
        SELECT session, base, min(messages, base_messages), min(pieces, base_pieces)
        FROM held JOIN sessions ON id = row WHERE base IS NOT NULL
    ), counted AS (
        SELECT session,
            sum((SELECT count(*) FROM messages WHERE messages.session = row AND n < held.messages)) AS n_messages,
            sum((SELECT coalesce(sum(length(content) + coalesce(length(more), 0)), 0)
                 FROM messages WHERE messages.session = row AND n < held.messages)) AS n_chars,
            sum((SELECT coalesce(sum(length(ids)), 0) FROM tokens WHERE tokens.session = row AND n < pieces)) AS n_bytes
        FROM held GROUP BY session
    )
    UPDATE sessions SET archived = 1, n_messages = counted.n_messages, n_tokens = counted.n_bytes / 4,
        n_chars = counted.n_chars, ttl_s = facts ->> 'ttl_s'
    FROM counted WHERE counted.session = sessions.id
"""
_OUTPUT: Final = "SELECT session, seq, ids, text, parts FROM said ORDER BY rowid"

_T = TypeVar("_T")
_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class PendingOutput:
    """Output of an unfinished turn and the number of its last event."""

    seq: int = 0
    tokens: list[bytes] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LoadedSession:
    """A session and the location of its rows."""

    session: StoredSession
    location: SessionRow


@dataclass(frozen=True, slots=True)
class StoreContents:
    """The readable sessions, oldest first, the reasons why others are unreadable, by name, and presets by client."""

    found: list[LoadedSession]
    unreadable: dict[str, str]
    presets: list[tuple[str, Preset]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _OwnRows:
    """A row's own rows, numbered from ``start``, and its base.

    ``answers`` are the idempotency keys, results and notes of its turns; the oldest turns may be missing.
    """

    base: Base | None
    start: Reach
    messages: tuple[ChatMessage, ...]
    pieces: tuple[tuple[bytes, str], ...]
    marks: tuple[TurnCheckpoint, ...]
    turns: tuple[TranscriptTurn, ...]
    answers: tuple[rows.Row, ...]
    first_turn: int


@dataclass(slots=True)
class _AllRows:
    """All rows of a session including its bases; keys of turns from number ``first_key`` on are its own.

    ``tokens`` and ``covered`` are the concatenated pieces.
    """

    messages: tuple[ChatMessage, ...] = ()
    pieces: list[tuple[bytes, str]] = field(default_factory=list)
    marks: tuple[TurnCheckpoint, ...] = ()
    turns: tuple[TranscriptTurn, ...] = ()
    answers: tuple[rows.Row, ...] = ()
    first_turn: int = 0
    first_key: int = 0
    tokens: bytes = b""
    covered: str = ""

    def add(self, own: _OwnRows, limit: Reach | None) -> None:
        """Add a base's own rows up to ``limit``.

        Raises:
            ValueError: Some rows are missing.
        """
        if not self.turns:
            self.first_turn = own.first_turn
        self.messages += _up_to(own.messages, own.start.messages, limit and limit.messages)
        self.pieces += _up_to(own.pieces, own.start.pieces, limit and limit.pieces)
        self.marks += _up_to(own.marks, own.start.marks, limit and limit.marks)
        turns = _up_to(own.turns, own.first_turn, limit and limit.turns)
        self.turns += turns
        self.answers += own.answers[: len(turns)]


class SharedRows:
    """Reads rows of ``sessions``; if it ``is_shared`` by all sessions, caches those that several share."""

    def __init__(self, database: sqlite3.Connection, *, is_shared: bool = True) -> None:
        self._database = database
        self._referred: set[int] = set()
        self._own: dict[int, _OwnRows] = {}
        self._joined_pieces: dict[tuple[int, int], tuple[bytes, str]] = {}
        # In a damaged file, shared rows may be read more than once.
        if is_shared:
            with contextlib.suppress(sqlite3.Error):
                self._referred.update(base for (base,) in database.execute(_BASES))

    def read(self, row: int) -> _AllRows:
        """Return all rows of a session.

        Raises:
            sqlite3.Error: The rows cannot be read.
            ValueError: The rows are invalid.
        """
        own = self._own_of(row)
        found = _AllRows(first_key=own.base.keys if own.base is not None else 0)
        chain: dict[int, tuple[_OwnRows, Reach | None]] = {row: (own, None)}
        limit: Reach | None = None
        while (base := own.base) is not None:
            if base.row in chain:
                raise ValueError("its bases form a cycle")
            limit = base.reach if limit is None else limit.shared(base.reach)
            own = self._own_of(base.row)
            chain[base.row] = own, limit
        text_row = row
        for each, (own, reach) in reversed(chain.items()):
            n_before = len(found.pieces)
            found.add(own, reach)
            text_row = each if len(found.pieces) > n_before else text_row
        # Sessions whose last piece is in the same row share the concatenated text.
        key = text_row, len(found.pieces)
        if key not in self._joined_pieces:
            self._joined_pieces[key] = _joined(found.pieces)
        found.tokens, found.covered = self._joined_pieces[key]
        return found

    def _own_of(self, row: int) -> _OwnRows:
        found = self._own.get(row)
        if found is None:
            found = _own_rows(self._database, row)
            if row in self._referred:
                self._own[row] = found
        return found


def archive_unused(database: sqlite3.Connection, *, clean: bool) -> None:
    """Archive all sessions but the recently used and those with an unfinished turn.

    Unless the last shutdown was ``clean``, archived sessions get a new epoch, as the others do when they are restored.

    Raises:
        sqlite3.Error: The file cannot be written, or is damaged.
    """
    with transaction(database):
        database.execute(_ARCHIVE_UNUSED, (RECENT_PER_CLIENT, RECENT))
        if not clean:
            database.execute("UPDATE sessions SET epoch = 'e_' || lower(hex(randomblob(16))) WHERE archived")


def read_all(database: sqlite3.Connection) -> StoreContents:
    """Return every readable session that is not archived; the others are left in the file."""
    output, shared = read_pending_output(database), SharedRows(database)
    found: list[LoadedSession] = []
    unreadable: dict[str, str] = {}
    archived = _archived_rows(database)
    with _gc_disabled():
        for row, name in session_rows(database).items():
            if row in archived:
                continue
            try:
                found.append(read_one(database, row, output, shared))
            except Exception as error:  # noqa: BLE001 - a corrupt row can raise anything
                unreadable[name] = _reason(error)
    return StoreContents(found, unreadable, _read_presets(database))


def _read_presets(database: sqlite3.Connection) -> list[tuple[str, Preset]]:
    """Return the readable presets with their clients; the others are left in the file."""
    found = []
    try:
        for client_id, body in database.execute("SELECT client_id, body FROM presets"):
            try:
                found.append((client_id, Preset.model_validate_json(body)))
            except ValidationError as error:
                _log.error("preset_unreadable", client=client_id, reason=_reason(error))
    except sqlite3.Error as error:
        _log.warning("presets_damaged", reason=_reason(error))
    return found


def session_rows(database: sqlite3.Connection) -> dict[int, str]:
    """Return the names of all sessions by row, oldest first.

    If a page of the table is damaged, the others are reached from both ends and through the index.
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


def _archived_rows(database: sqlite3.Connection) -> set[int]:
    """Return the rows of archived sessions, as far as they can be read."""
    try:
        return {row for (row,) in database.execute("SELECT id FROM sessions WHERE archived")}
    except sqlite3.Error:
        return set()


def _incomplete_rows(database: sqlite3.Connection) -> set[int]:
    """Return the rows that are not ``complete``, as far as they can be read."""
    try:
        return {row for (row,) in database.execute("SELECT id FROM sessions WHERE NOT complete")}
    except sqlite3.Error:
        return set()


def read_pending_output(database: sqlite3.Connection) -> dict[int, PendingOutput] | None:
    """Return the output of unfinished turns by session row; ``None`` if it cannot be read."""
    output: defaultdict[int, PendingOutput] = defaultdict(PendingOutput)
    try:
        for row, seq, tokens, text, parts in database.execute(_OUTPUT):
            here = output[row]
            here.seq = seq
            here.tokens.append(tokens)
            here.texts.append(text)
            if parts is not None:
                here.parts.append(parts)
    except sqlite3.Error as error:
        _log.error("answers_unreadable", reason=_reason(error))
        return None
    return dict(output)


def read_one(
    database: sqlite3.Connection, row: int, output: dict[int, PendingOutput] | None, shared: SharedRows
) -> LoadedSession:
    """Return the session in a row of ``sessions``.

    Raises:
        sqlite3.Error: Its rows cannot be read.
        ValueError: Its rows are invalid.
    """
    held = database.execute(_SESSION, (row,)).fetchone()
    if held is None:
        raise ValueError("its row is missing")
    session_id, client_id, epoch, seq, created_at, last_used_at, model_fingerprint, kept, resumes_at, *rest = held
    config, mcp_calls = rest
    read = shared.read(row)
    ends, notes = _answers(read)
    here = PendingOutput() if output is None else output.get(row, PendingOutput())
    pending_turn = _pending_turn(database, row, here)
    if pending_turn is not None and output is None:
        raise ValueError("the output of its turn cannot be read")
    session = StoredSession(
        config=rows.config_of(config, session_id=session_id, client_id=client_id, epoch=epoch, created_at=created_at),
        seq=max(seq, here.seq),
        last_used_at=last_used_at,
        history=History(
            read.messages, read.tokens, read.covered, HistoryView(kept, resumes_at), read.marks, model_fingerprint
        ),
        turns=read.turns,
        ends=ends,
        pending_turn=pending_turn,
        notes=notes,
        failures=_failures(database, row),
        mcp_calls=rows.mcp_calls_of(mcp_calls),
    )
    written = PersistedState(session.history, _ends_of(read.pieces), read.turns, read.first_turn)
    return LoadedSession(session, SessionRow(row, written, pending_turn.spec.turn_id if pending_turn else None))


def _own_rows(database: sqlite3.Connection, row: int) -> _OwnRows:
    base = base_of(database, row)
    start = Reach() if base is None else base.reach

    def own(query: str, first: int) -> list[rows.Row]:
        return database.execute(query, (row, first)).fetchall()

    turns = own(_TURNS, start.turns)
    first_turn = turns[0][0] if turns and not start.turns else start.turns
    turns = rows.numbered(turns, first_turn)
    return _OwnRows(
        base=base,
        start=start,
        messages=rows.messages_of(rows.numbered(own(_MESSAGES, start.messages), start.messages)),
        pieces=tuple((ids, text) for ids, text in rows.numbered(own(_TOKENS, start.pieces), start.pieces)),
        marks=tuple(map(rows.mark_of, rows.numbered(own(_MARKS, start.marks), start.marks))),
        turns=rows.turns_of([each[:-3] for each in turns]),
        answers=tuple(each[-3:] for each in turns),
        first_turn=first_turn,
    )


def _up_to(held: tuple[_T, ...], start: int, limit: int | None) -> tuple[_T, ...]:
    """Return the rows, numbered from ``start``, that are below the limit."""
    if limit is None:
        return held
    if limit > start + len(held):
        raise ValueError("rows of its base are missing")
    return held[: max(0, limit - start)]


def _joined(pieces: list[tuple[bytes, str]]) -> tuple[bytes, str]:
    tokens, covered = b"".join(ids for ids, _ in pieces), "".join(text for _, text in pieces)
    if len(tokens) % TOKEN_BYTES:
        raise ValueError("a token is truncated")
    return tokens, covered


def _ends_of(pieces: list[tuple[bytes, str]]) -> tuple[tuple[int, int], ...]:
    lengths = (accumulate(len(ids) for ids, _ in pieces), accumulate(len(text) for _, text in pieces))
    return tuple(zip(*lengths, strict=True))


def _answers(read: _AllRows) -> tuple[dict[str, End], dict[str, str]]:
    """Return the results of the latest turns with own idempotency keys, and all notes."""
    keyed = [
        (turn_key, ending)
        for n, (turn_key, ending, _) in enumerate(read.answers, read.first_turn)
        if turn_key is not None and n >= read.first_key
    ]
    ends: dict[str, End] = {}
    for turn_key, ending in keyed[-MAX_TURN_KEYS:]:
        ends.pop(turn_key, None)
        ends[turn_key] = rows.end_of(ending)
    notes = {turn.turn_id: note for turn, (_, _, note) in zip(read.turns, read.answers, strict=True) if note}
    return ends, notes


def _pending_turn(database: sqlite3.Connection, row: int, output: PendingOutput) -> PendingTurn | None:
    held = database.execute(_ORDER, (row,)).fetchone()
    if held is None:
        return None
    return PendingTurn(
        spec=rows.order_of(held),
        tokens=b"".join(output.tokens),
        text="".join(output.texts),
        parts=decode_parts(output.parts) if output.parts else None,
    )


def _failures(database: sqlite3.Connection, row: int) -> dict[str, TurnFailure]:
    """Return a session's failures by turn id, the latest last."""
    held = database.execute("SELECT turn_id, error, note FROM failures WHERE session = ? ORDER BY seq", (row,))
    return {turn_id: TurnFailure(rows.error_of(error), note) for turn_id, error, note in held.fetchall()}


def _reason(error: Exception) -> str:
    """Return an error message without conversation text: messages other than SQLite's quote values."""
    return str(error) if hasattr(error, "sqlite_errorcode") else type(error).__name__


@contextlib.contextmanager
def _gc_disabled() -> Iterator[None]:
    """Disable the garbage collector, which would take two thirds of the load time and free nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()

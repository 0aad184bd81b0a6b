"""Records become rows: one transaction for any number of them."""

from __future__ import annotations

import math
import sqlite3
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from itertools import groupby
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import structlog

from inferencecenter.core.sqlite_file import transaction
from inferencecenter.sessions.history import MAX_FAILURES, History, TurnFailure
from inferencecenter.sessions.journal import (
    EpochChanged,
    HistoryChanged,
    MetadataChanged,
    Record,
    SessionDeleted,
    SessionOpened,
    TokensAppended,
    TurnEnded,
    TurnFailed,
    TurnQueued,
    UsageRecorded,
)
from inferencecenter.sessions.output_parsing.assembler import encode_parts
from inferencecenter.sessions.store import bases, rows
from inferencecenter.sessions.store.bases import Base, Reach
from inferencecenter.sessions.store.chunking import PART_BYTES, OpenedPart
from inferencecenter.sessions.store.diff import PersistedState, history_diff, turns_diff

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from inferencecenter.protocol.values import TranscriptTurn


PurgeKind: TypeAlias = Literal["session", "client"]

# A statement holds at most 32,766 values; more rows than there are slots at once do not make it faster.
_MAX_ROWS: Final = 64
_NO_NOTES: Final[Mapping[str, str]] = MappingProxyType({})
# Of SQLite's errors those that are about a record, not about the file: they come back every time.
_REFUSED: Final = (sqlite3.IntegrityError, sqlite3.DataError, sqlite3.InterfaceError, sqlite3.ProgrammingError)
# What another attempt may mend.
_PASSING: Final = (sqlite3.Error, OSError, MemoryError)

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Purge:
    """Everything of a session, or of a client and of all its sessions, goes; ``name`` is its id."""

    kind: PurgeKind
    name: str


Entry: TypeAlias = Record | Purge | OpenedPart


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A session in the file: its ``row``, what is written of its history, and the turn that has not ended."""

    row: int
    written: PersistedState
    turn_id: str | None = None


class UnwritableError(Exception):
    """SQLite or our own code refuses an entry as such, whatever the state of the file; ``__cause__`` says why."""

    def __init__(self, entry: Entry) -> None:
        super().__init__(type(entry).__name__)
        self.entry = entry


class Recorder:
    """Writes entries through an open file; one thread at a time.

    Args:
        database: In autocommit mode, with foreign keys on.
        known: The sessions in it by their ids.
    """

    def __init__(self, database: sqlite3.Connection, known: Mapping[str, SessionRow]) -> None:
        self._database = database
        self._known = dict(known)
        self._staged: dict[str, SessionRow | None] = {}
        # Rows that were let go of, by client; what no other session begins with is deleted, a bounded part at a time.
        self._left: dict[str, list[int]] = {}
        self._staged_left: dict[str, list[int]] = {}
        self._durable: bool | None = None
        self._begun = False

    @property
    def unswept(self) -> frozenset[str]:
        """The clients of which something is still in the file that no session holds: further commits delete it."""
        return frozenset(self._left)

    def commit(self, entries: Sequence[Entry], *, durable: bool) -> None:
        """Write all entries or none, and delete a part of what was let go of.

        Args:
            entries: In their order.
            durable: Whether they survive a power cut from then on, otherwise the end of the process.

        Raises:
            UnwritableError: Without one of the entries the others could be written.
            sqlite3.Error: The file cannot be written now.
        """
        self._staged = {}
        self._staged_left = {client_id: list(left) for client_id, left in self._left.items()}
        # A power cut that took the mark below would leave a file that looks as if nothing had been shown.
        self._synchronize(durable or not self._begun)
        if self._begun and not self._left and self._commit_said(entries):
            return
        with transaction(self._database):
            if not self._begun:
                self._database.execute("UPDATE meta SET clean = 0")
            self._sweep(PART_BYTES)
            self._write_all(entries)
            if any(isinstance(entry, Purge) for entry in entries):
                # What was purged is told of when nothing is left of it.
                self._sweep(math.inf)
        self._begun = True
        self._left = self._staged_left
        for session_id, known in self._staged.items():
            if known is None:
                self._known.pop(session_id, None)
            else:
                self._known[session_id] = known

    def sweep(self) -> None:
        """Delete what a killed daemon left of sessions that it was writing or deleting; none was ever told of.

        Raises:
            sqlite3.Error: The file cannot be written.
        """
        if left := bases.unowned(self._database):
            with transaction(self._database):
                bases.sweep(self._database, left)

    def finish(self) -> None:
        """Take note that all that clients were shown is in the file, and that the file is alone.

        Raises:
            sqlite3.Error: It cannot be written.
        """
        self._synchronize(True)
        if self._left:
            with transaction(self._database):
                for left in self._left.values():
                    bases.sweep(self._database, left)
            self._left = {}
        if self._begun:
            self._database.execute("UPDATE meta SET clean = 1")
        self._begun = False
        self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _synchronize(self, durable: bool) -> None:
        if durable is not self._durable:
            self._database.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            self._durable = durable

    def _commit_said(self, entries: Sequence[Entry]) -> bool:
        """Write what was said in one step as one statement, which is a transaction of its own; ``False`` if it is not.

        Each statement lets go of the interpreter's lock and waits for it again, so that their number is what counts.
        """
        if not 0 < len(entries) <= _MAX_ROWS:
            return False
        known = self._known
        values: list[object] = []
        try:
            for entry in entries:
                if type(entry) is not TokensAppended:
                    return False
                parts = None if entry.parts is None else encode_parts(entry.parts)
                values += (known[entry.session_id].row, entry.seq, entry.tokens, entry.text, parts)
            self._database.execute(_insertion(len(entries)), values)
        except Exception as error:
            if not _is_about_record(error):
                raise
            return False
        return True

    def _write_all(self, entries: Iterable[Entry]) -> None:
        for is_said, group in groupby(entries, key=lambda entry: type(entry) is TokensAppended):
            if is_said:
                self._write_said([entry for entry in group if isinstance(entry, TokensAppended)])
            else:
                for entry in group:
                    self._write(entry)

    def _write_said(self, said: Sequence[TokensAppended]) -> None:
        for start in range(0, len(said), _MAX_ROWS):
            part = said[start : start + _MAX_ROWS]
            try:
                self._insert_said(part)
            except Exception as error:
                if not _is_about_record(error):
                    raise
                for each in part:
                    self._write(each)

    def _write(self, entry: Entry) -> None:
        try:
            self._apply(entry)
        except Exception as error:
            # Any other exception than of the file is a defect that this record meets: it must not block all others.
            if not _is_about_record(error):
                raise
            raise UnwritableError(entry) from error

    def _apply(self, entry: Entry) -> None:
        match entry:
            case TokensAppended():
                self._insert_said([entry])
            case TurnQueued():
                self._order(entry)
            case TurnEnded():
                self._end(entry)
            case TurnFailed():
                self._drop(entry)
            case SessionOpened() | OpenedPart():
                self._open(entry)
            case HistoryChanged():
                self._change(entry)
            case MetadataChanged() | EpochChanged():
                self._alter(entry)
            case UsageRecorded():
                add_usage(self._database, entry)
            case SessionDeleted() | Purge():
                self._forget(entry)

    def _alter(self, entry: MetadataChanged | EpochChanged) -> None:
        row = self._find(entry.session_id).row
        if isinstance(entry, EpochChanged):
            self._database.execute("UPDATE sessions SET epoch = ? WHERE id = ?", (entry.epoch, row))
        else:
            config = rows.facts_column(entry.config)
            self._database.execute("UPDATE sessions SET facts = ? WHERE id = ?", (config, row))

    def _forget(self, entry: SessionDeleted | Purge) -> None:
        purge = entry if isinstance(entry, Purge) else Purge("session", entry.session_id)
        for row, session_id in let_go(self._database, purge):
            self._staged[session_id] = None
            self._leave(row)

    def _leave(self, row: int) -> None:
        """Have deleted what no session holds of a row."""
        (client_id,) = self._database.execute("SELECT client_id FROM sessions WHERE id = ?", (row,)).fetchone()
        left = [row]
        bases.sweep(self._database, left, PART_BYTES)
        if left:
            self._staged_left.setdefault(client_id, []).extend(left)

    def _sweep(self, budget: float) -> None:
        """Delete about so many bytes of what was let go of, of the clients in turn."""
        for client_id, left in tuple(self._staged_left.items()):
            if budget <= 0:
                break
            del self._staged_left[client_id]
            try:
                budget = bases.sweep(self._database, left, budget)
            except Exception as error:
                if not _is_about_record(error):
                    raise
                # The next start tries again.
                _log.exception("rows_left", rows=left)
                continue
            if left:
                self._staged_left[client_id] = left

    def _find(self, session_id: str) -> SessionRow:
        known = self._look_up(session_id)
        if known is None:
            raise KeyError(session_id)
        return known

    def _look_up(self, session_id: str) -> SessionRow | None:
        return self._staged[session_id] if session_id in self._staged else self._known.get(session_id)

    def _insert_said(self, said: Sequence[TokensAppended]) -> None:
        values: list[object] = []
        for each in said:
            parts = None if each.parts is None else encode_parts(each.parts)
            values += (self._find(each.session_id).row, each.seq, each.tokens, each.text, parts)
        self._database.execute(_insertion(len(said)), values)

    def _open(self, entry: SessionOpened | OpenedPart) -> None:
        part = OpenedPart(entry, 0, 0, is_first=True, is_last=True) if isinstance(entry, SessionOpened) else entry
        record, config = part.record, part.record.config
        known = self._begin(record) if part.is_first else self._find(config.session_id)
        history, turns = record.history, record.turns
        if not part.is_last:
            history, turns = History(history.messages[: part.n_messages]), turns[: part.n_turns]
        row, written = self._write_history(known, history)
        self._insert_turns(row, written.next_turn, turns[len(written.turns) :], notes=record.notes)
        if part.is_last:
            self._database.execute("UPDATE sessions SET complete = 1 WHERE id = ?", (row,))
        self._staged[config.session_id] = SessionRow(row, replace(written, turns=turns))

    def _begin(self, record: SessionOpened) -> SessionRow:
        """Insert a session's row, which begins with those of its parent that are the same."""
        row = self._insert_session(record)
        parent = self._look_up(record.parent) if record.parent is not None else None
        if parent is None:
            return SessionRow(row, PersistedState())
        held = parent.written
        change, turns = history_diff(held, record.history), turns_diff(held, record.turns)
        reach = Reach(change.n_messages, change.n_pieces, change.n_marks, turns.end)
        bases.refer(self._database, row, Base(parent.row, reach, keys=turns.end))
        pieces = held.pieces[: reach.pieces]
        n_bytes, n_chars = pieces[-1] if pieces else (0, 0)
        history = History(
            held.history.messages[: reach.messages],
            held.history.tokens[:n_bytes],
            held.history.covered[:n_chars],
            turns=held.history.turns[: reach.marks],
        )
        n_turns = len(record.turns) - len(turns.turns)
        return SessionRow(row, PersistedState(history, pieces, record.turns[:n_turns], turns.first))

    def _insert_session(self, record: SessionOpened) -> int:
        """Insert the row of a session that is not complete yet, and return its number."""
        config = record.config
        row = self._database.execute(
            "INSERT INTO sessions (session_id, client_id, epoch, seq, created_at, last_used_at, made_by, view_kept,"
            " view_resumes_at, facts, complete) VALUES (?, ?, ?, 0, ?, ?, '', 0, 0, ?, 0)",
            (
                *(config.session_id, config.client_id, config.epoch, config.created_at, record.last_used_at),
                rows.facts_column(config),
            ),
        ).lastrowid
        assert row is not None, "an insertion gives a row"
        return row

    def _order(self, record: TurnQueued) -> None:
        known = self._find(record.session_id)
        turn_id = record.spec.turn_id
        if known.turn_id not in (None, turn_id):
            self._forget_turn(known.row)
        self._touch(known.row, record)
        self._database.execute(
            "INSERT OR REPLACE INTO orders VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (known.row, *rows.order_row(record.spec)),
        )
        self._staged[record.session_id] = replace(known, turn_id=turn_id)

    def _end(self, record: TurnEnded) -> None:
        known = self._find(record.session_id)
        turn = record.turn
        self._forget_turn(known.row)
        row, written = self._write_history(known, record.history)
        self._touch(row, record)
        ending = rows.ending_column(record.end) if record.turn_key is not None else None
        values = (row, written.next_turn, *rows.turn_row(turn), record.turn_key, ending, record.note)
        self._database.execute(_INSERT_TURN, values)
        add_usage(self._database, record.spent())
        self._staged[record.session_id] = SessionRow(row, replace(written, turns=(*written.turns, turn)))

    def _drop(self, record: TurnFailed) -> None:
        known = self._find(record.session_id)
        self._forget_turn(known.row)
        self._touch(known.row, record)
        insert_failure(self._database, known.row, record)
        if record.spent is not None:
            add_usage(self._database, record.spent)
        self._staged[record.session_id] = replace(known, turn_id=None)

    def _change(self, record: HistoryChanged) -> None:
        known = self._find(record.session_id)
        turns = turns_diff(known.written, record.turns)
        row, written = self._write_history(known, record.history, n_turns=turns.end)
        self._touch(row, record)
        self._insert_turns(row, turns.end, turns.turns)
        if record.rewound:
            delete_failures(self._database, row)
        written = replace(written, turns=record.turns, first_turn=turns.first)
        self._staged[record.session_id] = SessionRow(row, written, known.turn_id)

    def _write_history(
        self, known: SessionRow, now: History, *, n_turns: int | None = None
    ) -> tuple[int, PersistedState]:
        """Write what is different about the history, and return the session's row and what is written then.

        Of its turns those stay whose numbers are below ``n_turns``.
        """
        execute = self._database.execute
        row, before = known.row, known.written
        held = before.history
        change = history_diff(before, now)
        n_kept = before.next_turn if n_turns is None else n_turns
        kept = Reach(change.n_messages, change.n_pieces, change.n_marks, n_kept)
        if kept != (len(held.messages), len(before.pieces), len(held.turns), before.next_turn):
            row = self._cut(row, kept)
        if (held.view, held.model_fingerprint) != (now.view, now.model_fingerprint):
            execute(
                "UPDATE sessions SET view_kept = ?, view_resumes_at = ?, made_by = ? WHERE id = ?",
                (now.view.kept, now.view.resumes_at, now.model_fingerprint, row),
            )
        messages = [(row, n, *rows.message_row(each)) for n, each in enumerate(change.messages, change.n_messages)]
        self._database.executemany("INSERT INTO messages VALUES (?, ?, ?, ?, ?)", messages)
        if change.piece is not None:
            execute("INSERT INTO tokens VALUES (?, ?, ?, ?)", (row, change.n_pieces, *change.piece))
        marks = [(row, n, *rows.mark_row(mark)) for n, mark in enumerate(change.marks, change.n_marks)]
        self._database.executemany("INSERT INTO marks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", marks)
        return row, replace(before, history=now, pieces=change.pieces)

    def _cut(self, row: int, kept: Reach) -> int:
        """Take back a session to what is ``kept``, and return its row, which is another one where others need more."""
        database = self._database
        bases.forget_keys(database, row, kept.turns)
        if not bases.needed_of(database, row).is_within(kept):
            moved = bases.move_on(database, row, kept)
            self._leave(row)
            return moved
        for kind, n_kept in zip(bases.KINDS, kept, strict=True):
            database.execute(f"DELETE FROM {kind} WHERE session = ? AND n >= ?", (row, n_kept))  # noqa: S608 - names
        base = bases.base_of(database, row)
        if base is not None and not base.reach.is_within(kept):
            bases.refer(database, row, Base(base.row, base.reach.shared(kept), min(base.keys, kept.turns)))
            self._leave(base.row)
        return row

    def _insert_turns(
        self, row: int, first: int, turns: Sequence[TranscriptTurn], *, notes: Mapping[str, str] = _NO_NOTES
    ) -> None:
        values = [
            (row, n, *rows.turn_row(turn), None, None, notes.get(turn.turn_id, ""))
            for n, turn in enumerate(turns, first)
        ]
        self._database.executemany(_INSERT_TURN, values)

    def _touch(self, row: int, record: TurnQueued | TurnEnded | TurnFailed | HistoryChanged) -> None:
        self._database.execute(
            "UPDATE sessions SET seq = ?, last_used_at = ? WHERE id = ?", (record.seq, record.last_used_at, row)
        )

    def _forget_turn(self, row: int) -> None:
        self._database.execute("DELETE FROM said WHERE session = ?", (row,))
        self._database.execute("DELETE FROM orders WHERE session = ?", (row,))


_INSERT_TURN: Final = (
    "INSERT INTO turns (session, n, turn_id, finish_reason, messages, prompt_tokens, cached_tokens, completion_tokens,"
    " reasoning_tokens, turn_key, ending, note) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)


def session_of(entry: Entry) -> str | None:
    """Return the session that an entry is about, if it is about one."""
    match entry:
        case SessionOpened(config=config) | OpenedPart(record=SessionOpened(config=config)):
            return config.session_id
        case UsageRecorded() | Purge():
            return None
        case _:
            return entry.session_id


def _is_about_record(error: Exception) -> bool:
    """Tell whether the record that was being written is at fault, rather than the file or the machine."""
    return isinstance(error, _REFUSED) or not isinstance(error, _PASSING)


def let_go(database: sqlite3.Connection, purge: Purge) -> list[tuple[int, str]]:
    """Have what is to go be no sessions any more, inside a transaction of the caller's; ``bases.sweep`` deletes it.

    Returns the rows, and the ids of the sessions.
    """
    which = "session_id = ?" if purge.kind == "session" else "client_id = ?"
    query = f"SELECT id, session_id FROM sessions WHERE {which}"  # noqa: S608 - two columns
    found: list[tuple[int, str]] = database.execute(query, (purge.name,)).fetchall()
    for row, _ in found:
        bases.end(database, row)
    if purge.kind == "client":
        database.execute("DELETE FROM usage WHERE client_id = ?", (purge.name,))
    return found


@cache
def _insertion(n_rows: int) -> str:
    return "INSERT INTO said VALUES " + ", ".join(["(?, ?, ?, ?, ?)"] * n_rows)  # noqa: S608 - no values


def insert_failure(database: sqlite3.Connection, session: int, record: TurnFailed) -> None:
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


def delete_failures(database: sqlite3.Connection, session: int) -> None:
    """Delete all of a session's."""
    database.execute("DELETE FROM failures WHERE session = ?", (session,))


def read_failures(database: sqlite3.Connection, session: int) -> dict[str, TurnFailure]:
    """Return a session's by the ids of turns, the latest last.

    Raises:
        ValueError: A row does not say what it should.
    """
    held = database.execute("SELECT turn_id, error, note FROM failures WHERE session = ? ORDER BY seq", (session,))
    return {turn_id: TurnFailure(rows.error_of(error), note) for turn_id, error, note in held.fetchall()}


def add_usage(database: sqlite3.Connection, record: UsageRecorded) -> None:
    """Count what was spent."""
    database.execute(
        "INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET turns = turns + excluded.turns,"
        " prompt_tokens = prompt_tokens + excluded.prompt_tokens,"
        " cached_tokens = cached_tokens + excluded.cached_tokens,"
        " completion_tokens = completion_tokens + excluded.completion_tokens",
        (
            *(record.client_id, record.token_id, utc_day(record.at), record.turns),
            *(record.prompt_tokens, record.cached_tokens, record.completion_tokens),
        ),
    )


def utc_day(at: float) -> str:
    """Return the day of a time in Unix seconds, in UTC, as 2026-11-21."""
    return datetime.fromtimestamp(at, UTC).date().isoformat()

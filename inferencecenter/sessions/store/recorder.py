"""Writes records as rows: any number of them in one transaction.

Changes to what the file holds of each session are staged during a transaction and take effect with its commit, so a
failed transaction changes nothing in memory either. A record that SQLite or this code rejects by itself is reported
(``UnwritableError``), so that the others can be written without it.
"""

from __future__ import annotations

import math
import sqlite3
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import structlog

from inferencecenter.core.sqlite_file import checkpoint, transaction
from inferencecenter.sessions.history import MAX_FAILURES, History
from inferencecenter.sessions.journal import (
    ConfigChanged,
    EpochChanged,
    HistoryChanged,
    McpCallsChanged,
    PresetRemoved,
    PresetStored,
    Record,
    SessionArchived,
    SessionDeleted,
    SessionOpened,
    ShareDeleted,
    ShareRecorded,
    TokensAppended,
    TurnEnded,
    TurnFailed,
    TurnQueued,
    UsageRecorded,
)
from inferencecenter.sessions.output_parsing.assembler import encode_parts
from inferencecenter.sessions.store import bases, rows
from inferencecenter.sessions.store.bases import Base, Reach
from inferencecenter.sessions.store.diff import PersistedState, history_diff, turns_diff

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from inferencecenter.protocol.values import TranscriptTurn
    from inferencecenter.sessions.history import TurnFailure


PurgeKind: TypeAlias = Literal["session", "client"]

CHUNK_BYTES: Final = 256 * 1024
"""Approximate bytes that one chunk writes or deletes, which takes milliseconds."""
# A statement takes at most 32,766 values; more rows than concurrent slots bring nothing.
_MAX_ROWS: Final = 64
_NO_NOTES: Final[Mapping[str, str]] = MappingProxyType({})
# SQLite errors about a record rather than the file: a retry fails again.
_RECORD_ERRORS: Final = (sqlite3.IntegrityError, sqlite3.DataError, sqlite3.InterfaceError, sqlite3.ProgrammingError)
# Errors that a retry may resolve.
_TRANSIENT_ERRORS: Final = (sqlite3.Error, OSError, MemoryError)

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Purge:
    """Deletes a session, or a client with all its sessions usage and presets; ``name`` is the id."""

    kind: PurgeKind
    name: str


@dataclass(frozen=True, slots=True)
class OpenedChunk:
    """A chunk of a new session: its messages and turns up to these numbers; the last chunk writes the rest."""

    record: SessionOpened
    n_messages: int
    n_turns: int
    is_first: bool = False
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class SessionRow:
    """The location of a session: its ``row``, the written history, and the unfinished turn."""

    row: int
    written: PersistedState
    turn_id: str | None = None


@dataclass(frozen=True, slots=True)
class SessionReopened:
    """An archived session was loaded from ``location``; its records follow."""

    session_id: str
    location: SessionRow


Entry: TypeAlias = Record | Purge | OpenedChunk | SessionReopened


class UnwritableError(Exception):
    """SQLite or our own code rejects an entry regardless of the state of the file; see ``__cause__``."""

    def __init__(self, entry: Entry) -> None:
        super().__init__(type(entry).__name__)
        self.entry = entry


class Recorder:
    """Writes entries to an open file; used by one thread at a time.

    Args:
        database: Connection in autocommit mode, with foreign keys on.
        known: The sessions in the file by id.
    """

    def __init__(self, database: sqlite3.Connection, known: Mapping[str, SessionRow]) -> None:
        self._database = database
        self._known = dict(known)
        self._staged: dict[str, SessionRow | None] = {}
        # Detached rows to sweep, by client, a bounded part in each transaction.
        self._detached: dict[str, list[int]] = {}
        self._staged_detached: dict[str, list[int]] = {}
        self._durable: bool | None = None
        self._is_dirty = False

    @property
    def unswept(self) -> frozenset[str]:
        """The clients with detached rows in the file, which further commits delete."""
        return frozenset(self._detached)

    def commit(self, entries: Sequence[Entry], *, durable: bool) -> None:
        """Write all entries or none, and delete a part of the detached rows.

        Args:
            entries: The entries in order.
            durable: Whether they survive a power failure, or only a crash of the process.

        Raises:
            UnwritableError: One entry was rejected; the others can be written without it.
            sqlite3.Error: The file cannot be written now.
        """
        self._staged = {}
        self._staged_detached = {client_id: list(detached) for client_id, detached in self._detached.items()}
        # A power failure that lost the mark below would leave a file that looks cleanly closed.
        self._synchronize(durable or not self._is_dirty)
        if self._is_dirty and not self._detached and self._commit_output(entries):
            return
        with transaction(self._database):
            if not self._is_dirty:
                self._database.execute("UPDATE meta SET clean = 0")
            self._sweep(CHUNK_BYTES)
            self._write_all(entries)
            if any(isinstance(entry, Purge) for entry in entries):
                # A purge is acknowledged only when all its rows are deleted.
                self._sweep(math.inf)
        self._is_dirty = True
        self._detached = self._staged_detached
        for session_id, known in self._staged.items():
            if known is None:
                self._known.pop(session_id, None)
            else:
                self._known[session_id] = known

    def sweep(self) -> None:
        """Delete what a killed daemon left of sessions that it was creating or deleting.

        Raises:
            sqlite3.Error: The file cannot be written.
        """
        if detached := bases.detached_rows(self._database):
            with transaction(self._database):
                bases.sweep(self._database, detached)

    def finish(self) -> None:
        """Mark the file as cleanly closed, and write the WAL back.

        Raises:
            sqlite3.Error: It cannot be written.
        """
        self._synchronize(True)
        if self._detached:
            with transaction(self._database):
                for detached in self._detached.values():
                    bases.sweep(self._database, detached)
            self._detached = {}
        if self._is_dirty:
            self._database.execute("UPDATE meta SET clean = 1")
        self._is_dirty = False
        checkpoint(self._database)

    def _synchronize(self, durable: bool) -> None:
        if durable is not self._durable:
            self._database.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            self._durable = durable

    def _commit_output(self, entries: Sequence[Entry]) -> bool:
        """Write the output of one engine step as one statement, its own transaction; ``False`` if not possible.

        Each statement releases and reacquires the GIL, so the number of statements determines the cost.
        """
        outputs = [entry for entry in entries if isinstance(entry, TokensAppended)]
        if not 0 < len(entries) <= _MAX_ROWS or len(outputs) < len(entries):
            return False
        try:
            self._insert_output(outputs)
        except Exception as error:
            if not _is_about_record(error):
                raise
            return False
        return True

    def _write_all(self, entries: Iterable[Entry]) -> None:
        for is_output, group in groupby(entries, key=lambda entry: type(entry) is TokensAppended):
            if is_output:
                self._write_output([entry for entry in group if isinstance(entry, TokensAppended)])
            else:
                for entry in group:
                    self._write(entry)

    def _write_output(self, outputs: Sequence[TokensAppended]) -> None:
        for start in range(0, len(outputs), _MAX_ROWS):
            part = outputs[start : start + _MAX_ROWS]
            try:
                self._insert_output(part)
            except Exception as error:
                if not _is_about_record(error):
                    raise
                for each in part:
                    self._write(each)

    def _write(self, entry: Entry) -> None:
        try:
            self._apply(entry)
        except Exception as error:
            # An exception that does not concern the file is a defect met by this record; it must not block others.
            if not _is_about_record(error):
                raise
            raise UnwritableError(entry) from error

    def _apply(self, entry: Entry) -> None:  # noqa: C901 - a case for each kind
        match entry:
            case TokensAppended():
                self._insert_output([entry])
            case TurnQueued():
                self._queue_turn(entry)
            case TurnEnded():
                self._end_turn(entry)
            case TurnFailed():
                self._fail_turn(entry)
            case SessionOpened() | OpenedChunk():
                self._open_session(entry)
            case HistoryChanged():
                self._change_history(entry)
            case ConfigChanged() | McpCallsChanged() | EpochChanged() | SessionArchived() | SessionReopened():
                self._update_session(entry)
            case PresetStored() | PresetRemoved() | UsageRecorded():
                self._change_client(entry)
            case ShareRecorded() | ShareDeleted():
                self._write_share(entry)
            case SessionDeleted() | Purge():
                self._delete(entry)

    def _update_session(
        self, entry: ConfigChanged | McpCallsChanged | EpochChanged | SessionArchived | SessionReopened
    ) -> None:
        if isinstance(entry, SessionReopened):
            self._staged[entry.session_id] = entry.location
        changes: dict[str, object]
        row = self._find(entry.session_id).row
        match entry:
            case EpochChanged():
                changes = {"epoch": entry.epoch}
            case ConfigChanged():
                changes = {"facts": rows.facts_column(entry.config)}
            case McpCallsChanged():
                changes = {"mcp_calls": rows.mcp_calls_column(entry.calls)}
                changes |= {"seq": entry.seq, "last_used_at": entry.last_used_at}
            case SessionReopened():
                changes = {"archived": 0}
            case SessionArchived():
                sizes = {"n_messages": entry.n_messages, "n_tokens": entry.n_tokens, "n_chars": entry.n_chars}
                changes = {"archived": 1, "ttl_s": entry.ttl_s, **sizes}
                self._staged[entry.session_id] = None
        columns = ", ".join(f"{name} = ?" for name in changes)
        self._database.execute(f"UPDATE sessions SET {columns} WHERE id = ?", (*changes.values(), row))  # noqa: S608 - columns

    def _change_client(self, entry: PresetStored | PresetRemoved | UsageRecorded) -> None:
        match entry:
            case PresetStored(client_id=client_id, preset=preset):
                row = (client_id, preset.preset_type, preset.name, preset.model_dump_json(exclude_none=True))
                self._database.execute("INSERT OR REPLACE INTO presets VALUES (?, ?, ?, ?)", row)
            case PresetRemoved():
                key = (entry.client_id, entry.preset_type, entry.name)
                self._database.execute("DELETE FROM presets WHERE client_id = ? AND preset_type = ? AND name = ?", key)
            case UsageRecorded():
                self._add_usage(entry)

    def _write_share(self, entry: ShareRecorded | ShareDeleted) -> None:
        if isinstance(entry, ShareRecorded):
            self._database.execute("INSERT INTO shares VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows.share_row(entry))
        else:
            values = entry.share_id, entry.client_id
            self._database.execute("DELETE FROM shares WHERE share_id = ? AND client_id = ?", values)

    def _delete(self, entry: SessionDeleted | Purge) -> None:
        purge = entry if isinstance(entry, Purge) else Purge("session", entry.session_id)
        for row, session_id in detach_sessions(self._database, purge):
            self._staged[session_id] = None
            self._schedule_sweep(row)

    def _schedule_sweep(self, row: int) -> None:
        """Schedule the deletion of what no session refers to of a row."""
        (client_id,) = self._database.execute("SELECT client_id FROM sessions WHERE id = ?", (row,)).fetchone()
        detached = [row]
        bases.sweep(self._database, detached, CHUNK_BYTES)
        if detached:
            self._staged_detached.setdefault(client_id, []).extend(detached)

    def _sweep(self, budget: float) -> None:
        """Delete about ``budget`` bytes of detached rows, taking the clients in turn."""
        for client_id, detached in tuple(self._staged_detached.items()):
            if budget <= 0:
                break
            del self._staged_detached[client_id]
            try:
                budget = bases.sweep(self._database, detached, budget)
            except Exception as error:
                if not _is_about_record(error):
                    raise
                # The next start tries again.
                _log.exception("rows_left", rows=detached)
                continue
            if detached:
                self._staged_detached[client_id] = detached

    def _find(self, session_id: str) -> SessionRow:
        known = self._look_up(session_id)
        if known is None:
            raise KeyError(session_id)
        return known

    def _look_up(self, session_id: str) -> SessionRow | None:
        return self._staged[session_id] if session_id in self._staged else self._known.get(session_id)

    def _insert_output(self, outputs: Sequence[TokensAppended]) -> None:
        values: list[object] = []
        for each in outputs:
            parts = None if each.parts is None else encode_parts(each.parts)
            values += (self._find(each.session_id).row, each.seq, each.tokens, each.text, parts)
        self._database.execute(_insertion(len(outputs)), values)

    def _open_session(self, entry: SessionOpened | OpenedChunk) -> None:
        part = OpenedChunk(entry, 0, 0, is_first=True, is_last=True) if isinstance(entry, SessionOpened) else entry
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
        """Insert a session's row, which shares the common prefix of its parent's rows."""
        row = self._insert_session(record)
        parent = self._look_up(record.parent) if record.parent is not None else None
        if parent is None:
            return SessionRow(row, PersistedState())
        held = parent.written
        change, turns = history_diff(held, record.history), turns_diff(held, record.turns)
        reach = Reach(change.n_messages, change.n_pieces, change.n_marks, turns.end)
        bases.set_base(self._database, row, Base(parent.row, reach, keys=turns.end))
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
        """Insert the row of an incomplete session and return its number."""
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

    def _queue_turn(self, record: TurnQueued) -> None:
        known = self._find(record.session_id)
        turn_id = record.spec.turn_id
        if known.turn_id not in (None, turn_id):
            self._delete_turn(known.row)
        self._touch(known.row, record)
        self._database.execute(
            "INSERT OR REPLACE INTO orders VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (known.row, *rows.order_row(record.spec)),
        )
        self._staged[record.session_id] = replace(known, turn_id=turn_id)

    def _end_turn(self, record: TurnEnded) -> None:
        known = self._find(record.session_id)
        turn = record.turn
        self._delete_turn(known.row)
        row, written = self._write_history(known, record.history)
        self._touch(row, record)
        ending = rows.event_column(record.end) if record.turn_key is not None else None
        values = (row, written.next_turn, *rows.turn_row(turn), record.turn_key, ending, record.note)
        self._database.execute(_INSERT_TURN, values)
        self._add_usage(record.remaining_usage())
        self._staged[record.session_id] = SessionRow(row, replace(written, turns=(*written.turns, turn)))

    def _fail_turn(self, record: TurnFailed) -> None:
        known = self._find(record.session_id)
        self._delete_turn(known.row)
        self._touch(known.row, record)
        if record.failure is not None and record.failure.note:
            self._insert_failure(known.row, record, record.failure)
        if record.usage is not None:
            self._add_usage(record.usage)
        self._staged[record.session_id] = replace(known, turn_id=None)

    def _change_history(self, record: HistoryChanged) -> None:
        known = self._find(record.session_id)
        turns = turns_diff(known.written, record.turns)
        row, written = self._write_history(known, record.history, n_turns=turns.end)
        self._touch(row, record)
        self._insert_turns(row, turns.end, turns.turns)
        if record.rewound:
            self._database.execute("DELETE FROM failures WHERE session = ?", (row,))
        written = replace(written, turns=record.turns, first_turn=turns.first)
        self._staged[record.session_id] = SessionRow(row, written, known.turn_id)

    def _write_history(
        self, known: SessionRow, now: History, *, n_turns: int | None = None
    ) -> tuple[int, PersistedState]:
        """Write the difference of a history, and return the row and the written state.

        Turns whose numbers are below ``n_turns`` are kept.
        """
        execute = self._database.execute
        row, before = known.row, known.written
        held = before.history
        change = history_diff(before, now)
        n_kept = before.next_turn if n_turns is None else n_turns
        kept = Reach(change.n_messages, change.n_pieces, change.n_marks, n_kept)
        if kept != (len(held.messages), len(before.pieces), len(held.turns), before.next_turn):
            row = self._truncate(row, kept)
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

    def _truncate(self, row: int, kept: Reach) -> int:
        """Truncate a session to ``kept``, and return its row, a new one if others share more of the old one."""
        database = self._database
        bases.clear_turn_keys(database, row, kept.turns)
        if not bases.referenced_prefix(database, row).is_within(kept):
            moved = bases.relocate(database, row, kept)
            self._schedule_sweep(row)
            return moved
        for kind, n_kept in zip(bases.KINDS, kept, strict=True):
            database.execute(f"DELETE FROM {kind} WHERE session = ? AND n >= ?", (row, n_kept))  # noqa: S608 - names
        base = bases.base_of(database, row)
        if base is not None and not base.reach.is_within(kept):
            bases.set_base(database, row, Base(base.row, base.reach.shared(kept), min(base.keys, kept.turns)))
            self._schedule_sweep(base.row)
        return row

    def _insert_turns(
        self, row: int, first: int, turns: Sequence[TranscriptTurn], *, notes: Mapping[str, str] = _NO_NOTES
    ) -> None:
        values = [
            (row, n, *rows.turn_row(turn), None, None, notes.get(turn.turn_id, ""))
            for n, turn in enumerate(turns, first)
        ]
        self._database.executemany(_INSERT_TURN, values)

    def _insert_failure(self, row: int, record: TurnFailed, failure: TurnFailure) -> None:
        """Write why a turn failed, and delete the oldest failures of its session."""
        values = (row, record.seq, record.turn_id, rows.event_column(failure.error), failure.note)
        self._database.execute("INSERT OR REPLACE INTO failures VALUES (?, ?, ?, ?, ?)", values)
        self._database.execute(
            "DELETE FROM failures WHERE session = ?1 AND seq <="
            " (SELECT seq FROM failures WHERE session = ?1 ORDER BY seq DESC LIMIT 1 OFFSET ?2)",
            (row, MAX_FAILURES),
        )

    def _add_usage(self, record: UsageRecorded) -> None:
        """Add usage to the totals of its day."""
        self._database.execute(
            "INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET turns = turns + excluded.turns,"
            " prompt_tokens = prompt_tokens + excluded.prompt_tokens,"
            " cached_tokens = cached_tokens + excluded.cached_tokens,"
            " completion_tokens = completion_tokens + excluded.completion_tokens",
            (
                *(record.client_id, record.token_id, rows.utc_day(record.at), record.turns),
                *(record.prompt_tokens, record.cached_tokens, record.completion_tokens),
            ),
        )

    def _touch(self, row: int, record: TurnQueued | TurnEnded | TurnFailed | HistoryChanged) -> None:
        self._database.execute(
            "UPDATE sessions SET seq = ?, last_used_at = ? WHERE id = ?", (record.seq, record.last_used_at, row)
        )

    def _delete_turn(self, row: int) -> None:
        self._database.execute("DELETE FROM said WHERE session = ?", (row,))
        self._database.execute("DELETE FROM orders WHERE session = ?", (row,))


_INSERT_TURN: Final = (
    "INSERT INTO turns (session, n, turn_id, finish_reason, messages, prompt_tokens, cached_tokens, completion_tokens,"
    " reasoning_tokens, ended_at, turn_key, ending, note) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)


def session_of(entry: Entry) -> str | None:
    """Return the id of the session that an entry concerns, if any."""
    match entry:
        case SessionOpened(config=config) | OpenedChunk(record=SessionOpened(config=config)):
            return config.session_id
        case UsageRecorded() | PresetStored() | PresetRemoved() | Purge() | ShareDeleted():
            return None
        case _:
            return entry.session_id


def _is_about_record(error: Exception) -> bool:
    """Return whether the record is at fault, rather than the file or the machine."""
    return isinstance(error, _RECORD_ERRORS) or not isinstance(error, _TRANSIENT_ERRORS)


def detach_sessions(database: sqlite3.Connection, purge: Purge) -> list[tuple[int, str]]:
    """Detach the sessions of a purge, inside a transaction of the caller; ``bases.sweep`` deletes their rows.

    Returns the rows and ids of the sessions.
    """
    which = "session_id = ?" if purge.kind == "session" else "client_id = ?"
    query = f"SELECT id, session_id FROM sessions WHERE {which}"  # noqa: S608 - two columns
    found: list[tuple[int, str]] = database.execute(query, (purge.name,)).fetchall()
    for row, _ in found:
        bases.detach(database, row)
    database.execute(f"DELETE FROM shares WHERE {which}", (purge.name,))  # noqa: S608 - two columns
    if purge.kind == "client":
        database.execute("DELETE FROM usage WHERE client_id = ?", (purge.name,))
        database.execute("DELETE FROM presets WHERE client_id = ?", (purge.name,))
    return found


@cache
def _insertion(n_rows: int) -> str:
    return "INSERT INTO said VALUES " + ", ".join(["(?, ?, ?, ?, ?)"] * n_rows)  # noqa: S608 - no values

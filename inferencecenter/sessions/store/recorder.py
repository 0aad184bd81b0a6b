"""Records become rows: one transaction for any number of them."""

from __future__ import annotations

import math
import sqlite3
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import structlog

from inferencecenter.sessions.history import History
from inferencecenter.sessions.records import (
    Changed,
    Described,
    Dropped,
    Ended,
    Gone,
    Opened,
    Ordered,
    Record,
    Renamed,
    Said,
    Spent,
)
from inferencecenter.sessions.speaking import encode_parts
from inferencecenter.sessions.store import bases, failures, rows, usage
from inferencecenter.sessions.store.bases import Base, Reach
from inferencecenter.sessions.store.difference import Written, difference, turns_difference
from inferencecenter.sessions.store.parts import PART_BYTES, OpenedPart
from inferencecenter.sqlite_file import transaction

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
class Known:
    """A session in the file: its ``row``, what is written of its history, and the turn that has not ended."""

    row: int
    written: Written
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

    def __init__(self, database: sqlite3.Connection, known: Mapping[str, Known]) -> None:
        self._database = database
        self._known = dict(known)
        self._staged: dict[str, Known | None] = {}
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
                if type(entry) is not Said:
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
        for is_said, group in groupby(entries, key=lambda entry: type(entry) is Said):
            if is_said:
                self._write_said([entry for entry in group if isinstance(entry, Said)])
            else:
                for entry in group:
                    self._write(entry)

    def _write_said(self, said: Sequence[Said]) -> None:
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
            case Said():
                self._insert_said([entry])
            case Ordered():
                self._order(entry)
            case Ended():
                self._end(entry)
            case Dropped():
                self._drop(entry)
            case Opened() | OpenedPart():
                self._open(entry)
            case Changed():
                self._change(entry)
            case Described() | Renamed():
                self._alter(entry)
            case Spent():
                usage.count(self._database, entry)
            case Gone() | Purge():
                self._forget(entry)

    def _alter(self, entry: Described | Renamed) -> None:
        row = self._find(entry.session_id).row
        if isinstance(entry, Renamed):
            self._database.execute("UPDATE sessions SET epoch = ? WHERE id = ?", (entry.epoch, row))
        else:
            facts = rows.facts_column(entry.facts)
            self._database.execute("UPDATE sessions SET facts = ? WHERE id = ?", (facts, row))

    def _forget(self, entry: Gone | Purge) -> None:
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

    def _find(self, session_id: str) -> Known:
        known = self._look_up(session_id)
        if known is None:
            raise KeyError(session_id)
        return known

    def _look_up(self, session_id: str) -> Known | None:
        return self._staged[session_id] if session_id in self._staged else self._known.get(session_id)

    def _insert_said(self, said: Sequence[Said]) -> None:
        values: list[object] = []
        for each in said:
            parts = None if each.parts is None else encode_parts(each.parts)
            values += (self._find(each.session_id).row, each.seq, each.tokens, each.text, parts)
        self._database.execute(_insertion(len(said)), values)

    def _open(self, entry: Opened | OpenedPart) -> None:
        part = OpenedPart(entry, 0, 0, is_first=True, is_last=True) if isinstance(entry, Opened) else entry
        record, facts = part.record, part.record.facts
        known = self._begin(record) if part.is_first else self._find(facts.session_id)
        history, turns = record.history, record.turns
        if not part.is_last:
            history, turns = History(history.messages[: part.n_messages]), turns[: part.n_turns]
        row, written = self._write_history(known, history)
        self._insert_turns(row, written.next_turn, turns[len(written.turns) :], notes=record.notes)
        if part.is_last:
            self._database.execute("UPDATE sessions SET complete = 1 WHERE id = ?", (row,))
        self._staged[facts.session_id] = Known(row, replace(written, turns=turns))

    def _begin(self, record: Opened) -> Known:
        """Insert a session's row, which begins with those of its parent that are the same."""
        row = self._insert_session(record)
        parent = self._look_up(record.parent) if record.parent is not None else None
        if parent is None:
            return Known(row, Written())
        held = parent.written
        change, turns = difference(held, record.history), turns_difference(held, record.turns)
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
        return Known(row, Written(history, pieces, record.turns[:n_turns], turns.first))

    def _insert_session(self, record: Opened) -> int:
        """Insert the row of a session that is not complete yet, and return its number."""
        facts = record.facts
        row = self._database.execute(
            "INSERT INTO sessions (session_id, client_id, epoch, seq, created_at, last_used_at, made_by, view_kept,"
            " view_resumes_at, facts, complete) VALUES (?, ?, ?, 0, ?, ?, '', 0, 0, ?, 0)",
            (
                *(facts.session_id, facts.client_id, facts.epoch, facts.created_at, record.last_used_at),
                rows.facts_column(facts),
            ),
        ).lastrowid
        assert row is not None, "an insertion gives a row"
        return row

    def _order(self, record: Ordered) -> None:
        known = self._find(record.session_id)
        turn_id = record.order.turn_id
        if known.turn_id not in (None, turn_id):
            self._forget_turn(known.row)
        self._touch(known.row, record)
        self._database.execute(
            "INSERT OR REPLACE INTO orders VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (known.row, *rows.order_row(record.order)),
        )
        self._staged[record.session_id] = replace(known, turn_id=turn_id)

    def _end(self, record: Ended) -> None:
        known = self._find(record.session_id)
        turn = record.turn
        self._forget_turn(known.row)
        row, written = self._write_history(known, record.history)
        self._touch(row, record)
        ending = rows.ending_column(record.end) if record.turn_key is not None else None
        values = (row, written.next_turn, *rows.turn_row(turn), record.turn_key, ending, record.note)
        self._database.execute(_INSERT_TURN, values)
        usage.count(self._database, record.spent())
        self._staged[record.session_id] = Known(row, replace(written, turns=(*written.turns, turn)))

    def _drop(self, record: Dropped) -> None:
        known = self._find(record.session_id)
        self._forget_turn(known.row)
        self._touch(known.row, record)
        failures.keep(self._database, known.row, record)
        if record.spent is not None:
            usage.count(self._database, record.spent)
        self._staged[record.session_id] = replace(known, turn_id=None)

    def _change(self, record: Changed) -> None:
        known = self._find(record.session_id)
        turns = turns_difference(known.written, record.turns)
        row, written = self._write_history(known, record.history, n_turns=turns.end)
        self._touch(row, record)
        self._insert_turns(row, turns.end, turns.turns)
        if record.rewound:
            failures.forget(self._database, row)
        written = replace(written, turns=record.turns, first_turn=turns.first)
        self._staged[record.session_id] = Known(row, written, known.turn_id)

    def _write_history(self, known: Known, now: History, *, n_turns: int | None = None) -> tuple[int, Written]:
        """Write what is different about the history, and return the session's row and what is written then.

        Of its turns those stay whose numbers are below ``n_turns``.
        """
        execute = self._database.execute
        row, before = known.row, known.written
        held = before.history
        change = difference(before, now)
        n_kept = before.next_turn if n_turns is None else n_turns
        kept = Reach(change.n_messages, change.n_pieces, change.n_marks, n_kept)
        if kept != (len(held.messages), len(before.pieces), len(held.turns), before.next_turn):
            row = self._cut(row, kept)
        if (held.view, held.made_by) != (now.view, now.made_by):
            execute(
                "UPDATE sessions SET view_kept = ?, view_resumes_at = ?, made_by = ? WHERE id = ?",
                (now.view.kept, now.view.resumes_at, now.made_by, row),
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

    def _touch(self, row: int, record: Ordered | Ended | Dropped | Changed) -> None:
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
        case Opened(facts=facts) | OpenedPart(record=Opened(facts=facts)):
            return facts.session_id
        case Spent() | Purge():
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

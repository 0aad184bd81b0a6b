"""The full-text index of the session file: a contentless FTS5 table.

Triggers maintain it, so a message and its words change in one transaction, also in versions without the index. Each
message is a document, and so is the title of each session. A document's rowid consists, from the highest bits on, of a
partition by client, so that a search scans only the documents of the client and of the few that share its partition;
the row of the session; and the number of the message. A hit in a message of a base is a hit of all sessions that share
it.

The tokenizer takes a run of letters for a word. So in the documents characters of Korean and of scripts without spaces
are set apart by spaces, in SQL, since versions without the index have the triggers, too.

Invariant: the index contains exactly the documents from ``indexed_from`` on, in the order of sessions and messages. A
file of an earlier version starts with none, and ``SearchMaintenance`` lowers ``indexed_from`` step by step, the latest
sessions first. A change of a document below it does not touch the index: its text is read later.

FTS5 only appends: the words of a deleted document stay in their segments until these are merged with its tombstone. So
some time after a deletion all segments are merged, in steps, which removes the words of the deleted text; SQLite
overwrites the freed pages (``secure_delete``).
"""

from __future__ import annotations

import math
import re
import sqlite3
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

import orjson
import structlog

from inferencecenter.core.sqlite_file import is_damage, transaction
from inferencecenter.sessions.search import (
    MARKED_BLOCKS,
    MAX_INDEXED_CHARS,
    SPACELESS,
    Excerpts,
    FoundSession,
    SearchHit,
    SearchResult,
)
from inferencecenter.sessions.store import rows
from inferencecenter.sessions.store.bases import base_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from inferencecenter.sessions.search import SearchTerm

_MESSAGE_BITS: Final = 20
_SESSION_BITS: Final = 31
_PARTITION_BITS: Final = 12
_TITLE: Final = (1 << _MESSAGE_BITS) - 1
"""Message number of a title, after all messages; above the maximum of ``sessions.max_messages``."""
_SESSION_MASK: Final = (1 << _SESSION_BITS) - 1

BUILD_CHARS: Final = 64 * 1024
"""Maximum number of characters that one step adds to the index."""
BUILD_ROWS: Final = 512
"""Maximum number of documents that one step adds."""
MERGE_PAGES: Final = 64
"""Pages of 4 KiB that one step merges."""
PAUSE_S: Final = 0.02
"""Idle seconds of the writer before each step."""
MAX_PAUSE_S: Final = 1.0
"""Seconds after which a step precedes the next transaction of a busy writer."""
SCRUB_DELAY_S: Final = 600.0
"""Seconds from a deletion to the merge that removes its words."""
_RETRY_S: Final = 60.0
MAX_HITS: Final = 3
"""Maximum number of hits in the result of a session."""
_MAX_CHAIN: Final = 256
"""Maximum number of a session's bases in which hits are shown."""

# Any hash of the client's id will do: hits of other clients in the same partition are filtered by session.
_PARTITION: Final = (
    "((coalesce(unicode({id}), 0) * 31 + coalesce(unicode(substr({id}, 2)), 0)) * 31"
    " + coalesce(unicode(substr({id}, -1)), 0) * 7 + coalesce(unicode(substr({id}, -2)), 0) * 127 + length({id}))"
    f" & {(1 << _PARTITION_BITS) - 1}"
)
_TITLE_TEXT: Final = "CASE WHEN json_valid({row}.facts) THEN {row}.facts -> 'metadata' ->> 'title' END"
_PART_CHARS: Final = (4096, 64, 1)
"""A text is divided in three steps: to take a character from a text takes time proportional to its length."""


def _spaced(text: str) -> str:
    """Return the SQL of a text with spaces around each character that is a word."""
    text = f"({text})"
    is_ascii = f"length(CAST({text} AS BLOB)) = length({text})"
    return f"CASE WHEN {is_ascii} THEN {text} ELSE {_spaced_parts(text, _PART_CHARS)} END"


def _spaced_parts(text: str, sizes: tuple[int, ...]) -> str:
    if not sizes:
        return f"' ' || {text} || ' '"
    size, *smaller = sizes
    part, rest = f"substr({{}}, 1, {size})", f"substr({{}}, {size + 1})"
    spaced = _spaced_parts(f"part{size}", tuple(smaller))
    return (
        f"(WITH RECURSIVE parts{size}(part{size}, rest) AS (SELECT {part.format(text)}, {rest.format(text)}"  # noqa: S608
        f" UNION ALL SELECT {part.format('rest')}, {rest.format('rest')} FROM parts{size} WHERE rest <> '')"
        f" SELECT group_concat(CASE WHEN part{size} GLOB '*[{SPACELESS}]*' THEN {spaced} ELSE part{size} END, '')"
        f" FROM parts{size})"
    )


def _document(row: str, n: str, client_id: str) -> str:
    partition = _PARTITION.format(id=client_id)
    return f"(({partition}) << {_SESSION_BITS + _MESSAGE_BITS} | ({row} << {_MESSAGE_BITS}) | {n})"


def _position(row: str, n: str) -> str:
    return f"({row} << {_MESSAGE_BITS} | {n})"


_IS_INDEXED: Final = "{position} >= (SELECT indexed_from FROM search_state)"


def _message_trigger(name: str, event: str, row: str, action: str) -> str:
    document = _document("id", f"{row}.n", "client_id")
    text = _spaced(f"substr({row}.content, 1, {MAX_INDEXED_CHARS})")
    values = f"{document}, {text} FROM sessions WHERE id = {row}.session"
    is_indexed = _IS_INDEXED.format(position=_position(f"{row}.session", f"{row}.n"))
    return (
        f"CREATE TRIGGER {name} {event} ON messages WHEN {row}.n < {_TITLE} AND {is_indexed}"
        f" BEGIN {action.format(values=values)}; END"
    )


def _title_trigger(name: str, event: str, row: str, action: str, *, condition: str = "1") -> str:
    document = _document(f"{row}.id", str(_TITLE), f"{row}.client_id")
    title = _TITLE_TEXT.format(row=row)
    is_indexed = _IS_INDEXED.format(position=_position(f"{row}.id", str(_TITLE)))
    return (
        f"CREATE TRIGGER {name} {event} ON sessions WHEN {is_indexed} AND {condition} AND ({title}) NOT NULL"
        f" BEGIN {action.format(values=f'{document}, {_spaced(title)}')}; END"
    )


_ADD: Final = "INSERT INTO search (rowid, text) SELECT {values}"
# A contentless table needs the exact text of a document to delete it.
_DELETE: Final = (
    "INSERT INTO search (search, rowid, text) SELECT 'delete', {values}; UPDATE search_state SET stale = stale | 1"
)
_CHANGED: Final = f"({_TITLE_TEXT.format(row='old')}) IS NOT ({_TITLE_TEXT.format(row='new')})"
_OBJECTS: Final = (
    # ``stale`` has bit 0 if deleted words may be in the index, and bit 1 while they are being removed.
    "CREATE TABLE search_state (indexed_from INTEGER NOT NULL, stale INTEGER NOT NULL) STRICT",
    _message_trigger("search_message_added", "AFTER INSERT", "new", _ADD),
    _message_trigger("search_message_deleted", "AFTER DELETE", "old", _DELETE),
    _title_trigger("search_title_added", "AFTER INSERT", "new", _ADD),
    _title_trigger("search_title_deleted", "AFTER DELETE", "old", _DELETE),
    _title_trigger("search_title_old", "AFTER UPDATE OF facts", "old", _DELETE, condition=_CHANGED),
    _title_trigger("search_title_new", "AFTER UPDATE OF facts", "new", _ADD, condition=_CHANGED),
)
_MARKED_CHARS: Final = "".join(
    chr(code) for first, last in re.findall("(.)-(.)", MARKED_BLOCKS) for code in range(ord(first), ord(last) + 1)
)
_TABLE: Final = (
    "CREATE VIRTUAL TABLE search USING fts5(text, content='', columnsize=0,"
    f""" tokenize="unicode61 remove_diacritics 2 tokenchars '{_MARKED_CHARS}'")"""
)
_SETTINGS: Final = (
    # Merged in separate steps; a transaction only adds a segment. Without a daemon SQLite merges at 64 segments.
    "INSERT INTO search (search, rank) VALUES ('automerge', 0)",
    "INSERT INTO search (search, rank) VALUES ('crisismerge', 64)",
)

_log = structlog.get_logger(__name__)


def prepare_index(database: sqlite3.Connection, *, is_wanted: bool) -> bool:
    """Create the index if it is wanted, otherwise delete it; return whether there is one.

    Raises:
        sqlite3.Error: The file cannot be written.
    """
    is_available = _has_fts5(database)
    if is_wanted and not is_available:
        _log.warning("search_unavailable", reason="this Python's SQLite has no FTS5")
    held = {sql for (sql,) in database.execute("SELECT sql FROM sqlite_master WHERE name GLOB 'search*'")}
    if is_wanted and is_available and held >= {_TABLE, *_OBJECTS}:
        return True
    if held or (is_wanted and is_available):
        with transaction(database):
            _drop(database, is_available=is_available)
            if is_wanted and is_available:
                for statement in (_TABLE, *_OBJECTS, *_SETTINGS):
                    database.execute(statement)
                last = f"SELECT coalesce((max(id) + 1) << {_MESSAGE_BITS}, 0), 0 FROM sessions"  # noqa: S608 - no values
                database.execute(f"INSERT INTO search_state {last}")
    return is_wanted and is_available


def has_index(database: sqlite3.Connection) -> bool:
    """Return whether the file has an index."""
    query = "SELECT 1 FROM sqlite_master WHERE name = 'search_state'"
    return database.execute(query).fetchone() is not None and _has_fts5(database)


def _has_fts5(database: sqlite3.Connection) -> bool:
    return database.execute("SELECT 1 FROM pragma_module_list WHERE name = 'fts5'").fetchone() is not None


def _drop(database: sqlite3.Connection, *, is_available: bool) -> None:
    triggers = "SELECT name FROM sqlite_master WHERE type = 'trigger' AND name GLOB 'search_*'"
    for (name,) in database.execute(triggers).fetchall():
        database.execute(f"DROP TRIGGER {name}")
    database.execute("DROP TABLE IF EXISTS search_state")
    # Without FTS5 its tables stay; the next process with FTS5 deletes them.
    if is_available:
        database.execute("DROP TABLE IF EXISTS search")


def scrub(database: sqlite3.Connection) -> None:
    """Remove the words of all deleted texts at once, in the caller's transaction."""
    if has_index(database):
        database.execute("INSERT INTO search (search) VALUES ('optimize')")
        database.execute("UPDATE search_state SET stale = 0")


class SearchMaintenance:
    """Builds, merges and scrubs the index in steps; used by the writer thread between its transactions.

    Args:
        database: The writer's connection.
        monotonic: Monotonic seconds.
        scrub_delay_s: Seconds from a deletion to the merge that removes its words.
    """

    def __init__(
        self,
        database: sqlite3.Connection,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        scrub_delay_s: float = SCRUB_DELAY_S,
    ) -> None:
        self._database = database
        self._monotonic = monotonic
        self._scrub_delay_s = scrub_delay_s
        self._needs_work = True
        self._is_scrubbing = False
        self._scrub_at: float | None = None
        self._last_step = monotonic()
        self._paused_until = 0.0

    def note_changes(self, *, is_purge: bool = False) -> None:
        """Record that a transaction may have changed documents; the words of a purge are removed without delay."""
        self._needs_work = True
        if is_purge:
            self._scrub_at = self._monotonic()

    @property
    def is_due(self) -> bool:
        """Whether there is work."""
        now = self._monotonic()
        return now >= self._paused_until and (self._needs_work or self._is_scrub_due(now))

    @property
    def is_overdue(self) -> bool:
        """Whether a step should precede the next transaction."""
        return self._monotonic() - self._last_step >= MAX_PAUSE_S and self.is_due

    def step(self) -> None:
        """Do a bounded part of the work. An error delays the next step, and damage of the file stops maintenance."""
        try:
            with transaction(self._database):
                self._needs_work = self._step()
        except sqlite3.Error as error:
            self._paused_until = math.inf if is_damage(error) else self._monotonic() + _RETRY_S
            _log.warning("search_index_not_maintained", reason=str(error))
        self._last_step = self._monotonic()

    def _step(self) -> bool:
        """Build and merge, begin to scrub, or merge; return whether more work may be due now."""
        indexed_from, stale = self._database.execute("SELECT indexed_from, stale FROM search_state").fetchone()
        if indexed_from > 0:
            _build(self._database, indexed_from)
            self._merge(MERGE_PAGES)
            return True
        now = self._monotonic()
        if self._is_scrub_due(now):
            self._database.execute("UPDATE search_state SET stale = 2")
            self._merge(-MERGE_PAGES)
            self._is_scrubbing, self._scrub_at = True, None
            return True
        if self._merge(MERGE_PAGES):
            return True
        if self._is_scrubbing:
            stale &= 1
            self._database.execute("UPDATE search_state SET stale = ?", (stale,))
            self._is_scrubbing = False
            _log.info("search_index_scrubbed")
        if stale and self._scrub_at is None:
            self._scrub_at = now + self._scrub_delay_s
        return False

    def _is_scrub_due(self, now: float) -> bool:
        return self._scrub_at is not None and now >= self._scrub_at

    def _merge(self, n_pages: int) -> bool:
        """Merge up to this many pages; return whether there was anything to merge."""
        before = self._database.total_changes
        self._database.execute("INSERT INTO search (search, rank) VALUES ('merge', ?)", (n_pages,))
        return self._database.total_changes - before > 1


_UNINDEXED: Final = f"""
    SELECT position FROM (
        SELECT * FROM (
            SELECT {_position("session", "n")} AS position FROM messages
            WHERE (session, n) <= (?1, ?2) AND n < {_TITLE} ORDER BY session DESC, n DESC LIMIT ?3
        )
        UNION ALL
        SELECT * FROM (
            SELECT {_position("id", str(_TITLE))} AS position FROM sessions
            WHERE (id, {_TITLE}) <= (?1, ?2) ORDER BY id DESC LIMIT ?3
        )
    ) ORDER BY position DESC LIMIT ?3
"""  # noqa: S608 - numbers
_MESSAGE: Final = (
    f"SELECT {_spaced(f'substr(content, 1, {MAX_INDEXED_CHARS})')} FROM messages WHERE session = ? AND n = ?"  # noqa: S608
)
_TITLE_OF: Final = f"SELECT {_spaced(_TITLE_TEXT.format(row='sessions'))} FROM sessions WHERE id = ?"  # noqa: S608
_DOCUMENT: Final = f"SELECT {_document('id', '?2', 'client_id')} FROM sessions WHERE id = ?1"  # noqa: S608 - numbers


def _build(database: sqlite3.Connection, indexed_from: int) -> None:
    """Add the documents before ``indexed_from``, about ``BUILD_CHARS`` of them."""
    row, n = _split(indexed_from - 1)
    positions = [each for (each,) in database.execute(_UNINDEXED, (row, n, BUILD_ROWS))]
    n_chars, is_last = 0, len(positions) < BUILD_ROWS
    documents: list[tuple[int, str]] = []
    for position in positions:
        if n_chars >= BUILD_CHARS:
            is_last = False
            break
        row, n = _split(position)
        held = database.execute(_TITLE_OF, (row,)) if n == _TITLE else database.execute(_MESSAGE, (row, n))
        (text,) = held.fetchone()
        if text is not None:
            (document,) = database.execute(_DOCUMENT, (row, n)).fetchone()
            documents.append((document, text))
            n_chars += len(text)
        indexed_from = position
    # FTS5 flushes a segment whenever a rowid is lower than the previous one.
    database.executemany("INSERT INTO search (rowid, text) VALUES (?, ?)", sorted(documents))
    database.execute("UPDATE search_state SET indexed_from = ?", (0 if is_last else indexed_from,))


def _split(position: int) -> tuple[int, int]:
    """Return the session's row and the message's number from a position or a document's rowid."""
    return position >> _MESSAGE_BITS & _SESSION_MASK, position & _TITLE


class _RowHits(NamedTuple):
    """The hits of a term in a row: its first and last message with a hit, if any, and whether the title has one."""

    first: int | None
    last: int | None
    in_title: bool


# The titles come last, so a row whose first hit is its title has no other.
_HITS: Final = f"""
    SELECT rowid >> {_MESSAGE_BITS} & {_SESSION_MASK}, min(rowid & {_TITLE}),
        max((rowid & {_TITLE}) % {_TITLE}), max(rowid & {_TITLE}) = {_TITLE}
    FROM search WHERE search MATCH ?1 AND rowid >= ?2 AND rowid <= ?3 GROUP BY 1
"""  # noqa: S608 - numbers
_FORKS: Final = "SELECT base, id, base_messages FROM sessions WHERE client_id = ? AND base IS NOT NULL"
_PAGE: Final = """
    SELECT id, session_id, facts, n_messages, n_tokens, n_chars, created_at, last_used_at, ttl_s, archived FROM sessions
    WHERE complete AND client_id = ?1 AND id IN (SELECT value FROM json_each(?2))
        AND (last_used_at, session_id) < (?3, ?4)
    ORDER BY last_used_at DESC, session_id DESC LIMIT ?5
"""
_FIRST: Final = (1e18, "")


def search_file(
    database: sqlite3.Connection,
    client_id: str,
    terms: Sequence[SearchTerm],
    *,
    after: tuple[float, str] | None,
    limit: int,
) -> SearchResult:
    """Return a client's sessions that contain all terms, most recently used first.

    Raises:
        sqlite3.Error: The file cannot be read.
    """
    indexed = _indexed_share(database)
    if not terms:
        return SearchResult((), has_more=False, indexed=indexed)
    forks: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for base, row, n_shared in database.execute(_FORKS, (client_id,)):
        forks[base].append((row, n_shared))
    (partition,) = database.execute(f"SELECT {_PARTITION.format(id='?1')}", (client_id,)).fetchone()
    first = partition << _SESSION_BITS + _MESSAGE_BITS
    last = (partition + 1 << _SESSION_BITS + _MESSAGE_BITS) - 1
    hits: list[dict[int, _RowHits]] = []
    expressions = [each.expression for each in terms]
    for expression in expressions:
        hits.append(_hits(database, expression, first, last))
        if not hits[-1]:
            return SearchResult((), has_more=False, indexed=indexed)
    of_terms = [_rows_sharing_hits(each, forks) for each in hits]
    if len(expressions) > 1:
        # Messages that contain all terms come first.
        hits.insert(0, _hits(database, " AND ".join(expressions), first, last))
    matching = orjson.dumps(list(set.intersection(*of_terms))).decode()
    page = database.execute(_PAGE, (client_id, matching, *(after or _FIRST), limit + 1)).fetchall()
    excerpts = Excerpts(tuple(terms))
    shown = tuple(_found_session(database, row, hits, excerpts) for row in page[:limit])
    return SearchResult(shown, has_more=len(page) > limit, indexed=indexed)


def _indexed_share(database: sqlite3.Connection) -> float | None:
    """Return the indexed share of the sessions, below 1; ``None`` if all are indexed."""
    (indexed_from,) = database.execute("SELECT indexed_from FROM search_state").fetchone()
    if not indexed_from:
        return None
    row = indexed_from >> _MESSAGE_BITS
    query = "SELECT count(*), coalesce(sum(id > ?), 0) FROM sessions WHERE complete"
    n_sessions, n_indexed = database.execute(query, (row,)).fetchone()
    return float(n_indexed / n_sessions) if n_sessions else 1.0


def _hits(database: sqlite3.Connection, expression: str, first: int, last: int) -> dict[int, _RowHits]:
    """Return the hits of a query in the documents from ``first`` to ``last``, by row."""
    return {row: _row_hits(*each) for row, *each in database.execute(_HITS, (expression, first, last))}


def _row_hits(first: int, last: int, in_title: int) -> _RowHits:
    # A title counts as 0 in the maximum, which matters only for rows without a message.
    return _RowHits(None, None, True) if first == _TITLE else _RowHits(first, last, bool(in_title))


def _rows_sharing_hits(hits: dict[int, _RowHits], forks: Mapping[int, Sequence[tuple[int, int]]]) -> set[int]:
    """Return the rows with hits, and those that share a message with a hit."""
    first_of = {row: hit.first for row, hit in hits.items() if hit.first is not None}
    unread = list(first_of.items())
    while unread:
        row, first = unread.pop()
        for fork, n_shared in forks.get(row, ()):
            if first < min(n_shared, first_of.get(fork, n_shared)):
                first_of[fork] = first
                unread.append((fork, first))
    return hits.keys() | first_of.keys()


def _found_session(
    database: sqlite3.Connection, row: rows.Row, hits: Sequence[Mapping[int, _RowHits]], excerpts: Excerpts
) -> FoundSession:
    number, *columns, archived = row
    chain = _chain(database, number)
    shown = [_search_hit(database, chain, index, excerpts) for index in _indexes(chain, hits)]
    session = rows.archived_session(columns)
    if len(shown) < MAX_HITS and any(number in each and each[number].in_title for each in hits):
        snippet, marks = excerpts.of(session.config.metadata.get("title", ""))
        shown.append(SearchHit(snippet, marks))
    return FoundSession(session, bool(archived), tuple(shown))


def _chain(database: sqlite3.Connection, row: int) -> list[tuple[int, float, float]]:
    """Return a session's row and those of its bases, with how many messages and turns of each belong to it."""
    chain = [(row, math.inf, math.inf)]
    while len(chain) < _MAX_CHAIN and (base := base_of(database, chain[-1][0])) is not None:
        _, n_messages, n_turns = chain[-1]
        chain.append((base.row, min(n_messages, base.reach.messages), min(n_turns, base.reach.turns)))
    return chain


def _indexes(chain: Sequence[tuple[int, float, float]], hits: Sequence[Mapping[int, _RowHits]]) -> list[int]:
    """Return the messages of a session to show, those with the most terms first."""
    found: dict[int, None] = {}
    for last in (False, True):
        for each in hits:
            for row, n_messages, _ in chain:
                if (hit := each.get(row)) is not None:
                    index = hit.last if last else hit.first
                    if index is not None and index < n_messages:
                        found[index] = None
    return list(found)[:MAX_HITS]


def _search_hit(
    database: sqlite3.Connection, chain: Sequence[tuple[int, float, float]], index: int, excerpts: Excerpts
) -> SearchHit:
    query = f"SELECT role, substr(content, 1, {MAX_INDEXED_CHARS}) FROM messages WHERE session = ? AND n = ?"  # noqa: S608
    held = None
    turns: list[tuple[int, str]] = []
    for row, n_messages, n_turns in chain:
        if held is None and index < n_messages:
            held = database.execute(query, (row, index)).fetchone()
        turns += database.execute(
            "SELECT messages, turn_id FROM turns WHERE session = ? AND n < ? AND messages > ? ORDER BY n LIMIT 1",
            (row, n_turns, index),
        )
    role, text = held if held is not None else (None, "")
    snippet, marks = excerpts.of(text)
    return SearchHit(snippet, marks, index, role, min(turns)[1] if turns else None)

"""Reads archived sessions from the file while the writer thread writes it; used by one other thread, and one to search.

A search may take longer than all other reads, so it has a connection and a thread of its own, and a budget of steps.
"""

from __future__ import annotations

import contextlib
import sqlite3
from typing import TYPE_CHECKING, Final

import orjson
import structlog

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.core.sqlite_file import connect_reading
from inferencecenter.sessions.archive import ArchiveSize
from inferencecenter.sessions.journal import RETRY_LATER_MS, RETRY_SOON_MS
from inferencecenter.sessions.store import rows
from inferencecenter.sessions.store.database import is_busy
from inferencecenter.sessions.store.loader import LoadedSession, SharedRows, read_one
from inferencecenter.sessions.store.search_index import has_index, search_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from inferencecenter.sessions.archive import ArchivedSession, SessionOrder
    from inferencecenter.sessions.journal import StoredShare
    from inferencecenter.sessions.search import SearchResult, SearchTerm

# A row value after which a page begins; the indexes of archived sessions have both orders.
_PAGE: Final = (
    "SELECT session_id, facts, n_messages, n_tokens, n_chars, created_at, last_used_at, ttl_s FROM sessions"
    " WHERE client_id = ?1 AND archived AND "
)
_PAGES: Final[dict[SessionOrder, str]] = {
    "oldest": _PAGE + "(created_at, session_id) > (?2, ?3) ORDER BY created_at, session_id LIMIT ?4",
    "recent": _PAGE + "(last_used_at, session_id) < (?2, ?3) ORDER BY last_used_at DESC, session_id DESC LIMIT ?4",
}
_FIRST: Final[dict[SessionOrder, tuple[float, str]]] = {"oldest": (-1.0, ""), "recent": (1e18, "")}
_DUE: Final = """
    SELECT session_id, client_id, n_chars FROM sessions
    WHERE archived AND last_used_at + min(
        coalesce(ttl_s, ?2, 1e18),
        86400.0 * coalesce((SELECT value FROM json_each(?3) WHERE key = client_id), ?4, 1e13)
    ) <= ?1 LIMIT ?5
"""

MAX_SEARCH_STEPS: Final = 40_000_000
"""Maximum number of steps of a search in SQLite, at about 35 for each message with a term: a million, in a second."""
_COUNTED_STEPS: Final = 10_000

_log = structlog.get_logger(__name__)


class _ReadingConnection:
    """A read-only connection, opened on first use."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._database: sqlite3.Connection | None = None

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Read one snapshot of the file.

        Raises:
            InferenceCenterError: ``storage_unavailable``.
        """
        try:
            if (database := self._database) is None:
                database = self._database = connect_reading(self._path)
            database.execute("BEGIN")
            try:
                yield database
            finally:
                database.execute("ROLLBACK")
        except (sqlite3.Error, OSError) as error:
            _log.error("archive_unreadable", path=str(self._path), reason=str(error))
            raise _unreadable(retry_after_ms=RETRY_SOON_MS if is_busy(error) else RETRY_LATER_MS) from error

    def close(self) -> None:
        """Close the connection; a query that runs on another thread ends with ``storage_unavailable``."""
        database, self._database = self._database, None
        if database is not None:
            database.interrupt()
            database.close()


class _StepBudget:
    """Ends a query of SQLite after ``MAX_SEARCH_STEPS`` of its virtual machine."""

    def __init__(self) -> None:
        self._n_left = MAX_SEARCH_STEPS

    @property
    def is_spent(self) -> bool:
        return self._n_left < 0

    @contextlib.contextmanager
    def limit(self, database: sqlite3.Connection) -> Iterator[None]:
        """Limit the queries of the context together."""
        database.set_progress_handler(self._spend, _COUNTED_STEPS)
        try:
            yield
        finally:
            database.set_progress_handler(None, 0)

    def _spend(self) -> bool:
        self._n_left -= _COUNTED_STEPS
        return self.is_spent


class ArchiveReader:
    """Reads the file; implements ``SessionReader`` but for ``reopen``. All methods block.

    Raises:
        InferenceCenterError: Each method: ``storage_unavailable`` if the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._connection = _ReadingConnection(path)
        self._search_connection = _ReadingConnection(path)

    def read(self, client_id: str, session_id: str) -> LoadedSession | None:
        """Return an archived session of a client with its location."""
        with self._connection.reading() as database:
            row = database.execute(
                "SELECT id FROM sessions WHERE session_id = ? AND client_id = ? AND archived"
                " AND id NOT IN (SELECT session FROM orders)",
                (session_id, client_id),
            ).fetchone()
            if row is None:
                return None
            try:
                found = read_one(database, row[0], {}, SharedRows(database, is_shared=False))
            except ValueError as error:
                _log.error("session_unreadable", session=session_id, reason=type(error).__name__)
                raise _unreadable() from error
            # Computed here, not on the event loop.
            _ = found.session.history.size
            return found

    def page(
        self, client_id: str, *, order: SessionOrder, after: tuple[float, str] | None, limit: int
    ) -> tuple[ArchivedSession, ...]:
        """Return up to ``limit`` archived sessions of a client after a position: a time and a session id."""
        with self._connection.reading() as database:
            values = (client_id, *(after or _FIRST[order]), limit)
            found = database.execute(_PAGES[order], values).fetchall()
        return tuple(map(rows.archived_session, found))

    def search(
        self, client_id: str, terms: Sequence[SearchTerm], *, after: tuple[float, str] | None, limit: int
    ) -> SearchResult | None:
        """Return up to ``limit`` stored sessions of a client that have all terms, live ones included.

        ``None`` if there is no index. Called on a thread of its own.

        Raises:
            InferenceCenterError: ``invalid_request`` if the terms have too many hits.
        """
        with self._search_connection.reading() as database:
            if not has_index(database):
                return None
            budget = _StepBudget()
            try:
                with budget.limit(database):
                    return search_file(database, client_id, terms, after=after, limit=limit)
            except sqlite3.OperationalError:
                if budget.is_spent:
                    raise _too_many_hits() from None
                raise

    def created_at(self, client_id: str, session_id: str) -> float | None:
        """Return when an archived session of a client was created."""
        with self._connection.reading() as database:
            row = database.execute(
                "SELECT created_at FROM sessions WHERE session_id = ? AND client_id = ? AND archived",
                (session_id, client_id),
            ).fetchone()
        return None if row is None else float(row[0])

    def find_tagged(self, client_id: str, name: str, prefix: str) -> tuple[str, ...]:
        """Return the archived sessions of a client whose entry ``name`` of the metadata begins with ``prefix``."""
        with self._connection.reading() as database:
            found = database.execute(
                "SELECT session_id FROM sessions WHERE client_id = ?1 AND archived"
                " AND substr(facts -> 'metadata' ->> ?2, 1, length(?3)) = ?3",
                (client_id, name, prefix),
            ).fetchall()
        return tuple(session_id for (session_id,) in found)

    def owner(self, session_id: str) -> tuple[str, int] | None:
        """Return the client and the characters of an archived session."""
        with self._connection.reading() as database:
            found: tuple[str, int] | None = database.execute(
                "SELECT client_id, n_chars FROM sessions WHERE session_id = ? AND archived", (session_id,)
            ).fetchone()
        return found

    def sizes(self) -> dict[str, ArchiveSize]:
        """Return the size of each client's archive."""
        with self._connection.reading() as database:
            found = database.execute(
                "SELECT client_id, count(*), sum(n_chars) FROM sessions WHERE archived GROUP BY client_id"
            ).fetchall()
        return {client_id: ArchiveSize(n_sessions, n_chars) for client_id, n_sessions, n_chars in found}

    def least_used(self, client_id: str, limit: int) -> list[tuple[str, int]]:
        """Return the ids and characters of a client's archived sessions used least recently."""
        with self._connection.reading() as database:
            return database.execute(
                "SELECT session_id, n_chars FROM sessions WHERE client_id = ? AND archived"
                " ORDER BY last_used_at, session_id LIMIT ?",
                (client_id, limit),
            ).fetchall()

    def due(
        self,
        now: float,
        *,
        default_ttl_s: float | None,
        own_days: Mapping[str, float],
        default_days: float | None,
        limit: int,
    ) -> list[tuple[str, str, int]]:
        """Return archived sessions whose idle limit is over: their ids, clients and characters."""
        values = (now, default_ttl_s, orjson.dumps(dict(own_days)).decode(), default_days, limit)
        with self._connection.reading() as database:
            return database.execute(_DUE, values).fetchall()

    def expired_shares(self, now: float, limit: int) -> tuple[tuple[str, str], ...]:
        """Return the ids and the clients of shares that have expired."""
        with self._connection.reading() as database:
            query = "SELECT share_id, client_id FROM shares WHERE expires_at <= ? LIMIT ?"
            return tuple(database.execute(query, (now, limit)).fetchall())

    def recent(self, limit: int) -> tuple[tuple[str, str], ...]:
        """Return the ids and the clients of the archived sessions used last."""
        with self._connection.reading() as database:
            found = database.execute(
                "SELECT session_id, client_id FROM sessions WHERE archived ORDER BY last_used_at DESC LIMIT ?", (limit,)
            )
            return tuple(found.fetchall())

    def shares(self, client_id: str) -> tuple[StoredShare, ...]:
        """Return the shares of a client, oldest first."""
        with self._connection.reading() as database:
            query = f"SELECT {rows.SHARE_COLUMNS} FROM shares WHERE client_id = ? ORDER BY created_at, share_id"  # noqa: S608
            return tuple(map(rows.share_of, database.execute(query, (client_id,)).fetchall()))

    def share(self, share_id: str) -> StoredShare | None:
        with self._connection.reading() as database:
            query = f"SELECT {rows.SHARE_COLUMNS} FROM shares WHERE share_id = ?"  # noqa: S608 - columns
            row = database.execute(query, (share_id,)).fetchone()
        return None if row is None else rows.share_of(row)

    def shared_messages(self, share_id: str) -> str | None:
        """Return the messages of a share as JSON."""
        with self._connection.reading() as database:
            row = database.execute("SELECT messages FROM shares WHERE share_id = ?", (share_id,)).fetchone()
        return None if row is None else str(row[0])

    def close(self) -> None:
        """Close the connections."""
        self._connection.close()
        self._search_connection.close()


def _too_many_hits() -> InferenceCenterError:
    return InferenceCenterError(
        ErrorCode.INVALID_REQUEST,
        "the words of the query occur in too many messages",
        field="query",
        hint='Leave out the most frequent words, or quote consecutive words ("...").',
    )


def _unreadable(*, retry_after_ms: int = RETRY_LATER_MS) -> InferenceCenterError:
    """Return the error that clients get: neither the path nor SQLite's message."""
    return InferenceCenterError(
        ErrorCode.STORAGE_UNAVAILABLE,
        "stored sessions cannot be read at the moment",
        hint="Try again when the operator has fixed it.",
        retry_after_ms=retry_after_ms,
    )

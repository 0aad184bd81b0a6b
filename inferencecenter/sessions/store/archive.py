"""Read access to the session file for CLI commands, also while a daemon writes it, and offline purges."""

from __future__ import annotations

import contextlib
import sqlite3
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.core.sqlite_file import checkpoint, connect, transaction, unusable
from inferencecenter.sessions.store import bases
from inferencecenter.sessions.store.database import hint_of, open_reading, open_writing, reason_of
from inferencecenter.sessions.store.loader import SharedRows, read_one, read_pending_output
from inferencecenter.sessions.store.recorder import Purge, detach_sessions
from inferencecenter.sessions.store.schema import MIGRATIONS
from inferencecenter.sessions.store.search_index import has_index, scrub, search_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from inferencecenter.sessions.journal import StoredSession
    from inferencecenter.sessions.search import FoundSession, SearchHit, SearchTerm
    from inferencecenter.sessions.store.recorder import PurgeKind
    from inferencecenter.sessions.store.rows import Row

# The rows of each session: its own, and the prefix of its bases that it shares.
_LIST: Final = """
    WITH RECURSIVE held (session, row, messages, turns, pieces) AS (
        SELECT id, id, 1e99, 1e99, 1e99 FROM (
            SELECT id FROM sessions WHERE complete AND (?1 IS NULL OR client_id = ?1) AND (NOT ?2 OR archived)
            AND (?3 IS NULL OR id > (SELECT id FROM sessions WHERE session_id = ?3)) ORDER BY id LIMIT ?4
        )
        UNION ALL
        SELECT session, base, min(messages, base_messages), min(turns, base_turns), min(pieces, base_pieces)
        FROM held JOIN sessions ON id = row WHERE base IS NOT NULL
    ), counted AS (
        SELECT session,
            sum((SELECT count(*) FROM messages WHERE messages.session = row AND n < held.messages)) AS n_messages,
            sum((SELECT count(*) FROM turns WHERE turns.session = row AND n < held.turns)) AS n_turns,
            sum((SELECT coalesce(sum(length(ids)), 0) FROM tokens WHERE tokens.session = row AND n < pieces)) AS n_bytes
        FROM held GROUP BY session
    )
    SELECT session_id, client_id, coalesce(facts ->> 'model', ''), counted.n_messages,
        n_turns, n_bytes / 4, created_at, last_used_at, EXISTS (SELECT 1 FROM orders WHERE orders.session = id),
        archived
    FROM sessions JOIN counted ON counted.session = id ORDER BY id
"""
_USAGE_BY_DAY: Final = (
    "client_id, day, sum(turns), sum(prompt_tokens), sum(cached_tokens), sum(completion_tokens) FROM usage"
)
# Ordered by tokens, which a page cannot be read by without a pass over the rows of all clients; SQLite keeps one sum.
_USAGE_AFTER: Final = """
    SELECT client_id FROM usage WHERE day >= ?1 GROUP BY client_id
    HAVING ?2 IS NULL OR (-sum(prompt_tokens + completion_tokens), client_id) > (-?3, ?2)
    ORDER BY sum(prompt_tokens + completion_tokens) DESC, client_id
"""
_INDEX_HINT: Final = "A daemon with sessions.search builds it when it starts."
_ROWS_HINT: Final = "`inferencecenter restore` a backup that has it, or `inferencecenter session purge` it."


@dataclass(frozen=True, slots=True)
class SessionLine:
    """A session in a listing; times are Unix seconds, ``answering`` if a turn is unfinished.

    An ``archived`` session is in memory only while it is used.
    """

    session_id: str
    client_id: str
    model: str
    messages: int
    turns: int
    tokens: int
    created_at: float
    last_used_at: float
    answering: bool
    archived: bool


@dataclass(frozen=True, slots=True)
class FoundLine:
    """A session that was found, the time of its last use in Unix seconds, and the texts around the words."""

    session_id: str
    client_id: str
    title: str
    last_used_at: float
    hits: tuple[SearchHit, ...]


@dataclass(frozen=True, slots=True)
class UsageLine:
    """Usage of a client on a UTC day, such as 2026-11-21, or of one of its tokens if ``token_id`` is set."""

    client_id: str
    day: str
    turns: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    token_id: str | None = None

    @property
    def counted_tokens(self) -> int:
        """Tokens that count against limits: uncached prompt tokens and generated tokens."""
        return self.prompt_tokens - self.cached_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class UsagePage:
    """The daily usage of some accounts, those with the most tokens first, and the number of accounts after them."""

    lines: tuple[UsageLine, ...]
    n_more: int


class Archive:
    """A consistent snapshot of the file."""

    def __init__(self, path: Path, database: sqlite3.Connection) -> None:
        self._path = path
        self._database = database

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: Path) -> Iterator[Archive]:
        """Open the file at ``path``; a missing file reads as an empty one.

        Raises:
            InferenceCenterError: ``storage_unavailable``, also for errors inside the context.
        """
        with _mapped_errors(path), contextlib.closing(_open(path)) as database:
            yield cls(path, database)

    def sessions(
        self, client_id: str | None = None, *, archived: bool = False, after: str | None = None, limit: int = -1
    ) -> list[SessionLine]:
        """Return the sessions of a client, or all, oldest first.

        Args:
            client_id: The client; ``None`` for all.
            archived: Only those that are archived.
            after: Id of the session before the first one.
            limit: Maximum number; negative for no limit.

        Raises:
            InferenceCenterError: ``session_not_found`` if there is no session ``after``.
        """
        query = "SELECT 1 FROM sessions WHERE session_id = ?"
        if after is not None and self._database.execute(query, (after,)).fetchone() is None:
            raise InferenceCenterError(ErrorCode.SESSION_NOT_FOUND, field="after", hint="Read the list anew.")
        return [_line(row) for row in self._database.execute(_LIST, (client_id, archived, after, limit))]

    def read(self, session_id: str) -> StoredSession:
        """Return a session.

        Raises:
            InferenceCenterError: ``session_not_found``, or ``storage_unavailable`` if its rows are inconsistent.
        """
        query = "SELECT id FROM sessions WHERE complete AND session_id = ?"
        row = self._database.execute(query, (session_id,)).fetchone()
        if row is None:
            raise InferenceCenterError(
                ErrorCode.SESSION_NOT_FOUND,
                f"no session {session_id!r} is stored",
                hint="`inferencecenter session list` lists the stored sessions.",
            )
        try:
            output, shared = read_pending_output(self._database), SharedRows(self._database, is_shared=False)
            return read_one(self._database, row[0], output, shared).session
        except ValueError as error:
            reason = f"the rows of session {session_id} are inconsistent"
            raise unusable(self._path, reason, hint=_ROWS_HINT) from error

    def search_all(
        self, terms: Sequence[SearchTerm], client_id: str | None, *, limit: int
    ) -> tuple[list[FoundLine], float | None]:
        """Return the sessions of a client, or of all, that have all terms, those used last first.

        Also returns the share of the sessions that is indexed, ``None`` if all are.

        Raises:
            InferenceCenterError: ``storage_unavailable`` without an index.
        """
        if not has_index(self._database):
            raise unusable(self._path, "it has no search index", hint=_INDEX_HINT)
        query = "SELECT DISTINCT client_id FROM sessions WHERE complete AND (?1 IS NULL OR client_id = ?1)"
        lines: list[FoundLine] = []
        indexed: float | None = None
        for (each,) in self._database.execute(query, (client_id,)).fetchall():
            result = search_file(self._database, each, terms, after=None, limit=limit)
            indexed = result.indexed
            lines += [_found_line(each, session) for session in result.found]
        lines.sort(key=lambda line: line.last_used_at, reverse=True)
        return lines[:limit], indexed

    def usage(self, client_id: str | None = None, *, since: str = "") -> list[UsageLine]:
        """Return the daily usage of a client, or of each, from a day on, oldest day first."""
        # The test for NULL alone would make SQLite read the rows of all clients, also for one.
        whose = "" if client_id is None else " AND client_id = ?2"
        rows = self._database.execute(
            f"SELECT {_USAGE_BY_DAY} WHERE day >= ?1{whose} GROUP BY day, client_id ORDER BY day, client_id",
            (since,) if client_id is None else (since, client_id),
        )
        return [UsageLine(*row) for row in rows]

    def usage_page(self, since: str, *, after: str | None, limit: int) -> UsagePage:
        """Return the daily usage, from a day on, of the next clients by their tokens.

        Args:
            since: The first day.
            after: The client before the first one of the page.
            limit: Maximum number of clients.
        """
        (used,) = self._database.execute(
            "SELECT coalesce(sum(prompt_tokens + completion_tokens), 0) FROM usage WHERE client_id = ? AND day >= ?",
            (after, since),
        ).fetchone()
        position = (since, after, used)
        clients = [client_id for (client_id,) in self._database.execute(f"{_USAGE_AFTER} LIMIT ?4", (*position, limit))]
        (n_left,) = self._database.execute(f"SELECT count(*) FROM ({_USAGE_AFTER})", position).fetchone()  # noqa: S608
        query = f"SELECT {_USAGE_BY_DAY} WHERE client_id = ? AND day >= ? GROUP BY day ORDER BY day"
        lines = [UsageLine(*row) for each in clients for row in self._database.execute(query, (each, since))]
        return UsagePage(tuple(lines), n_left - len(clients))

    def usage_by_token(self, client_id: str | None = None, *, since: str = "") -> list[UsageLine]:
        """Return the daily usage by token; API keys, and usage older than this column, have the empty token."""
        rows = self._database.execute(
            "SELECT client_id, day, turns, prompt_tokens, cached_tokens, completion_tokens, token_id FROM usage"
            " WHERE (?1 IS NULL OR client_id = ?1) AND day >= ?2 ORDER BY day, client_id, token_id",
            (client_id, since),
        )
        return [UsageLine(*row) for row in rows]

    def matches(self, kind: PurgeKind, name: str) -> list[str]:
        """Return the ids of the sessions that a purge would delete."""
        column = "session_id" if kind == "session" else "client_id"
        rows = self._database.execute(f"SELECT session_id FROM sessions WHERE complete AND {column} = ?", (name,))  # noqa: S608
        return [session_id for (session_id,) in rows]

    def n_chars(self, client_id: str) -> int:
        """Return the characters of the stored messages of a client; those that forks share count once."""
        query = (
            "SELECT coalesce(sum(length(content)), 0) FROM messages JOIN sessions ON sessions.id = messages.session"
            " WHERE client_id = ?"
        )
        return int(self._database.execute(query, (client_id,)).fetchone()[0])

    def holds(self, kind: PurgeKind, name: str) -> bool:
        """Return whether a purge would delete anything."""
        return bool(self.matches(kind, name) or (kind == "client" and self.usage(name)))


def purge_file(path: Path, kind: PurgeKind, name: str) -> None:
    """Delete a session or all data of a client from a file that no daemon uses, and overwrite it.

    Raises:
        InferenceCenterError: ``storage_unavailable``.
    """
    with _mapped_errors(path), contextlib.closing(open_writing(path)) as database:
        with transaction(database):
            detach_sessions(database, Purge(kind, name))
            bases.sweep(database, bases.detached_rows(database))
            scrub(database)
        checkpoint(database)


def truncate_wal(path: Path) -> None:
    """Checkpoint and truncate the WAL, so that it holds no deleted data, unless another process is reading.

    Raises:
        InferenceCenterError: ``storage_unavailable``.
    """
    with _mapped_errors(path), contextlib.closing(connect(path)) as database:
        checkpoint(database)


def _found_line(client_id: str, found: FoundSession) -> FoundLine:
    session = found.session
    return FoundLine(
        session_id=session.config.session_id,
        client_id=client_id,
        title=session.config.metadata.get("title", ""),
        last_used_at=session.last_used_at,
        hits=found.hits,
    )


def _line(row: Row) -> SessionLine:
    session_id, client_id, model, messages, turns, tokens, created_at, last_used_at, answering, archived = row
    return SessionLine(
        session_id=session_id,
        client_id=client_id,
        model=model,
        messages=messages,
        turns=turns,
        tokens=tokens,
        created_at=created_at,
        last_used_at=last_used_at,
        answering=bool(answering),
        archived=bool(archived),
    )


def _open(path: Path) -> sqlite3.Connection:
    if not path.exists():
        nothing = sqlite3.connect(":memory:", isolation_level=None)
        for statement in (statement for step in MIGRATIONS for statement in step):
            nothing.execute(statement)
        return nothing
    database = open_reading(path)
    # A read transaction: all statements see the same snapshot.
    database.execute("BEGIN")
    return database


@contextlib.contextmanager
def _mapped_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise unusable(path, reason_of(error), hint=hint_of(error)) from error

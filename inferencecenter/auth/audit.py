"""The audit log: logins, refusals and changes of accounts. A table in their database, bounded by rows and age.

Equal lines within a minute are merged into one with a count. Each kind of event has its own limit of rows, so that a
flood of one does not displace another. Entries of logins are buffered, and written in one transaction.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Mapping


MERGE_S: Final = 60.0
"""Equal lines within this time are merged."""
PRUNE_ROWS: Final = 1000
"""Rows that one process writes between two prunings."""
_PRUNE_S: Final = 3600.0
_DAY_S: Final = 86_400
_MAX_CHARS: Final = 256


class AuditEvent(StrEnum):
    """Kinds of audit events."""

    LOGIN = "login"
    LOGIN_REFUSED = "login_refused"
    TOKEN_CREATED = "token_created"  # noqa: S105 - a name, not a secret
    TOKEN_CHANGED = "token_changed"  # noqa: S105 - a name, not a secret
    TOKEN_REVOKED = "token_revoked"  # noqa: S105 - a name, not a secret
    CLIENT_CREATED = "client_created"
    CLIENT_CHANGED = "client_changed"
    CLIENT_REMOVED = "client_removed"
    ACCOUNTS_LISTED = "accounts_listed"
    SESSION_PURGED = "session_purged"
    SESSIONS_LISTED = "sessions_listed"
    AUDIT_READ = "audit_read"
    LOG_READ = "log_read"
    CLIENTS_LISTED = "clients_listed"
    CLIENT_KICKED = "client_kicked"
    DRAIN_ASKED = "drain_asked"
    NODE_DRAINED = "node_drained"
    NODE_UNDRAINED = "node_undrained"
    MODEL_SWAPPED = "model_swapped"
    MODEL_UNLOADED = "model_unloaded"
    MCP_TOOL_CALLED = "mcp_tool_called"
    MODEL_PULLED = "model_pulled"
    PULL_CANCELLED = "pull_cancelled"
    MODEL_REMOVED = "model_removed"
    SHARE_CREATED = "share_created"
    SHARE_REVOKED = "share_revoked"
    SHARE_OPENED = "share_opened"
    FIRST_ADMIN = "first_admin"
    DAEMON_STARTED = "daemon_started"
    DAEMON_STOPPED = "daemon_stopped"


_LOGINS: Final = (AuditEvent.LOGIN, AuditEvent.LOGIN_REFUSED)
_LOGIN_ROWS: Final = 20_000
_OTHER_ROWS: Final = 4_000

MAX_ROWS: Final[Mapping[AuditEvent, int]] = MappingProxyType(
    dict.fromkeys(AuditEvent, _OTHER_ROWS) | dict.fromkeys(_LOGINS, _LOGIN_ROWS)
)
"""Maximum number of rows of each event."""


class AuditActor(NamedTuple):
    """The administrator who acts over the protocol, and the address; the command line has none."""

    client_id: str
    address: str


class AuditEntry(NamedTuple):
    """An audit line without its time, made by ``audit_entry`` from untrusted input; hashed at each login."""

    event: AuditEvent
    client_id: str | None = None
    token_id: str | None = None
    address: str | None = None
    detail: str = ""
    actor: str | None = None


@dataclass(frozen=True, slots=True)
class AuditLine:
    """A stored line. It stands for ``count`` equal events from ``at`` to ``last_at`` (Unix seconds).

    ``actor`` is the client that changed the account or token of the line; ``line_id`` names the line.
    """

    at: float
    last_at: float
    count: int
    event: AuditEvent
    client_id: str | None
    token_id: str | None
    address: str | None
    detail: str
    actor: str | None = None
    line_id: int = field(default=0, compare=False)


def audit_entry(  # noqa: PLR0913 - keyword-only
    event: AuditEvent,
    *,
    client_id: str | None = None,
    token_id: str | None = None,
    address: str | None = None,
    detail: str = "",
    actor: str | None = None,
) -> AuditEntry:
    """Return the entry of an event; long text is truncated, and control characters are replaced."""
    return AuditEntry(
        event,
        client_id=None if client_id is None else _sanitized(client_id),
        token_id=None if token_id is None else _sanitized(token_id),
        address=None if address is None else _sanitized(address),
        detail=_sanitized(detail),
        actor=None if actor is None else _sanitized(actor),
    )


class AuditLog:
    """Lines in the table ``audit``, written inside the caller's transactions; one thread at a time.

    Args:
        days: Maximum age of lines; ``None`` limits only their number.
    """

    def __init__(self, *, days: float | None) -> None:
        self._kept_s = None if days is None else days * _DAY_S
        self._unpruned_rows = PRUNE_ROWS
        self._pruned_at = 0.0

    def write(self, database: sqlite3.Connection, line: AuditEntry, *, at: float) -> None:
        self._insert(database, line, EventCount(at, at))
        self._prune(database, at)

    def write_tallies(
        self, database: sqlite3.Connection, tallies: Mapping[AuditEntry, EventCount], *, at: float
    ) -> None:
        """Write entries up to ``at``, each merged into the equal row of the last minute if there is one."""
        for line, tally in tallies.items():
            if not _merge(database, line, tally):
                self._insert(database, line, tally)
        self._prune(database, at)

    def read(  # noqa: PLR0913 - keyword-only
        self,
        database: sqlite3.Connection,
        *,
        last: int,
        at: float,
        client_id: str | None = None,
        event: AuditEvent | None = None,
        before: int | None = None,
    ) -> list[AuditLine]:
        """Return the ``last`` lines of a client and an event, or of all, oldest first, as of ``at``.

        A client's lines are those about it and those of its actions. ``before`` is the id of a line that follows.
        """
        rows = database.execute(
            "SELECT at, last_at, count, event, client_id, token_id, address, detail, actor, id FROM audit"
            " WHERE at >= ?1 AND (?2 IS NULL OR client_id = ?2 OR actor = ?2) AND (?3 IS NULL OR event = ?3)"
            " AND (?4 IS NULL OR (at, id) < (SELECT at, id FROM audit WHERE id = ?4))"
            " ORDER BY at DESC, id DESC LIMIT ?5",
            (self._oldest(at), client_id, event, before, last),
        ).fetchall()
        return [_line(*row) for row in reversed(rows)]

    def _insert(self, database: sqlite3.Connection, line: AuditEntry, tally: EventCount) -> int:
        self._unpruned_rows += 1
        row_id = database.execute(
            "INSERT INTO audit (at, last_at, count, event, client_id, token_id, address, detail, actor)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (*(tally.first_at, tally.last_at, tally.times), *line),
        ).lastrowid
        assert row_id is not None
        return row_id

    def _prune(self, database: sqlite3.Connection, at: float) -> None:
        """Remove old and excess lines once in a while, and at the first write of a process."""
        if self._unpruned_rows < PRUNE_ROWS and abs(at - self._pruned_at) < _PRUNE_S:
            return
        database.execute("DELETE FROM audit WHERE at < ?", (self._oldest(at),))
        for event, most in MAX_ROWS.items():
            database.execute(
                "DELETE FROM audit WHERE event = ?1 AND id <="
                " (SELECT id FROM audit WHERE event = ?1 ORDER BY id DESC LIMIT 1 OFFSET ?2)",
                # Rows that may be written until the next check.
                (event, most - PRUNE_ROWS),
            )
        self._unpruned_rows = 0
        self._pruned_at = at

    def _oldest(self, at: float) -> float:
        return float("-inf") if self._kept_s is None else at - self._kept_s


def _merge(database: sqlite3.Connection, line: AuditEntry, tally: EventCount) -> bool:
    """Add to the equal row of the last minute; ``False`` if there is none."""
    changed = database.execute(
        "UPDATE audit SET count = count + ?1, last_at = MAX(last_at, ?2) WHERE id = ("
        "SELECT id FROM audit WHERE event = ?4 AND address IS ?7 AND at BETWEEN ?3 AND ?2"
        " AND client_id IS ?5 AND token_id IS ?6 AND detail = ?8 ORDER BY at DESC LIMIT 1)",
        (
            *(tally.times, tally.last_at, tally.last_at - MERGE_S),
            *(line.event, line.client_id, line.token_id, line.address, line.detail),
        ),
    )
    return changed.rowcount == 1


def _line(at: float, last_at: float, count: int, event: str, *rest: Any) -> AuditLine:
    client_id, token_id, address, detail, actor, line_id = rest
    return AuditLine(
        at=at,
        last_at=last_at,
        count=count,
        event=AuditEvent(event),
        client_id=client_id,
        token_id=token_id,
        address=address,
        detail=detail,
        actor=actor,
        line_id=line_id,
    )


def _sanitized(text: str) -> str:
    if len(text) <= _MAX_CHARS and text.isprintable():
        return text
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text[:_MAX_CHARS])


MAX_BUFFERED: Final = 10_000
"""Maximum number of different buffered entries; beyond it, only kind and count are kept."""


class EventCount(NamedTuple):
    """Count of equal events, with the times of the first and last (Unix seconds)."""

    first_at: float
    last_at: float
    times: int = 1

    def plus(self, other: EventCount) -> EventCount:
        return EventCount(
            min(self.first_at, other.first_at), max(self.last_at, other.last_at), times=self.times + other.times
        )


@dataclass(frozen=True, slots=True)
class AuditBatch:
    """Drained content of the buffer; ``last_uses`` has Unix seconds by token id."""

    tallies: Mapping[AuditEntry, EventCount] = field(default_factory=dict)
    last_uses: Mapping[str, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.tallies or self.last_uses)


class AuditBuffer:
    """Buffer of login entries; thread-safe, and held only for dictionary operations."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tallies: dict[AuditEntry, EventCount] = {}
        self._last_uses: dict[str, float] = {}

    def add_use(self, token_id: str, *, at: float) -> None:
        with self._lock:
            self._last_uses[token_id] = at

    def add(self, entry: AuditEntry, *, at: float) -> None:
        with self._lock:
            self._add(entry, EventCount(at, at))

    def drain(self) -> AuditBatch:
        with self._lock:
            taken = AuditBatch(self._tallies, self._last_uses)
            self._tallies, self._last_uses = {}, {}
        return taken

    def requeue(self, taken: AuditBatch) -> None:
        """Put entries that could not be written back into the buffer."""
        with self._lock:
            self._last_uses = {**taken.last_uses, **self._last_uses}
            for entry, tally in taken.tallies.items():
                self._add(entry, tally)

    def _add(self, entry: AuditEntry, tally: EventCount) -> None:
        if entry not in self._tallies and len(self._tallies) >= MAX_BUFFERED:
            entry = entry._replace(client_id=None, token_id=None, address=None, detail="")
        known = self._tallies.get(entry)
        self._tallies[entry] = tally if known is None else known.plus(tally)

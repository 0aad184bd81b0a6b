"""Clients and their tokens in SQLite. Calls are short and blocking; the file is private to its owner.

A *client* is an account with limits; it has any number of tokens ``ic_<id>_<secret>``. Only the SHA-256 of a secret is
stored: 256 random bits need no slow hash. Clients of ``clients.toml`` exist beside those of the database.
"""

from __future__ import annotations

import hashlib
import hmac
import threading
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import structlog

from inferencecenter.auth import accounts_db, tokens
from inferencecenter.auth.account import (
    Account,
    NewToken,
    check_archive,
    check_client_id,
    check_max_sessions,
    check_retention,
)
from inferencecenter.auth.accounts_db import AccountsFile
from inferencecenter.auth.audit import AuditBuffer, AuditEvent, AuditLog, audit_entry
from inferencecenter.config.limits import NO_LIMITS
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.core.sqlite_file import FileMovedError
from inferencecenter.protocol.scopes import Scope, parse_scopes
from inferencecenter.sessions.context import AccountLimits

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
    from pathlib import Path

    from inferencecenter.auth.account import ClientInfo, StaticClient, TokenInfo
    from inferencecenter.auth.audit import AuditActor, AuditEntry, AuditLine
    from inferencecenter.config.limits import AccessLimits
    from inferencecenter.core.sqlite_file import FileIdentity
    from inferencecenter.protocol.values import Priority

DATABASE_NAME: Final = "accounts.sqlite3"
MAX_CLIENTS: Final = 10_000
MAX_TOKENS: Final = 10_000
"""Maximum number of tokens of a client, including revoked ones."""
_NO_LIMIT: Final = -1
_NO_HASH: Final = bytes(hashlib.sha256().digest_size)

_log = structlog.get_logger(__name__)


class Accounts:
    """The accounts of one daemon; thread-safe."""

    def __init__(
        self,
        file: AccountsFile,
        *,
        clock: Callable[[], float],
        static: Mapping[str, StaticClient],
        audit_days: float | None,
    ) -> None:
        self._file = file
        self._clock = clock
        self._static = static
        self._audit_log = AuditLog(days=audit_days)
        self._audit_buffer = AuditBuffer()
        self._flushing = threading.Lock()

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        clock: Callable[[], float],
        static: Mapping[str, StaticClient] = MappingProxyType({}),
        audit_days: float | None = None,
    ) -> Accounts:
        """Open the database at ``path``, or create it with mode 0600.

        Args:
            path: The SQLite file.
            clock: Unix seconds.
            static: Clients of ``clients.toml`` by client id.
            audit_days: Age in days from which lines of the audit log are removed; ``None`` keeps them.

        Raises:
            InferenceCenterError: ``storage_unavailable``; an unusable file is left unchanged.
        """
        return cls(AccountsFile.open(path), clock=clock, static=static, audit_days=audit_days)

    @property
    def identity(self) -> FileIdentity | None:
        return self._file.identity

    @property
    def is_in_place(self) -> bool:
        """Whether the open file is still the one at its path, which other processes change."""
        try:
            self._file.check()
        except FileMovedError:
            return False
        return True

    def close(self) -> None:
        """Write buffered entries, if possible, and close the file."""
        try:
            self.flush_audit()
        except InferenceCenterError as error:
            _log.warning("logins_unwritten", error=error.message, hint=error.hint)
        finally:
            self._file.close()

    def has_clients(self) -> bool:
        with self._rows("SELECT 1 FROM clients LIMIT 1") as rows:
            return rows.fetchone() is not None

    def ensure_client(
        self,
        client_id: str,
        *,
        max_sessions: int,
        priority: Priority,
        scopes: Iterable[str] = (Scope.USER,),
        retention_days: float | None = None,
    ) -> None:
        """Create the client, or update the existing one, whose limits stay.

        Raises:
            InferenceCenterError: ``invalid_request`` for an invalid value, or ``storage_unavailable``.
        """
        scope_names = " ".join(sorted(parse_scopes(scopes)))
        check_max_sessions(max_sessions)
        check_retention(retention_days)
        with self._file.transaction() as database:
            exists = _exists(database, client_id)
            if not exists:
                check_client_id(client_id)
            database.execute(
                "INSERT INTO clients (client_id, max_sessions, priority, scopes, retention_days, created_at)"
                " VALUES (?, ?, ?, ?, ?, ?)"
                " ON CONFLICT (client_id) DO UPDATE SET max_sessions = excluded.max_sessions,"
                " priority = excluded.priority, scopes = excluded.scopes, retention_days = excluded.retention_days",
                (client_id, max_sessions, priority, scope_names, retention_days, self._clock()),
            )
            event = AuditEvent.CLIENT_CHANGED if exists else AuditEvent.CLIENT_CREATED
            self._record(database, audit_entry(event, client_id=client_id, detail=f"scopes {scope_names}"))

    def create_client(  # noqa: PLR0913 - keyword-only
        self,
        client_id: str,
        *,
        max_sessions: int,
        priority: Priority,
        scopes: Iterable[str] = (Scope.USER,),
        retention_days: float | None = None,
        archive_mib: int | None = None,
        limits: AccessLimits = NO_LIMITS,
        by: AuditActor | None = None,
    ) -> None:
        """Create a client.

        Raises:
            InferenceCenterError: ``invalid_request`` for an invalid value or an id that is taken, ``quota_exceeded``
                with too many clients, or ``storage_unavailable``.
        """
        scope_names = " ".join(sorted(parse_scopes(scopes)))
        check_client_id(client_id)
        check_max_sessions(max_sessions)
        check_retention(retention_days)
        check_archive(archive_mib)
        with self._file.transaction() as database:
            if client_id in self._static or _exists(database, client_id):
                raise InferenceCenterError(
                    ErrorCode.INVALID_REQUEST,
                    f"client_id is {client_id!r}, which exists already",
                    field="client_id",
                    hint="Choose another, or create a token for the existing one.",
                )
            _check_room(database, None)
            database.execute(
                "INSERT INTO clients"
                " (client_id, max_sessions, priority, scopes, retention_days, archive_mib, created_at, limits)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(client_id, max_sessions, priority, scope_names, retention_days, archive_mib),
                    *(self._clock(), accounts_db.limits_to_json(limits)),
                ),
            )
            detail = f"scopes {scope_names}"
            self._record(database, _entry(AuditEvent.CLIENT_CREATED, by, client_id=client_id, detail=detail))

    def change_client(  # noqa: PLR0913 - keyword-only
        self,
        client_id: str,
        *,
        limits: AccessLimits | None = None,
        max_sessions: int | None = None,
        priority: Priority | None = None,
        scopes: Iterable[str] | None = None,
        storage: Mapping[str, float | None] = MappingProxyType({}),
        by: AuditActor | None = None,
    ) -> bool:
        """Change what is given of a client; ``False`` if there is no such client.

        ``storage`` may have ``retention_days`` and ``archive_mib``, for which ``None`` selects the daemon's setting.

        Raises:
            InferenceCenterError: ``invalid_request`` for an invalid value, or ``storage_unavailable``.
        """
        scope_names = None if scopes is None else " ".join(sorted(parse_scopes(scopes)))
        if max_sessions is not None:
            check_max_sessions(max_sessions)
        retention_days, archive_mib = storage.get("retention_days"), storage.get("archive_mib")
        check_retention(retention_days)
        check_archive(None if archive_mib is None else int(archive_mib))
        with self._file.transaction() as database:
            changed = database.execute(
                "UPDATE clients SET limits = coalesce(?, limits), max_sessions = coalesce(?, max_sessions),"
                " priority = coalesce(?, priority), scopes = coalesce(?, scopes),"
                " retention_days = CASE WHEN ? THEN ? ELSE retention_days END,"
                " archive_mib = CASE WHEN ? THEN ? ELSE archive_mib END WHERE client_id = ?",
                (
                    None if limits is None else accounts_db.limits_to_json(limits),
                    *(max_sessions, priority, scope_names),
                    *("retention_days" in storage, retention_days, "archive_mib" in storage, archive_mib, client_id),
                ),
            ).rowcount
            if changed:
                given = {"max_sessions": max_sessions, "priority": priority}
                words = [f"{name}={value}" for name, value in given.items() if value is not None]
                words += [f"{name}={'default' if value is None else f'{value:g}'}" for name, value in storage.items()]
                words += [] if scope_names is None else [f"scopes {scope_names}"]
                words += [] if limits is None else [f"limits {accounts_db.format_limits(limits)}"]
                entry = _entry(AuditEvent.CLIENT_CHANGED, by, client_id=client_id, detail=" ".join(words))
                self._record(database, entry)
        return bool(changed)

    def has_client(self, client_id: str) -> bool:
        with self._rows("SELECT 1 FROM clients WHERE client_id = ?", (client_id,)) as rows:
            return rows.fetchone() is not None

    def knows(self, client_id: str) -> bool:
        """Return whether this is a client of the database or of ``clients.toml``."""
        return client_id in self._static or self.has_client(client_id)

    def session_limits(self) -> dict[str, AccountLimits]:
        """Return the limits of the sessions of all clients, by client id."""
        with self._rows("SELECT client_id, max_sessions, retention_days, archive_mib FROM clients") as rows:
            own = {client_id: AccountLimits(*limits) for client_id, *limits in rows}
        accounts = (client.account for client in self._static.values())
        return own | {
            each.client_id: AccountLimits(each.max_sessions, each.retention_days, each.archive_mib) for each in accounts
        }

    def replace_static(self, static: Mapping[str, StaticClient]) -> frozenset[str]:
        """Replace the clients of ``clients.toml``; return the ids of those removed or changed."""
        before, self._static = self._static, static
        return frozenset(client_id for client_id, client in before.items() if static.get(client_id) != client)

    def remove_client(self, client_id: str, *, detail: str = "", by: AuditActor | None = None) -> bool:
        """Remove a client and its tokens; ``False`` if there is no such client."""
        with self._file.transaction() as database:
            removed = database.execute("DELETE FROM clients WHERE client_id = ?", (client_id,)).rowcount
            if removed:
                self._record(database, _entry(AuditEvent.CLIENT_REMOVED, by, client_id=client_id, detail=detail))
        return bool(removed)

    def revoke_all(self, client_id: str, *, by: AuditActor | None = None) -> int | None:
        """Revoke all tokens of a client; return their number, ``None`` if there is no such client."""
        with self._file.transaction() as database:
            if not _exists(database, client_id):
                return None
            revoked = database.execute(
                "UPDATE tokens SET revoked_at = ? WHERE client_id = ? AND revoked_at IS NULL",
                (self._clock(), client_id),
            ).rowcount
            if revoked:
                detail = f"all tokens ({revoked})"
                self._record(database, _entry(AuditEvent.TOKEN_REVOKED, by, client_id=client_id, detail=detail))
        return revoked

    def clients(
        self, client_id: str | None = None, *, after: str | None = None, limit: int | None = None
    ) -> list[ClientInfo]:
        """Return the clients of the database, or the one named, oldest first.

        ``after`` is the id of the client before the first one.

        Raises:
            InferenceCenterError: ``invalid_request`` if there is no client ``after``.
        """
        if after is not None and not self.has_client(after):
            raise _unknown_cursor()
        with self._rows(
            "SELECT client_id, max_sessions, priority, scopes, retention_days, archive_mib, created_at, limits,"
            " (SELECT count(*) FROM tokens t WHERE t.client_id = c.client_id AND t.revoked_at IS NULL)"
            " FROM clients c WHERE (?1 IS NULL OR client_id = ?1) AND (?2 IS NULL OR (created_at, client_id) >"
            " (SELECT created_at, client_id FROM clients WHERE client_id = ?2))"
            " ORDER BY created_at, client_id LIMIT ?3",
            (client_id, after, _NO_LIMIT if limit is None else limit),
        ) as rows:
            return [accounts_db.client_from_row(row) for row in rows]

    def static_accounts(self) -> list[Account]:
        """Return the clients of ``clients.toml``."""
        return [client.account for client in self._static.values()]

    def limits(self, wanted: Collection[tuple[str, str]]) -> dict[tuple[str, str], AccessLimits]:
        """Return the limits of those tokens that exist, by client and token id; an API key has the empty token id."""
        with self._file.reading() as database:
            found = accounts_db.read_limits(database, wanted)
        keys = {key: self._static.get(key[0]) for key in wanted if not key[1]}
        return found | {key: client.account.limits for key, client in keys.items() if client is not None}

    def limit_token(self, token_id: str, limits: AccessLimits, *, by: AuditActor | None = None) -> bool:
        """Set a token's own limits; ``False`` if there is no such token."""
        with self._file.transaction() as database:
            changed = database.execute(
                "UPDATE tokens SET limits = ? WHERE token_id = ? RETURNING client_id",
                (accounts_db.limits_to_json(limits), token_id),
            ).fetchall()
            for (client_id,) in changed:
                detail = f"limits {accounts_db.format_limits(limits)}"
                entry = _entry(AuditEvent.TOKEN_CHANGED, by, client_id=client_id, token_id=token_id, detail=detail)
                self._record(database, entry)
        return bool(changed)

    def create_token(
        self,
        client_id: str,
        *,
        name: str = "",
        expires_at: float | None = None,
        limits: AccessLimits = NO_LIMITS,
        by: AuditActor | None = None,
    ) -> NewToken:
        """Create a token for a client.

        Raises:
            InferenceCenterError: ``invalid_request`` if the database has no such client; ``quota_exceeded`` if it has
                too many tokens.
        """
        if not self.has_client(client_id):
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST,
                f"client_id is {client_id!r}, which does not exist",
                field="client_id",
                hint="Create the client first.",
            )
        with self._file.transaction() as database:
            return self._insert_token(
                database, client_id, name, expires_at, accounts_db.limits_to_json(limits), detail=name, by=by
            )

    def rotate_token(self, token_id: str, *, by: AuditActor | None = None) -> NewToken | None:
        """Replace a token by a new one with its name, end and limits, and revoke it.

        Returns:
            The new token; ``None`` if the old one does not exist, has expired or was revoked.

        Raises:
            InferenceCenterError: ``quota_exceeded`` if its client has too many tokens.
        """
        with self._file.transaction() as database:
            found = database.execute(
                "SELECT client_id, name, expires_at, limits FROM tokens WHERE token_id = ?1 AND revoked_at IS NULL"
                " AND (expires_at IS NULL OR expires_at > ?2)",
                (token_id, self._clock()),
            ).fetchone()
            if found is None:
                return None
            new = self._insert_token(database, *found, detail=f"in place of {token_id}", by=by)
            self._revoke(database, token_id, by=by)
        return new

    def _insert_token(  # noqa: PLR0913 - the columns of a row
        self,
        database: sqlite3.Connection,
        client_id: str,
        name: str,
        expires_at: float | None,
        limits_json: str,
        *,
        detail: str,
        by: AuditActor | None,
    ) -> NewToken:
        token_id, secret = tokens.generate_token()
        _check_room(database, client_id)
        database.execute(
            "INSERT INTO tokens (token_id, client_id, name, secret_sha256, created_at, expires_at, limits)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            (token_id, client_id, name, tokens.hash_secret(secret), self._clock(), expires_at, limits_json),
        )
        entry = _entry(AuditEvent.TOKEN_CREATED, by, client_id=client_id, token_id=token_id, detail=detail)
        self._record(database, entry)
        return NewToken(token_id=token_id, token=tokens.format_token(token_id, secret))

    def list_tokens(
        self,
        client_id: str | None = None,
        *,
        token_id: str | None = None,
        after: str | None = None,
        limit: int | None = None,
    ) -> list[TokenInfo]:
        """Return the tokens of one client, or of all, or the one named, oldest first, including revoked ones.

        ``after`` is the id of the token before the first one.

        Raises:
            InferenceCenterError: ``invalid_request`` if there is no token ``after``.
        """
        self.flush_audit()
        if after is not None and not self._has_token(after):
            raise _unknown_cursor()
        with self._rows(
            "SELECT token_id, client_id, name, created_at, expires_at, last_used_at, revoked_at IS NOT NULL, limits"
            " FROM tokens WHERE (?1 IS NULL OR client_id = ?1) AND (?2 IS NULL OR token_id = ?2)"
            " AND (?3 IS NULL OR (created_at, token_id) >"
            " (SELECT created_at, token_id FROM tokens WHERE token_id = ?3))"
            " ORDER BY created_at, token_id LIMIT ?4",
            (client_id, token_id, after, _NO_LIMIT if limit is None else limit),
        ) as rows:
            return [accounts_db.token_from_row(row) for row in rows]

    def _has_token(self, token_id: str) -> bool:
        with self._rows("SELECT 1 FROM tokens WHERE token_id = ?", (token_id,)) as rows:
            return rows.fetchone() is not None

    def revoke(self, token_id: str, *, by: AuditActor | None = None) -> bool:
        """Revoke a token; ``False`` if it does not exist or was already revoked."""
        with self._file.transaction() as database:
            return self._revoke(database, token_id, by=by)

    def _revoke(self, database: sqlite3.Connection, token_id: str, *, by: AuditActor | None) -> bool:
        revoked = database.execute(
            "UPDATE tokens SET revoked_at = ? WHERE token_id = ? AND revoked_at IS NULL RETURNING client_id, name",
            (self._clock(), token_id),
        ).fetchall()
        for client_id, name in revoked:
            entry = _entry(AuditEvent.TOKEN_REVOKED, by, client_id=client_id, token_id=token_id, detail=name)
            self._record(database, entry)
        return bool(revoked)

    def verify_token(self, token: str) -> Account | None:
        """Return the account of a token, ``None`` if it is unknown, wrong, expired or revoked."""
        token_id, secret = tokens.parse_token(token)
        with self._rows(
            "SELECT t.secret_sha256, t.expires_at, t.revoked_at, c.client_id, c.max_sessions, c.priority, c.scopes,"
            " c.retention_days, c.archive_mib, c.limits, t.limits"
            " FROM tokens t JOIN clients c USING (client_id) WHERE t.token_id = ?",
            (token_id,),
        ) as rows:
            row = rows.fetchone()
        # Compared also for an unknown id, so that the duration does not reveal which ids exist.
        matches = hmac.compare_digest(tokens.hash_secret(secret), row[0] if row else _NO_HASH)
        if not matches or row is None or not self._is_valid(expires_at=row[1], revoked_at=row[2]):
            return None
        self._audit_buffer.add_use(token_id, at=self._clock())
        return Account(
            client_id=row[3],
            max_sessions=row[4],
            priority=row[5],
            scopes=frozenset(map(Scope, row[6].split())),
            token_id=token_id,
            expires_at=row[1],
            retention_days=row[7],
            archive_mib=row[8],
            limits=accounts_db.limits_from_json(row[10]).over(accounts_db.limits_from_json(row[9])),
        )

    def verify_key(self, client_id: str, api_key: str) -> Account | None:
        """Return the account of a client id and its API key.

        The key is the one of ``clients.toml``, or any token of that client, for programs that support only such a pair.
        """
        client = self._static.get(client_id)
        matches = hmac.compare_digest(tokens.hash_secret(api_key), client.key_sha256 if client else _NO_HASH)
        if matches and client is not None:
            return client.account
        account = self.verify_token(api_key)
        return account if account is not None and account.client_id == client_id else None

    def account_of(self, client_id: str) -> Account | None:
        """Return the account of a client as a key would, ``None`` if there is no such client."""
        if (client := self._static.get(client_id)) is not None:
            return client.account
        with self._rows(
            "SELECT client_id, max_sessions, priority, scopes, retention_days, archive_mib, limits FROM clients"
            " WHERE client_id = ?",
            (client_id,),
        ) as rows:
            row = rows.fetchone()
        if row is None:
            return None
        return Account(
            client_id=row[0],
            max_sessions=row[1],
            priority=row[2],
            scopes=frozenset(map(Scope, row[3].split())),
            retention_days=row[4],
            archive_mib=row[5],
            limits=accounts_db.limits_from_json(row[6]),
        )

    def valid_tokens(self) -> frozenset[str]:
        """Return the ids of all tokens that are neither revoked nor expired."""
        with self._rows(
            "SELECT token_id FROM tokens WHERE revoked_at IS NULL AND (expires_at IS NULL OR expires_at > ?)",
            (self._clock(),),
        ) as rows:
            return frozenset(row[0] for row in rows)

    def buffer_audit(self, line: AuditEntry) -> None:
        """Buffer an entry for the audit log, in a microsecond; ``flush_audit`` writes it."""
        self._audit_buffer.add(line, at=self._clock())

    def flush_audit(self) -> None:
        """Write the buffered entries of logins: lines of the audit log, and the tokens' times of last use.

        Raises:
            InferenceCenterError: ``storage_unavailable``; the entries stay buffered.
        """
        # A reader flushes first; what another thread has drained must be committed before it reads.
        with self._flushing:
            taken = self._audit_buffer.drain()
            if not taken:
                return
            try:
                with self._file.transaction(durable=False) as database:
                    database.executemany(
                        "UPDATE tokens SET last_used_at = ? WHERE token_id = ?",
                        [(at, token_id) for token_id, at in taken.last_uses.items()],
                    )
                    self._audit_log.write_tallies(database, taken.tallies, at=self._clock())
            except BaseException:
                self._audit_buffer.requeue(taken)
                raise

    def audit(
        self, event: AuditEvent, *, client_id: str | None = None, token_id: str | None = None, detail: str = ""
    ) -> None:
        """Write a line of the audit log durably; a failure is logged as a warning.

        Blocks for disk I/O; on the event loop use ``buffer_audit``.
        """
        try:
            with self._file.transaction() as database:
                self._record(database, audit_entry(event, client_id=client_id, token_id=token_id, detail=detail))
        except InferenceCenterError as error:
            _log.warning("audit_unwritten", audit_event=event.value, error=error.message, hint=error.hint)

    def audit_lines(
        self, *, last: int, client_id: str | None = None, event: AuditEvent | None = None, before: int | None = None
    ) -> list[AuditLine]:
        """Return the last lines of the audit log, optionally of one client or event, oldest first.

        With ``before`` they are the last ones before the line with that id.
        """
        self.flush_audit()
        with self._file.reading() as database:
            return self._audit_log.read(
                database, last=last, at=self._clock(), client_id=client_id, event=event, before=before
            )

    def _record(self, database: sqlite3.Connection, line: AuditEntry) -> None:
        self._audit_log.write(database, line, at=self._clock())

    def _is_valid(self, *, expires_at: float | None, revoked_at: float | None) -> bool:
        return revoked_at is None and (expires_at is None or self._clock() < expires_at)

    @contextmanager
    def _rows(self, query: str, values: tuple[object, ...] = ()) -> Iterator[sqlite3.Cursor]:
        with self._file.reading() as database:
            yield database.execute(query, values)


def _exists(database: sqlite3.Connection, client_id: str) -> bool:
    return database.execute("SELECT 1 FROM clients WHERE client_id = ?", (client_id,)).fetchone() is not None


def _unknown_cursor() -> InferenceCenterError:
    return InferenceCenterError(
        ErrorCode.INVALID_REQUEST, "after is no longer in the list", field="after", hint="Read the list anew."
    )


def _check_room(database: sqlite3.Connection, client_id: str | None) -> None:
    """Refuse a client beyond the maximum number, or a token beyond that of its client."""
    if client_id is None:
        what, most, query = "clients", MAX_CLIENTS, "SELECT count(*) FROM clients WHERE ? IS NULL"
    else:
        what, most, query = "tokens of this client", MAX_TOKENS, "SELECT count(*) FROM tokens WHERE client_id = ?"
    (n_rows,) = database.execute(query, (client_id,)).fetchone()
    if n_rows >= most:
        raise InferenceCenterError(
            ErrorCode.QUOTA_EXCEEDED,
            f"there are {n_rows} {what} already, and at most {most} are kept",
            field="client_id",
            hint="An external service can keep any number of accounts.",
        )


def _entry(event: AuditEvent, by: AuditActor | None, *, client_id: str, token_id: str = "", detail: str) -> AuditEntry:
    return audit_entry(
        event,
        client_id=client_id,
        token_id=token_id or None,
        address=None if by is None else by.address,
        detail=detail,
        actor=None if by is None else by.client_id,
    )

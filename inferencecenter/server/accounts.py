"""Clients and their tokens in SQLite. Calls are short and blocking; the file is private to its owner.

A *client* is an account with limits; it has any number of tokens ``ic_<id>_<secret>``. Of a secret only its SHA-256 is
kept: 256 random bits need no slow hash. Clients of ``clients.toml`` stand beside those of the database.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.scopes import Scope, parse_scopes
from inferencecenter.server.accounts_file import AccountsFile

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from inferencecenter.protocol.values import Priority

DATABASE_NAME: Final = "accounts.sqlite3"
_TOKEN_MARK: Final = "ic"  # noqa: S105 - how tokens begin
_TOKEN_ID_BYTES: Final = 6
_SECRET_BYTES: Final = 32
_NO_HASH: Final = bytes(hashlib.sha256().digest_size)


@dataclass(frozen=True, slots=True)
class Account:
    """A client as one credential showed it.

    ``token_id`` and ``expires_at`` (Unix seconds) belong to the token; an API key has neither.
    """

    client_id: str
    max_sessions: int
    priority: Priority
    scopes: frozenset[Scope]
    token_id: str | None = None
    expires_at: float | None = None


@dataclass(frozen=True, slots=True)
class StaticClient:
    """A client of ``clients.toml``, with the SHA-256 of its key."""

    account: Account
    key_sha256: bytes


@dataclass(frozen=True, slots=True)
class NewToken:
    """A token just made; ``token`` is shown once and kept nowhere."""

    token_id: str
    token: str


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """What is known of a token; times are Unix seconds."""

    token_id: str
    client_id: str
    name: str
    created_at: float
    expires_at: float | None
    last_used_at: float | None
    revoked: bool


class Accounts:
    """The accounts of one daemon; may be used from any thread."""

    def __init__(self, file: AccountsFile, *, clock: Callable[[], float], static: Mapping[str, StaticClient]) -> None:
        self._file = file
        self._clock = clock
        self._static = static
        self._lock = threading.Lock()
        self._used: dict[str, float] = {}

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        clock: Callable[[], float],
        static: Mapping[str, StaticClient] = MappingProxyType({}),
    ) -> Accounts:
        """Open the database at ``path``, made with mode 0600 when there is none.

        Args:
            path: The SQLite file.
            clock: Unix seconds.
            static: Clients of ``clients.toml`` by client id.

        Raises:
            InferenceCenterError: ``storage_unavailable``; a file that cannot be used is left as it is.
        """
        return cls(AccountsFile.open(path), clock=clock, static=static)

    def close(self) -> None:
        """Write what is pending and close the file."""
        try:
            self.write_last_used()
        finally:
            self._file.close()

    def has_clients(self) -> bool:
        """Tell whether any client was ever made."""
        with self._rows("SELECT 1 FROM clients LIMIT 1") as rows:
            return rows.fetchone() is not None

    def ensure_client(
        self, client_id: str, *, max_sessions: int, priority: Priority, scopes: Iterable[str] = (Scope.USER,)
    ) -> None:
        """Make the client, or give the one there these limits.

        Raises:
            InferenceCenterError: ``invalid_request`` for an unknown scope, or ``storage_unavailable``.
        """
        spelled = " ".join(sorted(parse_scopes(scopes)))
        self._write(
            "INSERT INTO clients (client_id, max_sessions, priority, scopes, created_at) VALUES (?, ?, ?, ?, ?)"
            " ON CONFLICT (client_id) DO UPDATE SET"
            " max_sessions = excluded.max_sessions, priority = excluded.priority, scopes = excluded.scopes",
            (client_id, max_sessions, priority, spelled, self._clock()),
        )

    def has_client(self, client_id: str) -> bool:
        """Tell whether the database has this client."""
        with self._rows("SELECT 1 FROM clients WHERE client_id = ?", (client_id,)) as rows:
            return rows.fetchone() is not None

    def remove_client(self, client_id: str) -> None:
        """Remove a client and its tokens."""
        self._write("DELETE FROM clients WHERE client_id = ?", (client_id,))

    def create_token(self, client_id: str, *, name: str = "", expires_at: float | None = None) -> NewToken:
        """Make a token for a client.

        Raises:
            InferenceCenterError: ``invalid_request`` when the database has no such client.
        """
        if not self.has_client(client_id):
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST,
                f"client_id is {client_id!r}, which is no client",
                field="client_id",
                hint="Make the client first.",
            )
        token_id, secret = secrets.token_hex(_TOKEN_ID_BYTES), secrets.token_hex(_SECRET_BYTES)
        self._write(
            "INSERT INTO tokens (token_id, client_id, name, secret_sha256, created_at, expires_at)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            (token_id, client_id, name, _sha256(secret), self._clock(), expires_at),
        )
        return NewToken(token_id=token_id, token=f"{_TOKEN_MARK}_{token_id}_{secret}")

    def list_tokens(self, client_id: str | None = None) -> list[TokenInfo]:
        """Return the tokens of one client, or of all, oldest first; revoked ones included."""
        self.write_last_used()
        with self._rows(
            "SELECT token_id, client_id, name, created_at, expires_at, last_used_at, revoked_at IS NOT NULL"
            " FROM tokens WHERE ?1 IS NULL OR client_id = ?1 ORDER BY created_at, token_id",
            (client_id,),
        ) as rows:
            return [TokenInfo(*row[:6], *map(bool, row[6:])) for row in rows]

    def revoke(self, token_id: str) -> bool:
        """Make a token useless; ``False`` when there is none, or it was revoked before."""
        return (
            self._write(
                "UPDATE tokens SET revoked_at = ? WHERE token_id = ? AND revoked_at IS NULL", (self._clock(), token_id)
            )
            == 1
        )

    def verify_token(self, token: str) -> Account | None:
        """Return the account a token stands for, ``None`` when it is unknown, wrong, expired or revoked."""
        token_id, secret = _split(token)
        with self._rows(
            "SELECT t.secret_sha256, t.expires_at, t.revoked_at, c.client_id, c.max_sessions, c.priority, c.scopes"
            " FROM tokens t JOIN clients c USING (client_id) WHERE t.token_id = ?",
            (token_id,),
        ) as rows:
            row = rows.fetchone()
        # Compared also for an unknown id, so that the time taken does not tell which ids exist.
        right = hmac.compare_digest(_sha256(secret), row[0] if row else _NO_HASH)
        if not right or row is None or not self._lives(expires_at=row[1], revoked_at=row[2]):
            return None
        with self._lock:
            self._used[token_id] = self._clock()
        return Account(
            client_id=row[3],
            max_sessions=row[4],
            priority=row[5],
            scopes=frozenset(map(Scope, row[6].split())),
            token_id=token_id,
            expires_at=row[1],
        )

    def verify_key(self, client_id: str, api_key: str) -> Account | None:
        """Return the account of a client id and its API key.

        The key is the one of ``clients.toml``, or any token of that client: programs that know only this pair can use
        tokens too.
        """
        client = self._static.get(client_id)
        right = hmac.compare_digest(_sha256(api_key), client.key_sha256 if client else _NO_HASH)
        if right and client is not None:
            return client.account
        account = self.verify_token(api_key)
        return account if account is not None and account.client_id == client_id else None

    def living_tokens(self) -> frozenset[str]:
        """Return the ids of all tokens that are neither revoked nor expired."""
        with self._rows(
            "SELECT token_id FROM tokens WHERE revoked_at IS NULL AND (expires_at IS NULL OR expires_at > ?)",
            (self._clock(),),
        ) as rows:
            return frozenset(row[0] for row in rows)

    def write_last_used(self) -> None:
        """Write when tokens were last used; kept in memory until then, since it happens at every login."""
        with self._lock:
            used, self._used = self._used, {}
            if not used:
                return
            with self._file.transaction() as database:
                database.executemany(
                    "UPDATE tokens SET last_used_at = ? WHERE token_id = ?",
                    [(at, token_id) for token_id, at in used.items()],
                )

    def _lives(self, *, expires_at: float | None, revoked_at: float | None) -> bool:
        return revoked_at is None and (expires_at is None or self._clock() < expires_at)

    @contextmanager
    def _rows(self, query: str, values: tuple[object, ...] = ()) -> Iterator[sqlite3.Cursor]:
        with self._lock, self._file.mapped_errors() as database:
            yield database.execute(query, values)

    def _write(self, statement: str, values: tuple[object, ...]) -> int:
        with self._lock, self._file.transaction() as database:
            return database.execute(statement, values).rowcount


def _split(token: str) -> tuple[str, str]:
    parts = token.split("_")
    return (parts[1], parts[2]) if len(parts) == 3 and parts[0] == _TOKEN_MARK else ("", token)


def _sha256(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()

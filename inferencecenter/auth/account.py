"""Accounts and their tokens as plain values."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from inferencecenter.config.limits import NO_LIMITS, AccessLimits
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.sessions.context import Principal

if TYPE_CHECKING:
    from inferencecenter.protocol.values import Priority

MAX_SESSIONS: Final = 100_000
MAX_RETENTION_DAYS: Final = 36_500
MAX_ARCHIVE_MIB: Final = 2**20
CLIENT_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}")


@dataclass(frozen=True, slots=True)
class Account(Principal):
    """A client as authenticated by one credential.

    ``expires_at`` (Unix seconds) belongs to the token; an API key has none. ``limits`` are the token's, and for those
    it does not set the client's. ``unix_uid`` is the user id by which it was authenticated, if it was.
    """

    expires_at: float | None = None
    limits: AccessLimits = NO_LIMITS
    unix_uid: int | None = None


@dataclass(frozen=True, slots=True)
class StaticClient:
    """A client of ``clients.toml``, with the SHA-256 of its key."""

    account: Account
    key_sha256: bytes


@dataclass(frozen=True, slots=True)
class NewToken:
    """A new token; ``token`` is shown once and not stored."""

    token_id: str
    token: str


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """A stored token; times are Unix seconds, ``limits`` are the token's own."""

    token_id: str
    client_id: str
    name: str
    created_at: float
    expires_at: float | None
    last_used_at: float | None
    revoked: bool
    limits: AccessLimits = NO_LIMITS


@dataclass(frozen=True, slots=True)
class ClientInfo:
    """A stored client; ``created_at`` is Unix seconds, ``tokens`` the number of tokens that are not revoked."""

    client_id: str
    max_sessions: int
    priority: Priority
    scopes: tuple[str, ...]
    retention_days: float | None
    archive_mib: int | None
    created_at: float
    tokens: int
    limits: AccessLimits


def check_client_id(client_id: str) -> None:
    """Validate the id of a new client, which appears in logs, metric labels and on terminals.

    Raises:
        InferenceCenterError: ``invalid_request``.
    """
    if CLIENT_ID.fullmatch(client_id) is None:
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST,
            f"client_id is {client_id[:64]!r}, which is not a valid client id",
            field="client_id",
            hint="Letters, digits and . _ @ + -, beginning with a letter or digit; at most 64.",
        )


def check_max_sessions(number: int) -> None:
    """Validate an account's maximum number of open sessions.

    Raises:
        InferenceCenterError: ``invalid_request``.
    """
    if not 1 <= number <= MAX_SESSIONS:
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST,
            f"max_sessions is {number}, but must be from 1 to {MAX_SESSIONS}",
            field="max_sessions",
        )


def check_retention(days: float | None) -> None:
    """Validate retention days; ``None`` uses the daemon's setting.

    Raises:
        InferenceCenterError: ``invalid_request``.
    """
    if days is not None and not 0 < days <= MAX_RETENTION_DAYS:
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST,
            f"retention_days is {days:g}, but must be above 0 and at most {MAX_RETENTION_DAYS}",
            field="retention_days",
            hint="If not set, sessions.retention_days applies.",
        )


def check_archive(mib: int | None) -> None:
    """Validate the Mi characters that an account may store; ``None`` uses the daemon's setting.

    Raises:
        InferenceCenterError: ``invalid_request``.
    """
    if mib is not None and not 1 <= mib <= MAX_ARCHIVE_MIB:
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST,
            f"archive_mib is {mib}, but must be from 1 to {MAX_ARCHIVE_MIB}",
            field="archive_mib",
            hint="If not set, sessions.archive_mib applies.",
        )

"""Clients, tokens and their limits as rows of the file of accounts; limits are JSON of those that are set."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inferencecenter.limits import Limits
from inferencecenter.server.account import ClientInfo, TokenInfo

if TYPE_CHECKING:
    import sqlite3


def column(limits: Limits) -> str:
    """Return the column ``limits``."""
    return limits.model_dump_json(include=set(limits.given()))


def parse(text: str) -> Limits:
    """Return the limits in a column."""
    return Limits.model_validate_json(text)


def read_all(database: sqlite3.Connection) -> dict[tuple[str, str], Limits]:
    """Return what each token may use, by its client's id and its own; clients by the empty id of a token."""
    clients = {client_id: parse(text) for client_id, text in database.execute("SELECT client_id, limits FROM clients")}
    tokens = database.execute("SELECT client_id, token_id, limits FROM tokens").fetchall()
    found = {(client_id, token_id): parse(text).over(clients[client_id]) for client_id, token_id, text in tokens}
    return found | {(client_id, ""): limits for client_id, limits in clients.items()}


def set_token(database: sqlite3.Connection, token_id: str, limits: Limits) -> str | None:
    """Give a token these limits of its own; return its client's id, ``None`` when there is no such token."""
    changed = database.execute(
        "UPDATE tokens SET limits = ? WHERE token_id = ? RETURNING client_id", (column(limits), token_id)
    ).fetchall()
    return changed[0][0] if changed else None


def set_client(
    database: sqlite3.Connection, client_id: str, limits: Limits, *, max_sessions: int | None = None
) -> bool:
    """Give a client these limits, and another number of sessions if there is one; ``False`` if none has this id."""
    changed = database.execute(
        "UPDATE clients SET limits = ?, max_sessions = coalesce(?, max_sessions) WHERE client_id = ?",
        (column(limits), max_sessions, client_id),
    )
    return changed.rowcount == 1


def client_of(row: tuple[Any, ...]) -> ClientInfo:
    """Return a client in the columns ``client_id`` to ``limits`` and the number of its tokens."""
    client_id, max_sessions, priority, scopes, retention_days, created_at, limits, n_tokens = row
    return ClientInfo(
        client_id=client_id,
        max_sessions=max_sessions,
        priority=priority,
        scopes=tuple(scopes.split()),
        retention_days=retention_days,
        created_at=created_at,
        tokens=n_tokens,
        limits=parse(limits),
    )


def token_of(row: tuple[Any, ...]) -> TokenInfo:
    """Return a token in the columns ``token_id`` to ``last_used_at``, whether it is revoked, and ``limits``."""
    token_id, client_id, name, created_at, expires_at, last_used_at, is_revoked, limits = row
    return TokenInfo(
        token_id=token_id,
        client_id=client_id,
        name=name,
        created_at=created_at,
        expires_at=expires_at,
        last_used_at=last_used_at,
        revoked=bool(is_revoked),
        limits=parse(limits),
    )


def words(limits: Limits) -> str:
    """Return what is set, as people read it: ``tokens_per_day=5000 models=a,b``; empty for nothing."""
    return " ".join(f"{name}={_word(value)}" for name, value in limits.given().items())


def _word(value: object) -> str:
    if value is None:
        return "none"
    return ",".join(value) if isinstance(value, tuple) else str(value)

"""Converts between values and rows. Pure; an invalid row raises ``ValueError``."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import orjson
from pydantic import BaseModel, ConfigDict, TypeAdapter

from inferencecenter.protocol.events import End, Error
from inferencecenter.protocol.params import Params, decode, encode
from inferencecenter.protocol.requests import Infer
from inferencecenter.protocol.values import (
    ChatMessage,
    McpCallStatus,
    Mode,
    OnDisconnect,
    OnFull,
    Priority,
    TranscriptTurn,
)
from inferencecenter.sessions.archive import ArchivedSession
from inferencecenter.sessions.context import SessionConfig
from inferencecenter.sessions.history import HistoryView, TurnCheckpoint
from inferencecenter.sessions.journal import StoredShare
from inferencecenter.sessions.turn import TurnSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inferencecenter.sessions.journal import ShareRecorded

Row: TypeAlias = tuple[Any, ...]

_MESSAGES: Final = TypeAdapter(tuple[ChatMessage, ...])
_TURNS: Final = TypeAdapter(tuple[TranscriptTurn, ...])
_MCP_CALLS: Final = TypeAdapter(tuple[McpCallStatus, ...])
_TOKENS: Final = ("prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens")


class _Facts(BaseModel):
    """The column ``facts``: the settings of a session that are fixed at its start and have no column of their own."""

    model_config = ConfigDict(strict=True, extra="forbid")

    mode: Mode
    chosen_model: str | None = None
    model: str
    n_ctx: int
    params: Params
    chosen: tuple[str, ...]
    priority: Priority
    on_full: OnFull
    on_disconnect: OnDisconnect
    ttl_s: float | None
    metadata: dict[str, str]


SHARE_COLUMNS: Final = "share_id, session_id, client_id, secret_sha256, title, created_at, expires_at, n_messages"


def share_row(share: ShareRecorded) -> Row:
    """Return the columns of a share, with its messages as JSON."""
    return (
        *(share.share_id, share.session_id, share.client_id, share.secret_sha256, share.title),
        *(share.created_at, share.expires_at, share.n_messages),
        _MESSAGES.dump_json(share.messages, exclude_none=True).decode(),
    )


def share_of(row: Row) -> StoredShare:
    """Return a share from ``SHARE_COLUMNS``."""
    share_id, session_id, client_id, secret_sha256, title, created_at, expires_at, n_messages = row
    return StoredShare(
        share_id=share_id,
        session_id=session_id,
        client_id=client_id,
        secret_sha256=secret_sha256,
        title=title,
        created_at=created_at,
        expires_at=expires_at,
        n_messages=n_messages,
    )


def facts_column(config: SessionConfig) -> str:
    values = {name: getattr(config, name) for name in _Facts.model_fields}
    return _Facts(**values | {"chosen": tuple(sorted(config.chosen))}).model_dump_json(exclude_unset=True)


def config_of(column: str, *, session_id: str, client_id: str, epoch: str, created_at: float) -> SessionConfig:
    """Return a session's configuration from the column ``facts`` and its own columns."""
    facts = _Facts.model_validate_json(column)
    return SessionConfig(
        session_id=session_id,
        epoch=epoch,
        client_id=client_id,
        store=True,
        created_at=created_at,
        **vars(facts) | {"chosen": frozenset(facts.chosen)},
    )


def mcp_calls_column(calls: tuple[McpCallStatus, ...]) -> str | None:
    return _MCP_CALLS.dump_json(calls).decode() if calls else None


def mcp_calls_of(column: str | None) -> tuple[McpCallStatus, ...]:
    return () if column is None else _MCP_CALLS.validate_json(column)


def archived_session(row: Sequence[Any]) -> ArchivedSession:
    """Return a session of a listing from its id, the column ``facts``, its sizes, times and idle limit."""
    session_id, facts, n_messages, n_tokens, n_chars, created_at, last_used_at, ttl_s = row
    config = config_of(facts, session_id=session_id, client_id="", epoch="", created_at=created_at)
    return ArchivedSession(
        config=config, n_messages=n_messages, n_tokens=n_tokens, n_chars=n_chars, last_used_at=last_used_at, ttl_s=ttl_s
    )


def messages_of(rows: Sequence[Row]) -> tuple[ChatMessage, ...]:
    """Return the messages of rows of ``message_row``; validated together, which is ten times as fast."""
    return _MESSAGES.validate_python(
        tuple({"role": role, "content": content, **_object(more)} for role, content, more in rows)
    )


def message_row(message: ChatMessage) -> Row:
    """Return the columns ``role``, ``content`` and ``more``."""
    return (message.role, message.content, _more(message))


def _more(message: ChatMessage) -> str | None:
    if all(field is None for field in (message.tool_calls, message.reasoning, message.tool_call_id, message.images)):
        return None
    return message.model_dump_json(exclude={"role", "content"}, exclude_none=True)


def _object(column: str | None) -> dict[str, object]:
    if column is None:
        return {}
    parsed = orjson.loads(column)
    if not isinstance(parsed, dict):
        raise ValueError("not an object")
    return parsed


def turn_row(turn: TranscriptTurn) -> Row:
    """Return the columns from ``turn_id`` to ``completion_tokens``, ``reasoning_tokens`` and ``ended_at``."""
    tokens = (getattr(turn.usage, name) for name in _TOKENS)
    return (turn.turn_id, turn.finish_reason, turn.messages, *tokens, turn.ended_at)


def turns_of(rows: Sequence[Row]) -> tuple[TranscriptTurn, ...]:
    return _TURNS.validate_python(
        tuple(
            {
                "turn_id": turn_id,
                "finish_reason": finish_reason,
                "messages": messages,
                "usage": dict(zip(_TOKENS, tokens, strict=True)),
                "ended_at": ended_at,
            }
            for turn_id, finish_reason, messages, *tokens, ended_at in rows
        )
    )


def event_column(event: End | Error) -> str:
    return event.model_dump_json(exclude_unset=True)


def end_of(column: str) -> End:
    return End.model_validate_json(column)


def error_of(column: str) -> Error:
    return Error.model_validate_json(column)


def mark_row(mark: TurnCheckpoint) -> Row:
    """Return the columns from ``turn_id`` to ``view_resumes_at``."""
    places = (mark.n_before, mark.n_messages, mark.n_tokens, mark.n_chars)
    return (mark.turn_id, *places, mark.view.kept, mark.view.resumes_at)


def mark_of(row: Row) -> TurnCheckpoint:
    turn_id, n_before, n_messages, n_tokens, n_chars, kept, resumes_at = row
    return TurnCheckpoint(turn_id, n_before, n_messages, n_tokens, n_chars, HistoryView(kept, resumes_at))


def order_row(spec: TurnSpec) -> Row:
    """Return the columns of ``orders`` from ``turn_id`` to ``note``."""
    view = spec.view
    return (
        spec.turn_id,
        spec.request.model_dump_json(exclude_unset=True),
        encode(spec.params).decode(),
        spec.rank,
        orjson.dumps(spec.warnings).decode(),
        spec.submitted_at,
        spec.rendered_at,
        spec.model_fingerprint,
        None if view is None else view.kept,
        None if view is None else view.resumes_at,
        spec.model,
        spec.token_id,
        spec.note,
    )


def order_of(row: Row) -> TurnSpec:
    *begin, model_fingerprint, kept, resumes_at, model, token_id, note = row
    turn_id, request, params, rank, warnings, submitted_at, rendered_at = begin
    return TurnSpec(
        turn_id=turn_id,
        request=Infer.model_validate_json(request),
        params=decode(params),
        rank=rank,
        warnings=_texts(orjson.loads(warnings)),
        submitted_at=submitted_at,
        rendered_at=rendered_at,
        model=model,
        model_fingerprint=model_fingerprint,
        view=None if kept is None else HistoryView(kept, resumes_at),
        token_id=token_id,
        note=note,
    )


def _texts(parsed: object) -> tuple[str, ...]:
    if not isinstance(parsed, list) or not all(isinstance(each, str) for each in parsed):
        raise ValueError("not a list of texts")
    return tuple(parsed)


def numbered(rows: Sequence[Row], first: int = 0) -> list[Row]:
    """Return the rows without their numbers, which must count up from ``first``.

    Raises:
        ValueError: One is missing.
    """
    if [row[0] for row in rows] != list(range(first, first + len(rows))):
        raise ValueError("a row is missing")
    return [row[1:] for row in rows]


def utc_day(at: float) -> str:
    """Return the UTC day of a time in Unix seconds, such as 2026-11-21."""
    return datetime.fromtimestamp(at, UTC).date().isoformat()

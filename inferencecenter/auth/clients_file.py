"""``clients.toml``: clients with a fixed id and API key, for programs that cannot be given tokens.

[[client]]
client_id = "kitchen"
api_key_sha256 = "…"     # or api_key = "…"
max_sessions = 4
priority = "normal"
scopes = ["user"]
retention_days = 30      # sessions are deleted so long after their last use
archive_mib = 256        # Mi characters that it may store
limits = {tokens_per_day = 100000, addresses = ["192.168.0.0/16"]}
"""

from __future__ import annotations

import hashlib
import tomllib
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from inferencecenter.auth.account import (
    MAX_ARCHIVE_MIB,
    MAX_RETENTION_DAYS,
    MAX_SESSIONS,
    Account,
    StaticClient,
    check_client_id,
)
from inferencecenter.config.limits import NO_LIMITS, AccessLimits
from inferencecenter.core.errors import ErrorCode, InferenceCenterError, foreign_input
from inferencecenter.protocol.codec import invalid_request
from inferencecenter.protocol.requests import Credential
from inferencecenter.protocol.scopes import Scope, parse_scopes
from inferencecenter.protocol.values import Priority

if TYPE_CHECKING:
    from pathlib import Path

    from inferencecenter.config.sections import AuthSettings


class ClientEntry(BaseModel):
    """One ``[[client]]`` table."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    client_id: Credential
    api_key: Credential | None = None
    api_key_sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F]{64}$")] | None = None
    max_sessions: int | None = Field(default=None, ge=1, le=MAX_SESSIONS)
    priority: Priority | None = None
    retention_days: float | None = Field(default=None, gt=0, le=MAX_RETENTION_DAYS)
    archive_mib: int | None = Field(default=None, ge=1, le=MAX_ARCHIVE_MIB)
    scopes: list[str] = Field(default=[Scope.USER.value], min_length=1)
    limits: AccessLimits = NO_LIMITS

    @model_validator(mode="after")
    def _one_key(self) -> ClientEntry:
        if (self.api_key is None) == (self.api_key_sha256 is None):
            raise ValueError("give either api_key or api_key_sha256")
        return self

    @property
    def key_sha256(self) -> bytes:
        if self.api_key is not None:
            return hashlib.sha256(self.api_key.encode()).digest()
        return bytes.fromhex(self.api_key_sha256 or "")


def load_clients(settings: AuthSettings) -> dict[str, StaticClient]:
    """Return the clients of ``auth.clients_file`` by client id; empty without such a file.

    Raises:
        InferenceCenterError: ``invalid_config`` naming the file, the entry and the field.
    """
    if (path := settings.clients_file) is None:
        return {}
    with foreign_input(partial(_unreadable, path)):
        return _read(path, settings)


def _read(path: Path, defaults: AuthSettings) -> dict[str, StaticClient]:
    clients: dict[str, StaticClient] = {}
    for number, raw in enumerate(_tables(path), start=1):
        where = f"client[{number}]"
        try:
            entry = ClientEntry.model_validate(raw)
            scopes = parse_scopes(entry.scopes)
            check_client_id(entry.client_id)
        except ValidationError as error:
            raise _invalid(path, where, invalid_request(error, known=ClientEntry.model_fields)) from None
        except InferenceCenterError as error:
            raise _invalid(path, where, error) from None
        if entry.client_id in clients:
            raise InferenceCenterError(
                ErrorCode.INVALID_CONFIG,
                f"{path}: {where}: client_id {entry.client_id!r} occurs twice",
                field=f"{where}.client_id",
            )
        account = Account(
            client_id=entry.client_id,
            max_sessions=entry.max_sessions or defaults.default_max_sessions,
            priority=entry.priority or defaults.default_priority,
            scopes=scopes,
            retention_days=entry.retention_days,
            archive_mib=entry.archive_mib,
            limits=entry.limits,
        )
        clients[entry.client_id] = StaticClient(account=account, key_sha256=entry.key_sha256)
    return clients


def _tables(path: Path) -> list[Any]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InferenceCenterError(
            ErrorCode.INVALID_CONFIG,
            f"{path} cannot be read: {error.strerror}",
            hint="auth.clients_file names this file; it must exist and be readable.",
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InferenceCenterError(ErrorCode.INVALID_CONFIG, f"{path} is not TOML: {error}") from error
    tables = document.pop("client", [])
    if document or not isinstance(tables, list):
        raise InferenceCenterError(
            ErrorCode.INVALID_CONFIG,
            f"{path}: unknown key {next(iter(document))!r}" if document else f"{path}: client is not a list of tables",
            hint="The file may contain only [[client]] tables.",
        )
    return tables


def _unreadable(path: Path, reason: str) -> InferenceCenterError:
    return InferenceCenterError(
        ErrorCode.INVALID_CONFIG,
        f"{path} cannot be parsed: {reason}",
        hint="The file may contain only [[client]] tables.",
    )


def _invalid(path: Path, where: str, error: InferenceCenterError) -> InferenceCenterError:
    field = f"{where}.{error.field}" if error.field else where
    return InferenceCenterError(
        ErrorCode.INVALID_CONFIG, f"{path}: {where}: {error.message}", hint=error.hint, field=field
    )

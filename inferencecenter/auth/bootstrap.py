"""First start: creates an administrator, with its token in a file that only the owner can read."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from inferencecenter.auth.accounts_db import unusable
from inferencecenter.auth.audit import AuditEvent
from inferencecenter.protocol.scopes import Scope

if TYPE_CHECKING:
    from pathlib import Path

    from inferencecenter.auth.accounts import Accounts

ADMIN_CLIENT: Final = "admin"
ADMIN_TOKEN_NAME: Final = "admin.token"  # noqa: S105 - a file's name
_ADMIN_MAX_SESSIONS: Final = 100


def ensure_admin(accounts: Accounts, state_dir: Path) -> str | None:
    """Create the client ``admin`` with every scope if there is no client at all.

    Its token is written to ``admin.token`` (mode 0600) in ``state_dir``.

    Returns:
        The token, to be shown this once; ``None`` when there were clients already.

    Raises:
        InferenceCenterError: ``storage_unavailable``; then no client was created.
    """
    if accounts.has_clients():
        return None
    accounts.ensure_client(ADMIN_CLIENT, max_sessions=_ADMIN_MAX_SESSIONS, priority="normal", scopes=Scope)
    new = accounts.create_token(ADMIN_CLIENT, name="first run")
    path = state_dir / ADMIN_TOKEN_NAME
    try:
        _write_private(path, new.token + "\n")
    except OSError as error:
        accounts.remove_client(ADMIN_CLIENT)
        raise unusable(path, error.strerror or str(error)) from error
    accounts.audit(AuditEvent.FIRST_ADMIN, client_id=ADMIN_CLIENT, token_id=new.token_id)
    return new.token


def _write_private(path: Path, text: str) -> None:
    """Replace ``path`` atomically by a file that other users can never read."""
    unfinished = path.with_name(path.name + ".new")
    unfinished.unlink(missing_ok=True)
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)

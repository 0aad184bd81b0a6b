"""First start: creates an administrator, with its token in a file that only the owner can read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from inferencecenter.auth.accounts_db import unusable
from inferencecenter.auth.audit import AuditEvent
from inferencecenter.core.private_file import write_private
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
        write_private(path, f"{new.token}\n".encode("ascii"))
    except OSError as error:
        accounts.remove_client(ADMIN_CLIENT)
        raise unusable(path, error.strerror or str(error)) from error
    accounts.audit(AuditEvent.FIRST_ADMIN, client_id=ADMIN_CLIENT, token_id=new.token_id)
    return new.token

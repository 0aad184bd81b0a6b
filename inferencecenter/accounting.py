"""What clients used, as the file of sessions has it, and who else knows clients."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import structlog

from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.server.context import no_usage
from inferencecenter.sessions.journal import RETRY_LATER_MS
from inferencecenter.sessions.store.archive import Archive
from inferencecenter.sessions.store.recorder import utc_day
from inferencecenter.sessions.store.schema import DATABASE_NAME

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inferencecenter.auth.authentication import ExternalAuthProvider
    from inferencecenter.config.settings import Settings
    from inferencecenter.server.context import UsageReader
    from inferencecenter.sessions.store.archive import UsageLine

_log = structlog.get_logger(__name__)


def used_today(settings: Settings) -> dict[tuple[str, str], int]:
    """Return the tokens that limits count, used since midnight UTC, by client and token; none if nobody can tell."""
    path, today = settings.state_dir / DATABASE_NAME, utc_day(time.time())
    try:
        with Archive.open(path) as archive:
            lines = archive.usage_by_token(since=today)
    except InferenceCenterError as error:
        _log.warning("usage_unreadable", error=error.message, hint=error.hint)
        return {}
    return {(line.client_id, line.token_id or ""): line.counted_tokens for line in lines if line.day == today}


def usage_reader(settings: Settings) -> UsageReader:
    """Return what reads a client's usage from a day on; nothing is kept where sessions are not."""
    if not settings.sessions.store:
        return no_usage

    def read(client_id: str, since: str) -> Sequence[UsageLine]:
        try:
            with Archive.open(settings.state_dir / DATABASE_NAME) as archive:
                return archive.usage(client_id, since=since)
        except InferenceCenterError as error:
            # Clients are told neither the path nor what SQLite says.
            _log.warning("usage_unreadable", error=error.message, hint=error.hint)
            raise InferenceCenterError(
                ErrorCode.STORAGE_UNAVAILABLE,
                "usage cannot be read at the moment",
                hint="Try again when the operator has mended it.",
                retry_after_ms=RETRY_LATER_MS,
            ) from None

    return read


def other_accounts(settings: Settings) -> ExternalAuthProvider | None:
    """Return another program that knows clients, if there is one; call it on the event loop.

    Raises:
        InferenceCenterError: ``invalid_config`` for a file that cannot be used.
    """
    if settings.external_auth.url is None:
        return None
    # What speaks HTTP takes a tenth of a second to import, which most daemons need not.
    from inferencecenter.auth.external import ExternalAuth  # noqa: PLC0415

    return ExternalAuth(
        settings.external_auth,
        default_max_sessions=settings.auth.default_max_sessions,
        default_priority=settings.auth.default_priority,
        clock=time.monotonic,
    )

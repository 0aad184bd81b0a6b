"""What goes wrong between a client and its daemon, as exceptions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inferencecenter.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from inferencecenter.protocol.events import Error


class SessionTakenOverError(InferenceCenterError):
    """Another connection of the same client has resumed the session; its events go there now."""

    def __init__(self, session_id: str) -> None:
        super().__init__(
            ErrorCode.SESSION_BUSY,
            f"session {session_id} was taken over by another connection",
            hint="Resume it to have its events here again.",
        )


def as_exception(event: Error) -> InferenceCenterError:
    """Return what the daemon said is wrong; a code of a later version is ``internal``."""
    code = ErrorCode(event.code) if event.code in set(ErrorCode) else ErrorCode.INTERNAL
    return InferenceCenterError(
        code, event.message, hint=event.hint, field=event.field, retry_after_ms=event.retry_after_ms
    )


def unreachable(url: str, why: str, *, retry_after_ms: int | None = None) -> InferenceCenterError:
    """Return that nobody, or somebody else, answers at an address."""
    return InferenceCenterError(
        ErrorCode.DAEMON_UNREACHABLE,
        f"no daemon answers at {url}: {why}",
        hint="Start one with `inferencecenter serve`, or name another with --url.",
        retry_after_ms=retry_after_ms,
    )


def outcome_unknown(op: str) -> InferenceCenterError:
    """Return that a request was cut off from its answer, and may have been done or not."""
    return InferenceCenterError(
        ErrorCode.DAEMON_UNREACHABLE,
        f"the connection was lost before {op} was answered: it may have been done or not",
        hint="Look at the session before trying again.",
    )

"""Errors of the client as exceptions: one class for each reaction that a caller may have.

::

    InferenceCenterError
    ├── TryLaterError          repeat the request, not before ``retry_after_ms``
    ├── UnreachableError       check the address, the network and the daemon
    ├── RequestError           correct the request
    │   └── TooLongError       shorten the input, or use a session with a shorter history
    ├── NotFoundError          create the object, or name an existing one
    ├── NotAllowedError        use another token, or have the scope or quota granted
    ├── DaemonError            report to the operator; the daemon's log has the details
    └── SessionTakenOverError  another connection has resumed the session
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeVar, get_args

from pydantic import ValidationError

from inferencecenter.core.errors import ERRORS, ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inferencecenter.protocol.base import Request
    from inferencecenter.protocol.events import Error

R = TypeVar("R", bound="Request")


class TryLaterError(InferenceCenterError):
    """A temporary failure; the same request may succeed later, not before ``retry_after_ms`` if that is known."""


class UnreachableError(InferenceCenterError):
    """The daemon is unreachable, or the connection has ended for good."""


class RequestError(InferenceCenterError):
    """The request is invalid; ``field`` names the offending part if there is one."""


class TooLongError(RequestError):
    """The request exceeds the context or the maximum frame size."""


class NotFoundError(InferenceCenterError):
    """The named object does not exist, or no longer exists."""


class NotAllowedError(InferenceCenterError):
    """The token is invalid, lacks the scope, or has used up its quota."""


class DaemonError(InferenceCenterError):
    """An internal failure of the daemon."""


class SessionTakenOverError(InferenceCenterError):
    """Another connection of the same client has resumed the session and now receives its events."""

    def __init__(self, session_id: str) -> None:
        super().__init__(
            ErrorCode.SESSION_BUSY,
            f"session {session_id} was taken over by another connection",
            hint="Resume it to receive its events here again.",
        )


_TOO_LONG: Final = frozenset({ErrorCode.PROMPT_TOO_LONG, ErrorCode.CONTEXT_FULL, ErrorCode.MESSAGE_TOO_LARGE})
_UNREACHABLE: Final = frozenset({ErrorCode.DAEMON_UNREACHABLE, ErrorCode.HUB_UNREACHABLE})
# Only codes that are not retryable; the table's exit codes are those of sysexits(3), and of guests.
_BY_EXIT_CODE: Final[Mapping[int, type[InferenceCenterError]]] = MappingProxyType(
    {
        64: RequestError,
        65: RequestError,
        66: NotFoundError,
        69: DaemonError,
        70: DaemonError,
        75: NotAllowedError,
        77: NotAllowedError,
        78: DaemonError,
        124: RequestError,
        134: RequestError,
        137: RequestError,
        152: RequestError,
    }
)


def error_class(code: ErrorCode) -> type[InferenceCenterError]:
    """Return the exception class for a code of the error table."""
    spec = ERRORS[code]
    if code in _UNREACHABLE:
        return UnreachableError
    if spec.retryable:
        return TryLaterError
    return TooLongError if code in _TOO_LONG else _BY_EXIT_CODE[spec.exit_code]


def failure(
    code: ErrorCode,
    message: str = "",
    *,
    hint: str | None = None,
    field: str | None = None,
    retry_after_ms: int | None = None,
) -> InferenceCenterError:
    """Return an error of the class for its code; the arguments are those of ``InferenceCenterError``."""
    return error_class(code)(code, message, hint=hint, field=field, retry_after_ms=retry_after_ms)


def as_exception(event: Error) -> InferenceCenterError:
    """Return an ``error`` event as an exception; an unknown code of a later version becomes ``internal``."""
    code = ErrorCode(event.code) if event.code in set(ErrorCode) else ErrorCode.INTERNAL
    return failure(code, event.message, hint=event.hint, field=event.field, retry_after_ms=event.retry_after_ms)


def new_request(kind: type[R], **fields: Any) -> R:
    """Return a validated request with these fields.

    Raises:
        RequestError: A field is unknown, or its value is invalid.
    """
    (op,) = get_args(kind.model_fields["op"].annotation)
    try:
        return kind(op=op, **fields)
    except ValidationError as error:
        # Imported on failure only: the daemon's half of the codec is otherwise not needed.
        from inferencecenter.protocol.codec import invalid_request  # noqa: PLC0415

        wrong = invalid_request(error, known=kind.model_fields)
    raise failure(wrong.code, wrong.message, hint=wrong.hint, field=wrong.field)


def unreachable(url: str, why: str, *, retry_after_ms: int | None = None) -> InferenceCenterError:
    """Return the error for an address at which no InferenceCenter daemon answers."""
    return failure(
        ErrorCode.DAEMON_UNREACHABLE,
        f"no daemon answers at {url}: {why}",
        hint="Start one with `inferencecenter serve`, or name another with --url.",
        retry_after_ms=retry_after_ms,
    )


def outcome_unknown(op: str) -> InferenceCenterError:
    """Return the error for a request whose reply was lost, so that its outcome is unknown."""
    return failure(
        ErrorCode.DAEMON_UNREACHABLE,
        f"the connection was lost before {op} was answered: its outcome is unknown",
        hint="Read the session before you try again.",
    )

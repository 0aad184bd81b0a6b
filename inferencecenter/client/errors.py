"""What goes wrong between a client and its daemon, as exceptions: a class for each thing that a caller may do about it.

::

    InferenceCenterError
    ├── TryLaterError          ask the same again, not before ``retry_after_ms``
    ├── UnreachableError       look at the address, the network and the daemon
    ├── RequestError           ask differently
    │   └── TooLongError       say less, or go on in a session that holds less
    ├── NotFoundError          it is gone, or never was: make it, or name another
    ├── NotAllowedError        show another token, or have somebody allow it
    ├── DaemonError            tell whoever runs the daemon: its log says more
    └── SessionTakenOverError  another connection has the session now
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeVar, get_args

from pydantic import ValidationError

from inferencecenter.core.errors import ERRORS, ErrorCode, InferenceCenterError
from inferencecenter.protocol.codec import invalid_request

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inferencecenter.protocol.base import Request
    from inferencecenter.protocol.events import Error

R = TypeVar("R", bound="Request")


class TryLaterError(InferenceCenterError):
    """The daemon cannot do it now; the same may succeed later, not before ``retry_after_ms`` where that is known."""


class UnreachableError(InferenceCenterError):
    """No daemon answers, or the connection is over for good."""


class RequestError(InferenceCenterError):
    """What was asked makes no sense to the daemon; ``field`` names the offending part where there is one."""


class TooLongError(RequestError):
    """What was asked does not fit: the context, or a frame."""


class NotFoundError(InferenceCenterError):
    """What was named does not exist, or not any more."""


class NotAllowedError(InferenceCenterError):
    """The token is wrong, lacks the scope, or has used up its quota."""


class DaemonError(InferenceCenterError):
    """Something broke in the daemon."""


class SessionTakenOverError(InferenceCenterError):
    """Another connection of the same client has resumed the session; its events go there now."""

    def __init__(self, session_id: str) -> None:
        super().__init__(
            ErrorCode.SESSION_BUSY,
            f"session {session_id} was taken over by another connection",
            hint="Resume it to have its events here again.",
        )


_TOO_LONG: Final = frozenset({ErrorCode.PROMPT_TOO_LONG, ErrorCode.CONTEXT_FULL, ErrorCode.MESSAGE_TOO_LARGE})
_UNREACHABLE: Final = frozenset({ErrorCode.DAEMON_UNREACHABLE, ErrorCode.HUB_UNREACHABLE})
# Of those that are not retryable; the table's exit codes are those of sysexits(3).
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
    }
)


def error_class(code: ErrorCode) -> type[InferenceCenterError]:
    """Return the class of a row of the error table."""
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
    """Return an error of the class that its code has; arguments are those of ``InferenceCenterError``."""
    return error_class(code)(code, message, hint=hint, field=field, retry_after_ms=retry_after_ms)


def as_exception(event: Error) -> InferenceCenterError:
    """Return what the daemon said is wrong; a code of a later version is ``internal``."""
    code = ErrorCode(event.code) if event.code in set(ErrorCode) else ErrorCode.INTERNAL
    return failure(code, event.message, hint=event.hint, field=event.field, retry_after_ms=event.retry_after_ms)


def made(kind: type[R], **fields: Any) -> R:
    """Return a request with these fields.

    Raises:
        RequestError: One is unknown, or its value is not allowed.
    """
    (op,) = get_args(kind.model_fields["op"].annotation)
    try:
        return kind(op=op, **fields)
    except ValidationError as error:
        wrong = invalid_request(error, known=kind.model_fields)
    raise failure(wrong.code, wrong.message, hint=wrong.hint, field=wrong.field)


def unreachable(url: str, why: str, *, retry_after_ms: int | None = None) -> InferenceCenterError:
    """Return that nobody, or somebody else, answers at an address."""
    return failure(
        ErrorCode.DAEMON_UNREACHABLE,
        f"no daemon answers at {url}: {why}",
        hint="Start one with `inferencecenter serve`, or name another with --url.",
        retry_after_ms=retry_after_ms,
    )


def outcome_unknown(op: str) -> InferenceCenterError:
    """Return that a request was cut off from its answer, and may have been done or not."""
    return failure(
        ErrorCode.DAEMON_UNREACHABLE,
        f"the connection was lost before {op} was answered: it may have been done or not",
        hint="Look at the session before trying again.",
    )

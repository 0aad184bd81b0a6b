"""The error table: every failure that a client, an HTTP caller or a shell script can get.

Wire frames, HTTP responses, close codes, CLI exit codes, metric labels and ``docs/errors.md`` derive from ``ERRORS``.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_MAX_REASON_CHARS: Final = 200


class ErrorCode(StrEnum):
    """Stable error codes; clients may branch on them."""

    INVALID_JSON = "invalid_json"
    INVALID_REQUEST = "invalid_request"
    UNKNOWN_OP = "unknown_op"
    NOT_AUTHENTICATED = "not_authenticated"
    FORBIDDEN = "forbidden"
    SESSION_NOT_FOUND = "session_not_found"
    SESSION_LIMIT = "session_limit"
    SESSION_BUSY = "session_busy"
    NOTHING_TO_ABORT = "nothing_to_abort"
    TURN_NOT_FOUND = "turn_not_found"
    SHARE_NOT_FOUND = "share_not_found"
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    OVERLOADED = "overloaded"
    RATE_LIMITED = "rate_limited"
    QUOTA_EXCEEDED = "quota_exceeded"
    PROMPT_TOO_LONG = "prompt_too_long"
    CONTEXT_FULL = "context_full"
    INVALID_GRAMMAR = "invalid_grammar"
    MODEL_NOT_FOUND = "model_not_found"
    MODEL_LOADING = "model_loading"
    ENGINE_UNAVAILABLE = "engine_unavailable"
    ENGINE_CRASHED = "engine_crashed"
    STORAGE_UNAVAILABLE = "storage_unavailable"
    MESSAGE_TOO_LARGE = "message_too_large"
    INTERNAL = "internal"
    # HTTP only, never sent over a socket.
    METHOD_NOT_ALLOWED = "method_not_allowed"
    REQUEST_TIMEOUT = "request_timeout"
    # Responses API only, over HTTP and its own sockets.
    PREVIOUS_RESPONSE_NOT_FOUND = "previous_response_not_found"
    CONNECTION_LIMIT = "websocket_connection_limit_reached"
    STREAM_LIMIT = "websocket_stream_limit_reached"
    # Daemon start and command line only, never sent over a socket.
    INVALID_CONFIG = "invalid_config"
    INVALID_MODEL_FILE = "invalid_model_file"
    ADDRESS_IN_USE = "address_in_use"
    DAEMON_UNREACHABLE = "daemon_unreachable"
    HUB_UNREACHABLE = "hub_unreachable"
    INVALID_GUEST = "invalid_guest"
    GUEST_TRAPPED = "guest_trapped"
    GUEST_TIMEOUT = "guest_timeout"
    GUEST_OUT_OF_FUEL = "guest_out_of_fuel"
    GUEST_OUT_OF_MEMORY = "guest_out_of_memory"


@dataclass(frozen=True, slots=True)
class ErrorSpec:
    """A row of the error table: the meaning of a code and its form in each interface.

    ``retry_after_ms`` is the default where the failing code gives none. ``on_wire`` codes are sent over sockets,
    ``on_http`` codes over HTTP; codes with neither occur on the command line only.
    """

    code: ErrorCode
    message: str
    http_status: int
    exit_code: int
    retryable: bool = False
    retry_after_ms: int | None = None
    close_code: int | None = None
    on_wire: bool = True
    on_http: bool = True


# Exit codes follow sysexits(3): 64 usage, 65 data, 66 input missing, 69 unavailable, 70 software,
# 73 cannot create, 75 try again later, 77 permission, 78 configuration. Those of WebAssembly guests are what a shell
# reports of a native program: 124 of timeout(1), 128 + SIGABRT, SIGKILL and SIGXCPU.
_ROWS = (
    ErrorSpec(ErrorCode.INVALID_JSON, "The frame is not a JSON object.", 400, 65),
    ErrorSpec(ErrorCode.INVALID_REQUEST, "A field is missing, unknown or out of range.", 400, 64),
    ErrorSpec(ErrorCode.UNKNOWN_OP, "This op does not exist.", 404, 64),
    ErrorSpec(ErrorCode.NOT_AUTHENTICATED, "Authenticate first.", 401, 77, close_code=4401),
    ErrorSpec(ErrorCode.FORBIDDEN, "This token lacks the scope for that.", 403, 77),
    ErrorSpec(ErrorCode.SESSION_NOT_FOUND, "No such session.", 404, 66),
    ErrorSpec(ErrorCode.SESSION_LIMIT, "The client has too many sessions.", 429, 75, retryable=True),
    ErrorSpec(ErrorCode.SESSION_BUSY, "The session is already generating.", 409, 75, retryable=True),
    ErrorSpec(ErrorCode.NOTHING_TO_ABORT, "No turn is running in this session.", 409, 66),
    ErrorSpec(ErrorCode.TURN_NOT_FOUND, "No such turn.", 404, 66),
    ErrorSpec(ErrorCode.SHARE_NOT_FOUND, "No such share link, or it has ended.", 404, 66),
    ErrorSpec(ErrorCode.QUEUE_FULL, "Too many turns are waiting.", 503, 75, retryable=True, retry_after_ms=1000),
    ErrorSpec(
        ErrorCode.QUEUE_TIMEOUT, "The turn waited too long for a slot.", 503, 75, retryable=True, retry_after_ms=1000
    ),
    ErrorSpec(ErrorCode.OVERLOADED, "Memory is short.", 503, 75, retryable=True, retry_after_ms=5000),
    ErrorSpec(ErrorCode.RATE_LIMITED, "Too many requests.", 429, 75, retryable=True, close_code=4429),
    ErrorSpec(ErrorCode.QUOTA_EXCEEDED, "The token's quota is used up.", 429, 75),
    ErrorSpec(ErrorCode.PROMPT_TOO_LONG, "The prompt does not fit the context.", 413, 65),
    ErrorSpec(ErrorCode.CONTEXT_FULL, "The session's context is full.", 409, 65),
    ErrorSpec(ErrorCode.INVALID_GRAMMAR, "The grammar cannot be compiled.", 400, 65),
    ErrorSpec(ErrorCode.MODEL_NOT_FOUND, "No such model.", 404, 66),
    ErrorSpec(ErrorCode.MODEL_LOADING, "The model is still loading.", 503, 75, retryable=True),
    ErrorSpec(ErrorCode.ENGINE_UNAVAILABLE, "The engine is not running.", 503, 69, retryable=True),
    ErrorSpec(ErrorCode.ENGINE_CRASHED, "This turn ends the engine, also when it runs alone.", 500, 69),
    ErrorSpec(ErrorCode.STORAGE_UNAVAILABLE, "The state directory is not usable.", 503, 73, retryable=True),
    ErrorSpec(ErrorCode.MESSAGE_TOO_LARGE, "The frame is larger than allowed.", 413, 65, close_code=1009),
    ErrorSpec(ErrorCode.INTERNAL, "An internal error; the log has the details.", 500, 70, close_code=1011),
    ErrorSpec(ErrorCode.METHOD_NOT_ALLOWED, "This address does not take that method.", 405, 64, on_wire=False),
    ErrorSpec(
        ErrorCode.REQUEST_TIMEOUT, "The request took too long to arrive.", 408, 75, retryable=True, on_wire=False
    ),
    ErrorSpec(ErrorCode.PREVIOUS_RESPONSE_NOT_FOUND, "No such previous response.", 400, 66, on_wire=False),
    ErrorSpec(
        ErrorCode.CONNECTION_LIMIT, "The client has too many connections.", 429, 75, retryable=True, on_wire=False
    ),
    ErrorSpec(
        ErrorCode.STREAM_LIMIT, "Too many responses run or wait on this socket.", 429, 75, retryable=True, on_wire=False
    ),
    ErrorSpec(ErrorCode.INVALID_CONFIG, "The configuration is not valid.", 500, 78, on_wire=False, on_http=False),
    ErrorSpec(ErrorCode.INVALID_MODEL_FILE, "The model file cannot be loaded.", 500, 66, on_wire=False),
    ErrorSpec(ErrorCode.ADDRESS_IN_USE, "The address is in use.", 500, 69, on_wire=False, on_http=False),
    ErrorSpec(
        ErrorCode.DAEMON_UNREACHABLE, "No daemon answers there.", 503, 69, retryable=True, on_wire=False, on_http=False
    ),
    ErrorSpec(ErrorCode.HUB_UNREACHABLE, "No hub of models answers.", 503, 69, retryable=True, on_wire=False),
    ErrorSpec(
        ErrorCode.INVALID_GUEST, "The file is not a guest that can be run.", 500, 65, on_wire=False, on_http=False
    ),
    ErrorSpec(ErrorCode.GUEST_TRAPPED, "The guest trapped.", 500, 134, on_wire=False, on_http=False),
    ErrorSpec(ErrorCode.GUEST_TIMEOUT, "The guest ran for too long.", 500, 124, on_wire=False, on_http=False),
    ErrorSpec(ErrorCode.GUEST_OUT_OF_FUEL, "The guest used up its fuel.", 500, 152, on_wire=False, on_http=False),
    ErrorSpec(ErrorCode.GUEST_OUT_OF_MEMORY, "The guest ran out of memory.", 500, 137, on_wire=False, on_http=False),
)

ERRORS: Mapping[ErrorCode, ErrorSpec] = MappingProxyType({row.code: row for row in _ROWS})


class InferenceCenterError(Exception):
    """A failure with a code from the table, and a hint.

    Args:
        code: Row of ``ERRORS``.
        message: What is wrong; the row's message if empty.
        hint: What to do about it.
        field: Path of the offending field, such as ``params.temperature``.
        retry_after_ms: Earliest useful retry, for retryable codes; the row's default if not given.
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str = "",
        *,
        hint: str | None = None,
        field: str | None = None,
        retry_after_ms: int | None = None,
    ) -> None:
        super().__init__(message or ERRORS[code].message)
        self.code = code
        self.hint = hint
        self.field = field
        self.retry_after_ms = ERRORS[code].retry_after_ms if retry_after_ms is None else retry_after_ms

    @property
    def message(self) -> str:
        return str(self)

    @property
    def spec(self) -> ErrorSpec:
        """The table row of this error's code."""
        return ERRORS[self.code]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.code.value}, {self.message!r}, field={self.field!r})"


def prompt_too_long(n_tokens: str, *, n_ctx: int) -> InferenceCenterError:
    """Return the error of a prompt that does not fit; OpenAI's clients recognize the first sentence.

    Args:
        n_tokens: The prompt's tokens in words, such as ``5000 tokens``.
        n_ctx: Maximum tokens of prompt and answer.
    """
    return InferenceCenterError(
        ErrorCode.PROMPT_TOO_LONG,
        f"This model's maximum context length is {n_ctx} tokens. However, the prompt has {n_tokens}, and the answer "
        "needs room too.",
        hint="Shorten the prompt, start a new session, or serve the model with a larger n_ctx.",
    )


@contextmanager
def foreign_input(refuse: Callable[[str], Exception], *, own: type[Exception] = InferenceCenterError) -> Iterator[None]:
    """Convert any exception of the block, which processes untrusted input, to one of our errors.

    Parsers of files, responses and devices may raise undocumented exceptions on hostile input, such as RecursionError,
    OverflowError and MemoryError.

    Args:
        refuse: Makes the error from the exception's name and text, truncated to one short line.
        own: Errors that pass unchanged.
    """
    try:
        yield
    except own:
        raise
    except Exception as error:
        raise refuse(reason_of(error)) from error


def reason_of(error: Exception) -> str:
    """Return an exception as one short line, whatever its text contains."""
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    line = ascii(reason)[1:-1]
    return line if len(line) <= _MAX_REASON_CHARS else f"{line[:_MAX_REASON_CHARS]}..."

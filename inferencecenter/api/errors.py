"""The error table in the words of OpenAI's HTTP interface. Pure."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import orjson

from inferencecenter.core.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import Mapping

CODES: Final[Mapping[ErrorCode, str]] = MappingProxyType(
    {
        ErrorCode.NOT_AUTHENTICATED: "invalid_api_key",
        ErrorCode.PROMPT_TOO_LONG: "context_length_exceeded",
        ErrorCode.CONTEXT_FULL: "context_length_exceeded",
        ErrorCode.RATE_LIMITED: "rate_limit_exceeded",
        ErrorCode.QUOTA_EXCEEDED: "insufficient_quota",
    }
)
"""Where OpenAI has a code that programs branch on; all others are the table's own."""

TYPES: Final[Mapping[int, str]] = MappingProxyType(
    {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        429: "rate_limit_error",
    }
)
"""The ``type`` of a failure by its HTTP status; other failures of the caller's are ``invalid_request_error``."""


def type_of(status: int) -> str:
    """Return OpenAI's ``type`` for an HTTP status."""
    return "server_error" if status >= 500 else TYPES.get(status, "invalid_request_error")


def error_object(error: InferenceCenterError) -> dict[str, Any]:
    """Return a failure as OpenAI's error object: ``message``, ``type``, ``param`` and ``code``.

    The message ends with the hint, for which there is no field.
    """
    message = error.message if error.hint is None else f"{error.message.rstrip('.')}. {error.hint}"
    return {
        "message": message,
        "type": type_of(error.spec.http_status),
        "param": error.field,
        "code": CODES.get(error.code, error.code.value),
    }


def error_body(error: InferenceCenterError) -> bytes:
    """Return the JSON body that tells of a failure; also the data of a stream's last event, when it fails midway."""
    return orjson.dumps({"error": error_object(error)})


def error_headers(error: InferenceCenterError) -> dict[str, str]:
    """Return the headers that go with a failure; OpenAI's own client asks ``x-should-retry`` whether to try again."""
    headers = {"x-should-retry": "true" if error.spec.retryable else "false"}
    if error.code is ErrorCode.NOT_AUTHENTICATED:
        headers["www-authenticate"] = "Bearer"
    if error.retry_after_ms is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after_ms / 1000))
        headers["retry-after-ms"] = str(error.retry_after_ms)
    return headers

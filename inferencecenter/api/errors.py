"""The error table in OpenAI's format, and what an API with another format replaces. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import orjson
from pydantic import BaseModel, Field

from inferencecenter.api import sse
from inferencecenter.core.errors import ERRORS, ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

CODES: Final[Mapping[ErrorCode, str]] = MappingProxyType(
    {
        ErrorCode.NOT_AUTHENTICATED: "invalid_api_key",
        ErrorCode.PROMPT_TOO_LONG: "context_length_exceeded",
        ErrorCode.CONTEXT_FULL: "context_length_exceeded",
        ErrorCode.RATE_LIMITED: "rate_limit_exceeded",
        ErrorCode.QUOTA_EXCEEDED: "insufficient_quota",
    }
)
"""Codes of OpenAI that programs depend on; all other codes are those of the table."""

STATUSES: Final[Mapping[ErrorCode, int]] = MappingProxyType(
    {ErrorCode.PROMPT_TOO_LONG: 400, ErrorCode.CONTEXT_FULL: 400}
)
"""HTTP statuses by which OpenAI's clients choose the class of an error; all others are those of the table."""

TYPES: Final[Mapping[int, str]] = MappingProxyType(
    {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        429: "rate_limit_error",
    }
)
"""Error ``type`` by HTTP status; other client errors are ``invalid_request_error``."""


def type_of(status: int) -> str:
    """Return OpenAI's error ``type`` of an HTTP status."""
    return "server_error" if status >= 500 else TYPES.get(status, "invalid_request_error")


def error_object(error: InferenceCenterError) -> dict[str, Any]:
    """Convert an error to OpenAI's error object: ``message``, ``type``, ``param`` and ``code``.

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
    """Return the JSON body of an error response; also the data of the last event of a failed stream."""
    return orjson.dumps({"error": error_object(error)})


def error_headers(error: InferenceCenterError) -> dict[str, str]:
    """Return the headers of an error response; OpenAI's client library reads ``x-should-retry``."""
    headers = {"x-should-retry": "true" if error.spec.retryable else "false"}
    if error.code is ErrorCode.NOT_AUTHENTICATED:
        headers["www-authenticate"] = "Bearer"
    if error.retry_after_ms is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after_ms / 1000))
        headers["retry-after-ms"] = str(error.retry_after_ms)
    return headers


class ErrorDetail(BaseModel, defer_build=True):
    """An error, in OpenAI's format."""

    message: str = Field(description="What is wrong, and what to do about it.")
    type: str = Field(
        description="Whose fault it is.",
        json_schema_extra={"enum": [*sorted({"server_error", "invalid_request_error", *TYPES.values()})]},
    )
    param: str | None = Field(description="Path of the offending field.")
    code: str = Field(
        description="A code of the error table, or OpenAI's equivalent.",
        json_schema_extra={
            "enum": [*sorted({CODES.get(code, code.value) for code in ErrorCode if ERRORS[code].on_http})]
        },
    )


class ErrorAnswer(BaseModel, defer_build=True):
    """An error response."""

    error: ErrorDetail


def status_of(error: InferenceCenterError) -> int:
    return error.spec.http_status


def openai_status(error: InferenceCenterError) -> int:
    return STATUSES.get(error.code, error.spec.http_status)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorFormat:
    """How one API writes errors.

    Attributes:
        answer: Model of the JSON body.
        body: Returns the JSON body.
        status: Returns the HTTP status.
        last: Returns what ends a failed stream, given the body.
    """

    answer: type[BaseModel] = ErrorAnswer
    body: Callable[[InferenceCenterError], bytes] = error_body
    status: Callable[[InferenceCenterError], int] = status_of
    last: Callable[[bytes], bytes] = sse.event


OWN_ERRORS: Final = ErrorFormat()
"""Errors of the daemon's own endpoints: OpenAI's format with the statuses of the table."""
OPENAI_ERRORS: Final = ErrorFormat(status=openai_status)

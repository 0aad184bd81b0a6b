"""Addresses that there are not, where programs look for OpenAI's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from starlette.responses import Response

from inferencecenter.dialects.errors import error_body, error_headers
from inferencecenter.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from starlette.requests import Request

PATTERN: Final = "/v1/{rest:path}"
_SHOWN_CHARS: Final = 100


async def nowhere(request: Request) -> Response:
    """Say in OpenAI's words that there is nothing here."""
    error = InferenceCenterError(
        ErrorCode.UNKNOWN_OP,
        f"there is nothing at {request.url.path[:_SHOWN_CHARS]}",
        hint="/openapi.json lists what there is.",
    )
    return Response(
        error_body(error),
        status_code=error.spec.http_status,
        headers=error_headers(error),
        media_type="application/json",
    )

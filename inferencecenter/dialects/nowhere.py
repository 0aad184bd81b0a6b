"""Addresses that there are not, where programs look for OpenAI's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from starlette.responses import Response
from starlette.routing import BaseRoute, Match, NoMatchFound

from inferencecenter.dialects.errors import error_body, error_headers
from inferencecenter.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from typing import Any

    from starlette.datastructures import URLPath
    from starlette.types import Receive, Scope, Send

_SHOWN_CHARS: Final = 100


class Nowhere(BaseRoute):
    """A route for all of ``prefix`` that none before it takes; a pattern would leave out addresses with line breaks."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Take any HTTP request below the prefix."""
        below = scope["type"] == "http" and scope["path"].startswith(self._prefix)
        return (Match.FULL if below else Match.NONE), {}

    def url_path_for(self, name: str, /, **_: Any) -> URLPath:
        """There is nowhere to go."""
        raise NoMatchFound(name, {})

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Say in OpenAI's words that there is nothing here."""
        error = InferenceCenterError(
            ErrorCode.UNKNOWN_OP,
            f"there is nothing at {scope['path'][:_SHOWN_CHARS]}",
            hint="/openapi.json lists what there is.",
        )
        answer = Response(
            error_body(error),
            status_code=error.spec.http_status,
            headers=error_headers(error),
            media_type="application/json",
        )
        await answer(scope, receive, send)

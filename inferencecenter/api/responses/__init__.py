"""OpenAI's Responses API, over HTTP and over a WebSocket: one response is one turn of a session."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from starlette.routing import WebSocketRoute

from inferencecenter.api.responses import compaction, conversations, resources
from inferencecenter.api.responses.resources import PATH
from inferencecenter.api.responses.socket import ResponsesEndpoint

if TYPE_CHECKING:
    from inferencecenter.api.endpoint import Operation
    from inferencecenter.server.context import ServerContext

OPERATIONS: Final[tuple[Operation, ...]] = (
    *compaction.OPERATIONS,
    *resources.OPERATIONS,
    *conversations.OPERATIONS,
)
"""All HTTP operations; fixed paths precede that of one response, which matches them too."""


def socket_routes(context: ServerContext) -> list[WebSocketRoute]:
    """Return the routes of the socket below the configured base path; the paths are those of HTTP."""
    endpoint = ResponsesEndpoint(context)
    return [WebSocketRoute(context.settings.base_path + path, endpoint) for path in (PATH, PATH.removeprefix("/v1"))]

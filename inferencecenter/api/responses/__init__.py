"""OpenAI's Responses API, over HTTP and over a WebSocket: one response is one turn of a session."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.routing import WebSocketRoute

from inferencecenter.api.responses.resources import OPERATIONS, PATH
from inferencecenter.api.responses.socket import ResponsesEndpoint

if TYPE_CHECKING:
    from inferencecenter.server.context import ServerContext

__all__ = ["OPERATIONS", "socket_route"]


def socket_route(context: ServerContext) -> WebSocketRoute:
    """Return the route of the socket below the configured base path; the path is that of HTTP."""
    return WebSocketRoute(context.settings.base_path + PATH, ResponsesEndpoint(context))

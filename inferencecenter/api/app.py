"""The ASGI application: the table of HTTP operations and the routes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from starlette.applications import Starlette
from starlette.routing import BaseRoute, Route, WebSocketRoute

from inferencecenter.api import endpoint, openapi, plain, responses
from inferencecenter.api.openai import chat, completions, models
from inferencecenter.api.websocket.endpoint import UnknownSocketPath, WebSocketEndpoint
from inferencecenter.server.status_pages import StatusPages
from inferencecenter.server.web import WebPage, read_web_files

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

    from inferencecenter.server.context import ServerContext

OPERATIONS: Final[tuple[endpoint.Operation, ...]] = (
    *models.OPERATIONS,
    *chat.OPERATIONS,
    *completions.OPERATIONS,
    *responses.OPERATIONS,
    *plain.OPERATIONS,
    openapi.operation(lambda: OPERATIONS),
)
"""All HTTP operations; routes and the OpenAPI document derive from it."""


def api_routes(context: ServerContext) -> list[BaseRoute]:
    """Return the routes of all HTTP operations, and of the Responses socket."""
    return [*endpoint.routes(context, OPERATIONS), responses.socket_route(context)]


SOCKET_PATHS: Final = ("/", "/ws", "/api/inference", "/api/inference/")


def create_app(context: ServerContext, *more: BaseRoute) -> Starlette:
    """Return the application of one port, below the configured base path; ``more`` are the routes of the HTTP APIs."""
    base, pages = context.settings.base_path, StatusPages(context)
    paths = [base + path for path in SOCKET_PATHS] + ([base] if base else [])
    endpoint = WebSocketEndpoint(context)
    routes: list[BaseRoute] = [WebSocketRoute(path, endpoint) for path in paths]
    if context.settings.web:
        routes += WebPage(read_web_files(), base_path=base, otherwise=pages.about).routes()
    routes += [Route(path, pages.about) for path in paths]
    routes += [
        Route(base + "/healthz", pages.healthz),
        Route(base + "/readyz", pages.readyz),
        Route(base + "/metrics", pages.metrics),
    ]
    return Starlette(routes=[*routes, *more, UnknownSocketPath(context)])

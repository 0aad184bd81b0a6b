"""The ASGI application: the table of HTTP operations and the routes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from starlette.applications import Starlette
from starlette.routing import BaseRoute, Route, WebSocketRoute

from inferencecenter.api import endpoint, ollama, openapi, plain, responses
from inferencecenter.api.anthropic import messages
from inferencecenter.api.errors import OWN_ERRORS
from inferencecenter.api.ollama.errors import OLLAMA_ERRORS
from inferencecenter.api.openai import chat, completions, embeddings, fim, infill, llama_server, models
from inferencecenter.api.websocket.connection import UnknownSocketPath, WebSocketEndpoint
from inferencecenter.server.status_pages import StatusPages
from inferencecenter.server.web import WebPage, read_web_files

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

    from inferencecenter.server.context import ServerContext

OPERATIONS: Final[tuple[endpoint.Operation, ...]] = (
    *models.OPERATIONS,
    *chat.OPERATIONS,
    *completions.OPERATIONS,
    *infill.OPERATIONS,
    *fim.OPERATIONS,
    *embeddings.OPERATIONS,
    *responses.OPERATIONS,
    *llama_server.OPERATIONS,
    *messages.OPERATIONS,
    *ollama.OPERATIONS,
    *plain.OPERATIONS,
    openapi.operation(lambda: OPERATIONS),
)
"""All HTTP operations; routes and the OpenAPI document derive from it."""

FIELD_TABLES: Final = tuple(dict.fromkeys(row.fields for row in OPERATIONS if row.fields and row.body))
"""The tables of the fields of bodies, one for each foreign dialect."""


def api_routes(context: ServerContext) -> list[BaseRoute]:
    """Return the routes of all HTTP operations, of the Responses socket, and of other paths beside them."""
    base = context.settings.base_path
    others = [
        endpoint.NotFoundRoute(f"{base}/api/", errors=OLLAMA_ERRORS),
        endpoint.NotFoundRoute(f"{base}/shares/", errors=OWN_ERRORS),
    ]
    return [*endpoint.routes(context, OPERATIONS), *responses.socket_routes(context), *others]


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
        Route(base + "/health", pages.health),
        Route(base + "/v1/health", pages.health),
        Route(base + "/readyz", pages.readyz),
        Route(base + "/metrics", pages.metrics),
    ]
    return Starlette(routes=[*routes, *more, UnknownSocketPath(context)])

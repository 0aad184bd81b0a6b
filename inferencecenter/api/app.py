"""The ASGI application of a port: routes of sockets, of the web page and of status, and of the HTTP APIs."""

from __future__ import annotations

import asyncio
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from starlette.applications import Starlette
from starlette.routing import BaseRoute, Match, NoMatchFound, Route, WebSocketRoute

from inferencecenter.api.websocket.connection import UnknownSocketPath, WebSocketEndpoint
from inferencecenter.server.status_pages import StatusPages
from inferencecenter.server.web import WebPage

if TYPE_CHECKING:
    from starlette.datastructures import URLPath
    from starlette.types import Receive, Scope, Send

    from inferencecenter.server.context import ServerContext

_OPERATIONS: Final = "inferencecenter.api.operations"


class DeferredRoutes(BaseRoute):
    """The routes of the HTTP APIs, which are imported once the daemon listens.

    Until then it stands for them in the application, and matches all that no other route does. Such requests wait, and
    are routed again when ``load`` has put the routes in its place.
    """

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._loaded = asyncio.Event()

    async def load(self, app: Starlette) -> None:
        """Import the APIs in a thread, and replace this route in the application."""
        operations = await asyncio.to_thread(import_module, _OPERATIONS)
        place = app.routes.index(self)
        app.routes[place : place + 1] = operations.api_routes(self._context)
        self._loaded.set()

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match any request."""
        return (Match.FULL if scope["type"] in {"http", "websocket"} else Match.NONE), {}

    def url_path_for(self, name: str, /, **_: Any) -> URLPath:
        """Match nothing."""
        raise NoMatchFound(name, {})

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Wait for the routes, and route the request by them."""
        await self._loaded.wait()
        await scope["router"](scope, receive, send)


SOCKET_PATHS: Final = ("/", "/ws", "/api/inference", "/api/inference/")


def create_app(context: ServerContext, *more: BaseRoute) -> Starlette:
    """Return the application of one port, below the configured base path; ``more`` are the routes of the HTTP APIs."""
    base, pages = context.settings.base_path, StatusPages(context)
    paths = [base + path for path in SOCKET_PATHS] + ([base] if base else [])
    endpoint = WebSocketEndpoint(context)
    routes: list[BaseRoute] = [WebSocketRoute(path, endpoint) for path in paths]
    if context.settings.web:
        routes += WebPage(base_path=base, otherwise=pages.about).routes()
    routes += [Route(path, pages.about) for path in paths]
    routes += [
        Route(base + "/healthz", pages.healthz),
        Route(base + "/health", pages.health),
        Route(base + "/v1/health", pages.health),
        Route(base + "/readyz", pages.readyz),
        Route(base + "/metrics", pages.metrics),
    ]
    return Starlette(routes=[*routes, *more, UnknownSocketPath(context)])

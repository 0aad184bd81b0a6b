"""The ASGI application: which path leads where."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from starlette.applications import Starlette
from starlette.routing import BaseRoute, Route, WebSocketRoute

from inferencecenter.server.endpoint import UnknownSocketPath, WebSocketEndpoint
from inferencecenter.server.pages import Pages
from inferencecenter.server.web import WebPage
from inferencecenter.server.web_files import read_web_files

if TYPE_CHECKING:
    from inferencecenter.server.context import Context

SOCKET_PATHS: Final = ("/", "/ws", "/api/inference", "/api/inference/")


def create_app(context: Context, *more: BaseRoute) -> Starlette:
    """Return the application for one port, under the base path of the settings; ``more`` are routes of dialects."""
    base, pages = context.settings.base_path, Pages(context)
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

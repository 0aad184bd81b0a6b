"""Requests for the HTTP APIs before these are imported."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from starlette.responses import PlainTextResponse
from starlette.routing import Route, Router

from inferencecenter.api import operations
from inferencecenter.api.app import DeferredRoutes

if TYPE_CHECKING:
    import pytest
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.types import Message

    from inferencecenter.server.context import ServerContext


async def _answer(request: Request) -> PlainTextResponse:
    return PlainTextResponse(request.url.path)


async def _get(router: Router, path: str) -> tuple[int, bytes]:
    """Return status and body of a GET."""
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b""}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": [], "server": ("x", 80)}
    await router(scope, receive, send)
    return sent[0]["status"], sent[1]["body"]


async def test_early_requests_wait_for_the_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other routes are served at once; early requests, also of unknown paths, are routed by the new routes."""
    monkeypatch.setattr(operations, "api_routes", lambda _: [Route("/v1/models", _answer)])
    deferred = DeferredRoutes(cast("ServerContext", None))
    router = Router([Route("/healthz", _answer), deferred, Route("/last", _answer)])
    loop = asyncio.get_running_loop()
    early = [loop.create_task(_get(router, path)) for path in ("/v1/models", "/last", "/nowhere")]
    assert await _get(router, "/healthz") == (200, b"/healthz")
    assert not any(each.done() for each in early)
    await deferred.load(cast("Starlette", router))
    async with asyncio.timeout(60):
        assert await asyncio.gather(*early) == [(200, b"/v1/models"), (200, b"/last"), (404, b"Not Found")]
    assert deferred not in router.routes
    assert await _get(router, "/v1/models") == (200, b"/v1/models")

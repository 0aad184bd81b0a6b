"""The WebSocket endpoint: refuses an upgrade or turns it into a connection, and reads its frames."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any, cast

import orjson
from starlette.datastructures import Headers

from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.base import SUBPROTOCOL
from inferencecenter.protocol.trace_context import read_traceparent
from inferencecenter.server.connection import Connection
from inferencecenter.server.origins import origin_allowed
from inferencecenter.server.upgrade import check_query, chooses_v1, read_credential
from inferencecenter.server.websocket import SCOPE_KEY

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from inferencecenter.server.context import Context
    from inferencecenter.server.websocket import WebSocket


class WebSocketEndpoint:
    """An ASGI application for one path; uvicorn runs a call of it per socket."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one socket until it is closed."""
        await receive()  # websocket.connect, which says nothing that the scope does not
        try:
            connection = await self._admit(scope)
        except InferenceCenterError as error:
            await self._refuse(send, error)
            return
        hub = self._context.hub
        hub.add(connection)
        try:
            await send({"type": "websocket.accept", "subprotocol": SUBPROTOCOL if connection.v1 else None})
            connection.greet()
            while (message := await receive())["type"] == "websocket.receive":
                await connection.receive(message.get("text"))
                # A client that sends many frames at once waits its turn after each.
                await asyncio.sleep(0)
        finally:
            connection.lost()
            hub.remove(connection)

    async def _admit(self, scope: Scope) -> Connection:
        """Return the connection for an upgrade.

        Raises:
            InferenceCenterError: The upgrade is refused.
        """
        context, headers = self._context, Headers(scope=scope)
        check_query(scope["query_string"])
        caller = context.proxies.caller(scope["client"][0] if scope["client"] else "", headers)
        origin = headers.get("origin")
        if not origin_allowed(origin, caller.host, context.settings.allowed_origins):
            raise InferenceCenterError(
                ErrorCode.FORBIDDEN,
                "pages of this origin may not connect",
                field="Origin",
                hint="An operator may add it to server.allowed_origins.",
            )
        context.hub.check_open()
        credential = read_credential(headers, scope["subprotocols"])
        wire: WebSocket = cast("dict[str, Any]", scope["state"])[SCOPE_KEY]
        connection = Connection(
            context,
            wire,
            address=caller.address,
            v1=chooses_v1(scope["subprotocols"]),
            traceparent=read_traceparent(headers.get("traceparent")),
        )
        if credential is not None:
            account = await context.authenticator.authenticate_anywhere(credential, address=caller.address)
            context.hub.check_open()  # if somebody had to be asked, that took a while
            connection.authenticate(account)
        return connection

    async def _refuse(self, send: Send, error: InferenceCenterError) -> None:
        status = error.spec.http_status
        self._context.metrics.refused_connections.labels(str(status)).inc()
        await send(
            {
                "type": "websocket.http.response.start",
                "status": status,
                "headers": [(name.encode(), value.encode()) for name, value in refusal_headers(error).items()],
            }
        )
        await send({"type": "websocket.http.response.body", "body": refusal_body(error)})


def refusal_headers(error: InferenceCenterError) -> dict[str, str]:
    """Return the HTTP headers that go with a failure."""
    headers = {"content-type": "application/json"}
    if error.code is ErrorCode.NOT_AUTHENTICATED:
        headers["www-authenticate"] = "Bearer"
    if error.retry_after_ms is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after_ms / 1000))
    return headers


def refusal_body(error: InferenceCenterError) -> bytes:
    """Return the JSON body that goes with a failure."""
    fields = {
        "code": error.code.value,
        "message": error.message,
        "error": error.message,
        "hint": error.hint,
        "field": error.field,
        "retryable": error.spec.retryable,
        "retry_after_ms": error.retry_after_ms,
    }
    return orjson.dumps({name: value for name, value in fields.items() if value is not None})

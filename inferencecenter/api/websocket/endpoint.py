"""The WebSocket endpoint: refuses an upgrade or turns it into a connection, and reads its frames."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

from starlette.datastructures import Headers
from starlette.routing import BaseRoute, Match, NoMatchFound

from inferencecenter.api.websocket.connection import Connection
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.base import SUBPROTOCOL
from inferencecenter.protocol.trace_context import read_traceparent
from inferencecenter.server.handshake import (
    check_query,
    chooses_v1,
    origin_allowed,
    read_credential,
    refusal_body,
    refusal_headers,
)
from inferencecenter.server.states import ConnectionState
from inferencecenter.server.websocket import SCOPE_KEY

if TYPE_CHECKING:
    from starlette.datastructures import URLPath
    from starlette.types import Receive, Scope, Send

    from inferencecenter.server.context import ServerContext
    from inferencecenter.server.websocket import WebSocket

_SHOWN_CHARS: Final = 100


class WebSocketEndpoint:
    """An ASGI application for one path; uvicorn runs a call of it per socket."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one socket until it is closed."""
        await receive()  # websocket.connect, which has no more information than the scope
        try:
            connection = await self._admit(scope)
        except InferenceCenterError as error:
            await refuse_upgrade(self._context, send, error)
            return
        if connection.state is ConnectionState.CLOSED:  # the peer has disconnected meanwhile
            return
        hub = self._context.hub
        hub.add(connection)
        try:
            await connection.run(receive, send, subprotocol=SUBPROTOCOL if connection.v1 else None)
        finally:
            hub.remove(connection)

    async def _admit(self, scope: Scope) -> Connection:
        """Return the connection of an upgrade.

        Raises:
            InferenceCenterError: The upgrade is refused.
        """
        context, headers = self._context, Headers(scope=scope)
        check_query(scope["query_string"])
        caller = context.proxies.peer_info(scope["client"][0] if scope["client"] else "", headers)
        origin = headers.get("origin")
        if not origin_allowed(origin, caller.host, context.settings.allowed_origins):
            raise InferenceCenterError(
                ErrorCode.FORBIDDEN,
                "this origin may not connect",
                field="Origin",
                hint="An operator can add it to server.allowed_origins.",
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
            context.hub.check_open()  # authentication by an external service takes time
            if connection.state is not ConnectionState.CLOSED:
                connection.authenticate(account)
        return connection


class UnknownSocketPath(BaseRoute):
    """A route of all unknown WebSocket paths; Starlette would respond with 403."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match any upgrade."""
        return (Match.FULL if scope["type"] == "websocket" else Match.NONE), {}

    def url_path_for(self, name: str, /, **_: Any) -> URLPath:
        """Match nothing."""
        raise NoMatchFound(name, {})

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the upgrade with 404."""
        await receive()
        error = InferenceCenterError(
            ErrorCode.UNKNOWN_OP,
            f"no WebSocket at this path: {scope['path'][:_SHOWN_CHARS]}",
            hint=f"Connect to {self._context.settings.base_path}/ws.",
        )
        await refuse_upgrade(self._context, send, error)


async def refuse_upgrade(context: ServerContext, send: Send, error: InferenceCenterError) -> None:
    """Respond to an upgrade with an error."""
    status = error.spec.http_status
    context.metrics.refused_connections.labels(str(status)).inc()
    await send(
        {
            "type": "websocket.http.response.start",
            "status": status,
            "headers": [(name.encode(), value.encode()) for name, value in refusal_headers(error).items()],
        }
    )
    await send({"type": "websocket.http.response.body", "body": refusal_body(error)})

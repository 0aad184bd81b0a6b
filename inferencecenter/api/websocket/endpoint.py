"""The WebSocket endpoint: refuses an upgrade or turns it into a connection, and reads its frames."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final, cast

from starlette.routing import BaseRoute, Match, NoMatchFound

from inferencecenter.api.request_context import admit
from inferencecenter.api.websocket.connection import Connection
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.base import SUBPROTOCOL
from inferencecenter.server.handshake import chooses_v1, refusal_body, refusal_headers
from inferencecenter.server.websocket import SCOPE_KEY

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.datastructures import URLPath
    from starlette.types import Receive, Scope, Send

    from inferencecenter.server.connection import SocketConnection
    from inferencecenter.server.context import ServerContext
    from inferencecenter.server.websocket import WebSocket

_SHOWN_CHARS: Final = 100


class SocketEndpoint(ABC):
    """An ASGI application for one path; uvicorn runs a call of it per socket."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one socket until it is closed."""
        await receive()  # websocket.connect, which has no more information than the scope
        try:
            connection = await self._admit(scope)
        except InferenceCenterError as error:
            await refuse_upgrade(self._context, send, error, *self._refusal(error))
            return
        await connection.run(receive, send, subprotocol=SUBPROTOCOL if chooses_v1(scope["subprotocols"]) else None)

    @abstractmethod
    async def _admit(self, scope: Scope) -> SocketConnection[Any]:
        """Return the connection of an upgrade, which the hub knows.

        Raises:
            InferenceCenterError: The upgrade is refused.
        """

    @abstractmethod
    def _refusal(self, error: InferenceCenterError) -> tuple[Mapping[str, str], bytes]:
        """Return the headers and the body of a refusal."""


class WebSocketEndpoint(SocketEndpoint):
    """The endpoint of the daemon's own protocol."""

    def _refusal(self, error: InferenceCenterError) -> tuple[Mapping[str, str], bytes]:
        return refusal_headers(error), refusal_body(error)

    async def _admit(self, scope: Scope) -> Connection:
        context, subprotocols = self._context, scope["subprotocols"]
        context.hub.check_open()
        admission = await admit(context, scope, scope=None, subprotocols=subprotocols)
        context.hub.check_open()  # authentication by an external service takes time
        wire: WebSocket = cast("dict[str, Any]", scope["state"])[SCOPE_KEY]
        connection = Connection(
            context,
            wire,
            address=admission.address,
            v1=chooses_v1(subprotocols),
            traceparent=admission.traceparent,
        )
        if admission.account is not None:
            connection.authenticate(admission.account)
        context.hub.add(connection)
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
        await refuse_upgrade(self._context, send, error, refusal_headers(error), refusal_body(error))


async def refuse_upgrade(
    context: ServerContext, send: Send, error: InferenceCenterError, headers: Mapping[str, str], body: bytes
) -> None:
    """Respond to an upgrade with an error."""
    status = error.spec.http_status
    context.metrics.refused_connections.labels(str(status)).inc()
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "websocket.http.response.start", "status": status, "headers": encoded})
    await send({"type": "websocket.http.response.body", "body": body})

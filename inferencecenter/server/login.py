"""What ``auth`` does on a socket that is open."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import structlog

from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol import events
from inferencecenter.protocol.close import CloseCode
from inferencecenter.server.authentication import KeyCredential, TokenCredential
from inferencecenter.server.states import ConnectionState

if TYPE_CHECKING:
    from inferencecenter.protocol import requests
    from inferencecenter.protocol.base import Event
    from inferencecenter.server.authentication import Credential
    from inferencecenter.server.connection import Connection

_log = structlog.get_logger(__name__)


def auth(connection: Connection, request: requests.Auth) -> Event | None:
    """Let the socket speak for whom its credential shows, at once unless somebody else has to be asked."""
    if connection.authenticated:
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST, "this socket is authenticated already", hint="Open another one."
        )
    if request.protocol is not None:
        connection.speak_v1()
    credential = (
        TokenCredential(request.token)
        if request.token is not None
        else KeyCredential(request.client_id or "", request.api_key or "")
    )
    authenticator = connection.context.authenticator
    if authenticator.asks_others(credential):
        connection.wait_for(partial(_authenticate, connection, request, credential))
        return None
    try:
        connection.authenticate(authenticator.authenticate(credential, address=connection.address))
    except InferenceCenterError as error:
        if error.code not in (ErrorCode.NOT_AUTHENTICATED, ErrorCode.RATE_LIMITED):
            raise
        _refuse(connection, request, error)
        return None
    return connection.welcome()


async def _authenticate(connection: Connection, request: requests.Auth, credential: Credential) -> None:
    try:
        account = await connection.context.authenticator.authenticate_anywhere(credential, address=connection.address)
        # The socket may have had its time meanwhile, or the daemon.
        if connection.state is not ConnectionState.CONNECTED:
            return
        connection.authenticate(account)
    except InferenceCenterError as error:
        if error.code in (ErrorCode.NOT_AUTHENTICATED, ErrorCode.RATE_LIMITED):
            _refuse(connection, request, error)
        else:
            connection.fail(error, request_id=request.id)
    except Exception:  # noqa: BLE001 - the border: a defect here must not take the socket down
        _log.exception("command_failed", op=request.op)
        connection.fail(InferenceCenterError(ErrorCode.INTERNAL), request_id=request.id)
    else:
        connection.send(connection.welcome().model_copy(update={"id": request.id}))


def _refuse(connection: Connection, request: requests.Auth, error: InferenceCenterError) -> None:
    connection.send(events.AuthFailed(id=request.id, reason=error.message, retry_after_ms=error.retry_after_ms))
    if error.code is ErrorCode.RATE_LIMITED:
        connection.close(CloseCode.TOO_MANY, error.message)

"""The HTTP side of the port: what this is, whether it lives, whether it is ready, and its metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from starlette.responses import JSONResponse, Response

import inferencecenter
from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.base import PROTOCOL_VERSION, SUBPROTOCOL
from inferencecenter.protocol.scopes import Scope
from inferencecenter.server import replies
from inferencecenter.server.endpoint import refusal_body, refusal_headers
from inferencecenter.server.scrape import Scrape
from inferencecenter.server.upgrade import check_query, read_credential

if TYPE_CHECKING:
    from starlette.requests import Request

    from inferencecenter.server.context import Context
    from inferencecenter.server.origins import Caller

PROXY_NOT_TRUSTED: Final = "not_trusted"
"""What ``/readyz`` says of a proxy on this machine that is not among ``server.trusted_proxies``."""


class Pages:
    """Answers to plain HTTP requests."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._scrape = Scrape(context)

    async def about(self, _request: Request) -> Response:
        """Say what listens here, to somebody who came without a WebSocket."""
        return JSONResponse(
            {
                "server": "inferencecenter",
                "version": inferencecenter.__version__,
                "protocol": PROTOCOL_VERSION,
                "subprotocol": SUBPROTOCOL,
                "message": "Connect with a WebSocket to this address.",
            }
        )

    async def healthz(self, _request: Request) -> Response:
        """Say that the process lives."""
        return JSONResponse({"status": "ok"})

    async def readyz(self, request: Request) -> Response:
        """Say whether a turn could run now, if need be with an engine that it wakes: 200, else 503.

        Without the file of sessions no turn of a stored session begins, and what is told of such a session is held
        back; without that of accounts no login is accepted. Callers on this machine are told of a proxy that is not
        trusted.
        """
        engine = self._context.models.status
        storable = self._context.sessions.fault is None and self._context.authenticator.can_tell
        ready = engine.serves and storable and not self._context.hub.draining
        detail = replies.describe_engine(engine)
        return JSONResponse(
            {
                "state": "draining" if self._context.hub.draining else engine.state.value,
                "load_fraction": engine.load_fraction,
                "detail": detail if storable else f"{detail}; the files in the state directory cannot be used",
                "storage": "ok" if storable else "unavailable",
                **({"proxy": PROXY_NOT_TRUSTED} if self._tells_of_proxy(request) else {}),
            },
            status_code=200 if ready else 503,
        )

    async def metrics(self, request: Request) -> Response:
        """Show the metrics to those who may see them."""
        try:
            self._admit(request)
        except InferenceCenterError as error:
            return Response(refusal_body(error), status_code=error.spec.http_status, headers=refusal_headers(error))
        body, media_type = await self._scrape.page(request.headers.get("accept", ""))
        return Response(body, media_type=media_type)

    def _caller(self, request: Request) -> Caller:
        return self._context.proxies.caller(request.client.host if request.client else "", request.headers)

    def _tells_of_proxy(self, request: Request) -> bool:
        return self._caller(request).on_this_machine and self._context.proxies.sees_untrusted

    def _admit(self, request: Request) -> None:
        context = self._context
        access = context.settings.metrics_access
        check_query(request.scope["query_string"])
        caller = self._caller(request)
        if access in ("loopback", "either") and caller.on_this_machine:
            return
        if access == "loopback":
            raise InferenceCenterError(
                ErrorCode.FORBIDDEN,
                "metrics are for programs on this machine",
                hint="server.metrics_access may allow tokens too.",
            )
        credential = read_credential(request.headers)
        if credential is None:
            raise InferenceCenterError(
                ErrorCode.NOT_AUTHENTICATED, hint=f"Send a token with the scope {Scope.OPERATOR} as a bearer token."
            )
        account = context.authenticator.authenticate(credential, address=caller.address)
        if Scope.OPERATOR not in account.scopes:
            raise InferenceCenterError(ErrorCode.FORBIDDEN, f"metrics need the scope {Scope.OPERATOR}")

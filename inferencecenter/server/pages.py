"""The HTTP side of the port: what this is, whether it lives, whether it is ready, and its metrics."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

import inferencecenter
from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.port import EngineState
from inferencecenter.protocol.base import PROTOCOL_VERSION, SUBPROTOCOL
from inferencecenter.protocol.scopes import Scope
from inferencecenter.server import replies
from inferencecenter.server.endpoint import refusal_body, refusal_headers
from inferencecenter.server.upgrade import check_query, read_credential
from inferencecenter.telemetry.metrics import or_nan

if TYPE_CHECKING:
    from starlette.requests import Request

    from inferencecenter.hardware.nvml import GpuReading
    from inferencecenter.server.context import Context


class Pages:
    """Answers to plain HTTP requests."""

    def __init__(self, context: Context) -> None:
        self._context = context

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

    async def readyz(self, _request: Request) -> Response:
        """Say whether a turn could run now, if need be with an engine that it wakes: 200, else 503."""
        engine = self._context.engine.status
        ready = engine.serves and not self._context.hub.draining
        return JSONResponse(
            {
                "state": "draining" if self._context.hub.draining else engine.state.value,
                "load_fraction": engine.load_fraction,
                "detail": replies.describe_engine(engine),
            },
            status_code=200 if ready else 503,
        )

    async def metrics(self, request: Request) -> Response:
        """Show the metrics to those who may see them."""
        try:
            self._admit(request)
        except InferenceCenterError as error:
            return Response(refusal_body(error), status_code=error.spec.http_status, headers=refusal_headers(error))
        self._observe(await asyncio.to_thread(self._context.gpu.read))
        return Response(self._context.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    def _admit(self, request: Request) -> None:
        context = self._context
        access = context.settings.metrics_access
        check_query(request.scope["query_string"])
        caller = context.proxies.caller(request.client.host if request.client else "", request.headers)
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

    def _observe(self, gpu: GpuReading) -> None:
        """Bring the gauges that are read, not counted, up to date."""
        metrics, engine = self._context.metrics, self._context.engine.status
        metrics.sessions.set(self._context.sessions.totals().total_sessions)
        metrics.engine_ready.set(engine.serves)
        metrics.set_engine_state(engine.state.value, states=[state.value for state in EngineState])
        metrics.engine_restarts.set(engine.restarts)
        metrics.engine_rss_bytes.set(engine.rss_bytes)
        metrics.running_turns.set(engine.running)
        metrics.waiting_turns.set(engine.waiting)
        metrics.parked_sessions.set(engine.parked_sessions)
        metrics.parked_bytes.set(engine.parked_bytes)
        metrics.gpu_temperature_c.set(or_nan(gpu.temperature_c))
        metrics.gpu_power_watts.set(or_nan(gpu.power_watts))
        metrics.gpu_memory_used_bytes.set(or_nan(gpu.vram_used_bytes))
        metrics.gpu_memory_total_bytes.set(or_nan(gpu.vram_total_bytes))
        metrics.gpu_utilization_percent.set(or_nan(gpu.utilization_percent))

"""Op ``status``: a client's own share, or the whole daemon for an operator."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from inferencecenter.hardware.pressure import MAIN_MEMORY
from inferencecenter.protocol import events, requests
from inferencecenter.protocol.scopes import Scope

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inferencecenter.api.websocket.connection import Connection
    from inferencecenter.hardware.pressure import Pressure
    from inferencecenter.ipc.port import EngineStatus
    from inferencecenter.protocol.base import Event
    from inferencecenter.protocol.values import SessionSummary, StatusType
    from inferencecenter.sessions.context import Principal
    from inferencecenter.sessions.journal import StorageFault
    from inferencecenter.sessions.observability import Totals

Values: TypeAlias = dict[str, float | int | str | None]
"""Readings by name, as in the protocol."""


def status(connection: Connection, request: requests.Status) -> Event:
    context, kind = connection.context, request.type
    engine, fault = context.models.status, context.sessions.fault
    if Scope.OPERATOR in connection.client.scopes:
        values = daemon_status(
            kind,
            engine=engine,
            totals=context.sessions.totals(),
            connections=len(context.hub),
            fault=fault,
            pressure=context.pressure(),
        )
        return events.Status(type=kind, values=values, plan=context.models.plan if kind == "model" else None)
    page = context.sessions.list(connection.client, requests.ListSessions(op="list_sessions", limit=1000))
    values = client_status(
        kind, client=connection.client, sessions=page.sessions, engine=engine, storable=fault is None
    )
    return events.Status(type=kind, values=values)


def daemon_status(  # noqa: PLR0913 - all by name
    kind: StatusType,
    *,
    engine: EngineStatus,
    totals: Totals,
    connections: int,
    fault: StorageFault | None,
    pressure: Pressure,
) -> Values:
    """Readings over all clients; ``fault`` is why sessions cannot be stored, if they cannot."""
    match kind:
        case "queue":
            return {
                "state": engine.state.value,
                "running": engine.running,
                "waiting": engine.waiting,
                "slots": engine.model.slots if engine.model else 0,
            }
        case "memory":
            main = pressure.usage(MAIN_MEMORY)
            return {
                "pressure": pressure.state.value,
                "memory_used_bytes": main.used_bytes if main else None,
                "memory_limit_bytes": main.limit_bytes if main else None,
                "engine_rss_bytes": engine.rss_bytes,
                "parked_sessions": engine.parked_sessions,
                "parked_bytes": engine.parked_bytes,
                "parked_ram_bytes": engine.parked_ram_bytes,
                "model_bytes": engine.model.size_bytes if engine.model else None,
                "n_ctx": engine.model.n_ctx if engine.model else None,
                "slots": engine.model.slots if engine.model else 0,
            }
        case "sessions":
            return {
                "sessions": totals.total_sessions,
                "busy": totals.active_generations,
                "connections": connections,
                "storage": "ok" if fault is None else fault.message,
            }
        case "performance":
            return {
                "last_tps": totals.last_tps,
                "last_ttft_ms": totals.last_ttft_ms,
                "tokens_per_s": totals.tokens_per_s,
                "total_tokens_generated": totals.total_tokens_generated,
                "restarts": engine.restarts,
            }
        case "model":
            return _model(engine)


def client_status(
    kind: StatusType, *, client: Principal, sessions: Sequence[SessionSummary], engine: EngineStatus, storable: bool
) -> Values:
    """Readings of one client's own sessions; ``storable`` is whether they can be stored."""
    busy = sum(session.state == "busy" for session in sessions)
    tokens = sum(session.tokens for session in sessions)
    match kind:
        case "queue":
            return {"state": engine.state.value, "unfinished": busy}
        case "memory":
            return {"tokens": tokens, "n_ctx": engine.model.n_ctx if engine.model else None}
        case "sessions":
            return {
                "sessions": len(sessions),
                "busy": busy,
                "max_sessions": client.max_sessions,
                "storage": "ok" if storable else "unavailable",
            }
        case "performance":
            return {"tokens": tokens, "messages": sum(session.messages for session in sessions)}
        case "model":
            return _model(engine)


def _model(engine: EngineStatus) -> Values:
    model = engine.model
    if model is None:
        return {"state": engine.state.value, "name": None, "load_fraction": engine.load_fraction}
    return {
        "state": engine.state.value,
        "name": model.name,
        "architecture": model.architecture,
        "parameters": model.n_params,
        "n_ctx": model.n_ctx,
        "n_ctx_train": model.n_ctx_train,
        "n_vocab": model.n_vocab,
        "layers": model.n_layers,
        "gpu_layers": model.n_gpu_layers,
        "backend": model.backend,
        "threads": model.n_threads,
        "lora": ", ".join(f"{Path(each.path).stem} x {each.scale:g}" for each in model.lora) or None,
        "projector": Path(model.projector).name or None,
        "library": model.library,
    }

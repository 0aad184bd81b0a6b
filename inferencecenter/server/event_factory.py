"""Builds events about the daemon, its engines and errors. Pure."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal

import inferencecenter
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.port import EngineState, EngineStatus
from inferencecenter.protocol import events
from inferencecenter.protocol.base import PROTOCOL_VERSION
from inferencecenter.protocol.values import ServerLimits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inferencecenter.config.settings import ServerSettings
    from inferencecenter.protocol.base import Event
    from inferencecenter.sessions.journal import StorageFault

NOT_STORABLE: Final = "sessions cannot be written down at the moment"
"""Reason of a storage failure for clients that may not see the real one."""

_EngineWord = Literal["starting", "ready", "restarting", "asleep", "failed"]
_HelloStatus = Literal["ready", "loading", "degraded"]

# Not announced: draining and stopped, because the daemon is ending, which ``going_away`` announces; and suspending,
# which lasts only until the engine sleeps.
_ENGINE_STATES: Final[Mapping[EngineState, _EngineWord]] = MappingProxyType(
    {
        EngineState.STARTING: "starting",
        EngineState.READY: "ready",
        EngineState.FAILED: "failed",
        EngineState.BACKOFF: "restarting",
        EngineState.ASLEEP: "asleep",
    }
)

_HELLO_STATUS: Final[Mapping[EngineState, _HelloStatus]] = MappingProxyType(
    {
        EngineState.STOPPED: "loading",
        EngineState.STARTING: "loading",
        EngineState.READY: "ready",
        EngineState.DRAINING: "degraded",
        EngineState.FAILED: "degraded",
        EngineState.BACKOFF: "degraded",
        EngineState.SUSPENDING: "ready",
        EngineState.ASLEEP: "ready",
    }
)


def hello(engine: EngineStatus, settings: ServerSettings, *, uptime_s: float, storable: bool) -> events.Hello:
    """Return the ``hello`` event; while sessions are not ``storable``, the daemon reports that it is not ready."""
    status, message = _HELLO_STATUS[engine.state], describe_engine(engine)
    if not storable:
        status, message = "degraded", f"{message}; {NOT_STORABLE}"
    return events.Hello(
        status=status,
        message=message,
        uptime_seconds=int(uptime_s),
        requires_auth=True,
        protocol=PROTOCOL_VERSION,
        server="inferencecenter",
        version=inferencecenter.__version__,
        model=engine.model.name if engine.model else None,
        limits=ServerLimits(
            max_frame_bytes=settings.max_frame_bytes,
            auth_timeout_s=settings.auth_timeout_s,
            max_share_links=settings.max_share_links if settings.share_links else 0,
        ),
    )


def describe_engine(engine: EngineStatus) -> str:
    """Return a description of the engine's state."""
    if engine.state is EngineState.READY and engine.model is not None:
        return f"{engine.model.name} is ready"
    if engine.serves and engine.model is not None:
        return f"{engine.model.name} is asleep, and wakes for the next turn"
    if engine.state is EngineState.STARTING:
        return engine.copying or f"loading the model: {engine.load_fraction:.0%}"
    return f"the engine is {engine.state}" + (f": {engine.detail}" if engine.detail else "")


def engine_changed(engine: EngineStatus, *, model: str | None = None) -> events.EngineChanged | None:
    """Return the event for an engine's new state, ``None`` if clients need not know; the default has no ``model``."""
    state = _ENGINE_STATES.get(engine.state)
    if state is None:
        return None
    if engine.state is EngineState.STARTING and engine.detail:  # about the previous model; sleep is not announced
        state = "restarting"
    return events.EngineChanged(state=state, detail=engine.description, model=model)


def storage_changed(fault: StorageFault | None) -> events.StorageChanged:
    """Return the event for storage that has failed or recovered."""
    if fault is None:
        return events.StorageChanged(state="ok")
    return events.StorageChanged(state="unavailable", detail=fault.message, retry_after_ms=fault.retry_after_ms)


def error_event(
    error: InferenceCenterError, *, request_id: str | None = None, session_id: str | None = None
) -> events.Error:
    if error.code is ErrorCode.SESSION_NOT_FOUND:
        session_id = None  # A foreign session must be indistinguishable from one that does not exist.
    return events.Error(
        id=request_id,
        code=error.code,
        message=error.message,
        error=error.message,
        hint=error.hint,
        field=error.field,
        session_id=session_id,
        retryable=error.spec.retryable,
        retry_after_ms=error.retry_after_ms,
    )


def legacy_errors(
    error: InferenceCenterError, *, request_id: str | None, op: str, session_id: str | None
) -> list[Event]:
    """Return the events that report the same failure to a socket of the first protocol."""
    plain = error_event(error, request_id=request_id, session_id=session_id)
    if op == "create_session":
        return [events.SessionError(id=request_id, error=error.message)]
    if op == "abort" and session_id is not None:
        return [events.AbortStatus(id=request_id, session_id=session_id, status="not_found"), plain]
    return [plain]

"""What is said when there is no engine for a turn, or no model for an engine. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inferencecenter.errors import ERRORS, ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from inferencecenter.ipc.messages import LoadFailed
    from inferencecenter.ipc.port import EngineStatus


def unavailable(engine: EngineStatus, *, given_up: bool) -> InferenceCenterError:
    """Return why an engine in this state takes no turns, or, ``given_up``, never will again."""
    return InferenceCenterError(
        ErrorCode.ENGINE_UNAVAILABLE,
        f"the engine is {engine.state.value}{': ' if engine.detail else ''}{engine.detail}",
        hint="It was lost too often and is not started again; the daemon's log says why." if given_up else None,
        retry_after_ms=1000,
    )


def queue_full(max_queue: int) -> InferenceCenterError:
    """Return why a turn is not taken when ``max_queue`` turns wait already."""
    return InferenceCenterError(ErrorCode.QUEUE_FULL, f"{max_queue} turns are waiting already", retry_after_ms=1000)


def not_loaded(message: LoadFailed) -> InferenceCenterError:
    """Return why a model cannot be loaded, as the engine said it."""
    code = ErrorCode(message.code) if message.code in ERRORS else ErrorCode.INTERNAL
    return InferenceCenterError(code, message.message, hint=message.hint or None)

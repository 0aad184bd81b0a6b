"""What is said when there is no engine for a turn, or no model for an engine. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from inferencecenter.errors import ERRORS, ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from inferencecenter.ipc.messages import LoadFailed
    from inferencecenter.ipc.port import EngineStatus

_RETRY_MS: Final = 1000
_GIVEN_UP: Final = (
    "It was lost too often and is not started again; the daemon's log says why. Once that is mended, SIGHUP to the "
    "daemon, inferencecenter model load or a restart of the daemon starts it again."
)


def unavailable(engine: EngineStatus, *, given_up: bool, retry_after_ms: int = _RETRY_MS) -> InferenceCenterError:
    """Return why an engine in this state takes no turns; one that is ``given_up`` will not before it is revived."""
    return InferenceCenterError(
        ErrorCode.ENGINE_UNAVAILABLE,
        f"the engine is {engine.state.value}{': ' if engine.detail else ''}{engine.detail}",
        hint=_GIVEN_UP if given_up else None,
        retry_after_ms=None if given_up else retry_after_ms,
    )


def queue_full(max_queue: int) -> InferenceCenterError:
    """Return why a turn is not taken when ``max_queue`` turns wait already."""
    return InferenceCenterError(ErrorCode.QUEUE_FULL, f"{max_queue} turns are waiting already", retry_after_ms=1000)


def not_loaded(message: LoadFailed) -> InferenceCenterError:
    """Return why a model cannot be loaded, as the engine said it."""
    code = ErrorCode(message.code) if message.code in ERRORS else ErrorCode.INTERNAL
    return InferenceCenterError(code, message.message, hint=message.hint or None)

"""Who is told of the engine's state."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferencecenter.ipc.port import EngineStatus

_log = structlog.get_logger(__name__)


class Listeners:
    """Calls for each status, in the order in which they were added."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[EngineStatus], None]] = []

    def add(self, listener: Callable[[EngineStatus], None]) -> None:
        """Call ``listener`` from now on."""
        self._listeners.append(listener)

    def tell(self, status: EngineStatus) -> None:
        """Call them all; the fault of one is logged."""
        for listener in self._listeners:
            try:
                listener(status)
            # A border: whoever listens must not keep the engine from being started again.
            except Exception:  # noqa: BLE001
                _log.exception("engine_listener_failed", state=status.state.value)

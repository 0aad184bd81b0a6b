"""An engine's load progress, and the listeners to its status."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import structlog

from inferencecenter.supervisor.lifecycle import fewer_layers, lacks_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferencecenter.ipc.engine_options import EngineOptions
    from inferencecenter.ipc.messages import LoadFailed, Loading, ModelInfo
    from inferencecenter.ipc.port import EngineStatus

_SHOWN_STEPS: Final = 10
_LOGGED_EVERY_S: Final = 1.0
_log = structlog.get_logger(__name__)


class StatusListeners:
    """Calls each listener with each status, in the order in which they were added."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[EngineStatus], None]] = []

    def add(self, listener: Callable[[EngineStatus], None]) -> None:
        """Call ``listener`` with each status from now on."""
        self._listeners.append(listener)

    def notify(self, status: EngineStatus) -> None:
        """Call all listeners; an exception of one is logged."""
        for listener in self._listeners:
            try:
                listener(status)
            # A border: a faulty listener must not keep the engine from being restarted.
            except Exception:  # noqa: BLE001
                _log.exception("engine_listener_failed", state=status.state.value)


class LoadProgress:
    """The load progress of the engine that was started last.

    Args:
        monotonic: Monotonic clock in seconds.
        log: Where it is logged.
    """

    def __init__(self, *, monotonic: Callable[[], float], log: structlog.stdlib.BoundLogger = _log) -> None:
        self._monotonic = monotonic
        self._log = log
        self._logged_at = 0.0
        self._offloads = False
        self._refusal: LoadFailed | None = None
        self._shown_tenth = 0
        self.fraction = 0.0
        self.copying = ""
        """The progress of copying a file to the engine's machine, as text."""

    def may_lack_gpu_memory(self, options: EngineOptions) -> bool:
        """Return whether an engine that failed to load with these options may have exceeded a GPU's memory."""
        tried = self._offloads and options.n_gpu_layers != 0
        return tried and (self._refusal is None or lacks_memory(self._refusal.message))

    def begin(self) -> None:
        """Reset the progress for an engine that is being started."""
        self.fraction, self._offloads, self._refusal = 0.0, False, None
        self._shown_tenth, self.copying = 0, ""

    def advance(self, message: Loading) -> bool:
        """Record progress; return whether to publish it, which is at each tenth."""
        was_copying, percent = bool(self.copying), round(message.fraction * 100)
        self.copying = f"copying {message.copying} to its machine: {percent} %" if message.copying else ""
        if not message.copying:
            self.fraction, self._offloads = message.fraction, message.offloads
        tenth = int(message.fraction * _SHOWN_STEPS)
        if tenth == self._shown_tenth and was_copying == bool(self.copying):
            return False
        self._shown_tenth = tenth
        now = self._monotonic()
        if now - self._logged_at >= _LOGGED_EVERY_S:
            self._logged_at = now
            if message.copying:
                self._log.info("model_copying", file=message.copying, percent=percent)
            else:
                self._log.info("model_loading", percent=percent)
        return True

    def refuse(self, message: LoadFailed) -> None:
        """Record and log why the model could not be loaded."""
        self._log.error("model_not_loaded", code=message.code, reason=message.message, hint=message.hint)
        self._refusal = message


def log_ready(model: ModelInfo, *, log: structlog.stdlib.BoundLogger) -> None:
    """Log the loaded model and its parameters."""
    log.info(
        "engine_ready",
        model=model.name,
        slots=model.slots,
        n_ctx=model.n_ctx,
        gpu_layers=model.n_gpu_layers,
        threads=model.n_threads,
    )


def with_fewer_layers(
    options: EngineOptions, known: ModelInfo | None, *, log: structlog.stdlib.BoundLogger = _log
) -> EngineOptions:
    """Return the options to try after a GPU ran out of memory, and log the change."""
    layers = fewer_layers(options.n_gpu_layers, known.n_layers if known else None)
    log.warning("engine_uses_fewer_layers", n_gpu_layers=layers, before=options.n_gpu_layers)
    return options.replace(n_gpu_layers=layers)

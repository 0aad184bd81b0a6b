"""The engine as the front sees it: an interface that the supervisor implements and sessions depend on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferencecenter.ipc.messages import ModelInfo, Submit, TurnEvent


class EngineState(StrEnum):
    """Where the engine process is in its life."""

    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    BACKOFF = "backoff"


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A snapshot of the engine for hello, readiness, metrics and status.

    ``load_fraction`` runs from 0 to 1; ``detail`` is the last failure in words, empty when all is well.
    ``running`` and ``waiting`` count turns, ``rss_bytes`` is the child's resident memory. ``parked_sessions`` have
    their KV outside the slots, and with shared prefixes it takes ``parked_bytes``.
    """

    state: EngineState
    model: ModelInfo | None = None
    pid: int | None = None
    load_fraction: float = 0.0
    detail: str = ""
    restarts: int = 0
    running: int = 0
    waiting: int = 0
    rss_bytes: int = 0
    parked_sessions: int = 0
    parked_bytes: int = 0


class EnginePort(Protocol):
    """What sessions and the server may ask of the engine. Called on the event loop; nothing here blocks or awaits."""

    @property
    def status(self) -> EngineStatus:
        """The engine's state now."""

    def submit(self, turn: Submit, listener: Callable[[TurnEvent], None]) -> int:
        """Hand over a turn and return its place in the queue, 0 when a slot is free.

        ``listener`` is called on the event loop with each event, the last being ``Finished``, ``Failed`` or, for a turn
        that may shift, ``Overflowed``: exactly one of them, also when the engine dies (``Failed`` with
        ``engine_crashed``). A turn that overflowed may be submitted again.

        Raises:
            InferenceCenterError: ``model_loading``, ``engine_unavailable`` or ``queue_full``.
        """

    def abort(self, turn_id: str) -> None:
        """Ask for the turn's end; its listener hears ``Finished`` with ``aborted``."""

    def release(self, session_id: str) -> None:
        """Let the engine forget a session's KV."""

    def subscribe(self, listener: Callable[[EngineStatus], None]) -> None:
        """Call ``listener`` on the event loop whenever ``status.state`` changes, and at each tenth of the loading."""

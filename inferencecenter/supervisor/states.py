"""The life of the engine process. Everything that decides which state follows which stands in the table here."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from inferencecenter.ipc.port import EngineState
from inferencecenter.lifecycle import Lifecycle


class EngineChange(StrEnum):
    """What can happen to the engine process."""

    START = "start"
    LOADED = "loaded"
    LOST = "lost"
    WAIT = "wait"
    STOP = "stop"
    ENDED = "ended"


# A failure to load leaves the engine FAILED; every other loss goes on to BACKOFF.
ENGINE: Final = Lifecycle(
    "engine",
    {
        (EngineState.STOPPED, EngineChange.START): EngineState.STARTING,
        (EngineState.STARTING, EngineChange.LOADED): EngineState.READY,
        (EngineState.STARTING, EngineChange.LOST): EngineState.FAILED,
        (EngineState.READY, EngineChange.LOST): EngineState.FAILED,
        (EngineState.FAILED, EngineChange.WAIT): EngineState.BACKOFF,
        (EngineState.BACKOFF, EngineChange.START): EngineState.STARTING,
        (EngineState.STARTING, EngineChange.STOP): EngineState.DRAINING,
        (EngineState.READY, EngineChange.STOP): EngineState.DRAINING,
        (EngineState.FAILED, EngineChange.STOP): EngineState.DRAINING,
        (EngineState.BACKOFF, EngineChange.STOP): EngineState.DRAINING,
        (EngineState.STOPPED, EngineChange.STOP): EngineState.DRAINING,
        (EngineState.DRAINING, EngineChange.ENDED): EngineState.STOPPED,
    },
)

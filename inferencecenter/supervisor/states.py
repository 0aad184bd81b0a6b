"""The life of the engine process. Everything that decides which state follows which stands in the table here."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from inferencecenter.core.state_machine import StateMachine
from inferencecenter.ipc.port import EngineState


class EngineChange(StrEnum):
    """What can happen to the engine process."""

    START = "start"
    LOADED = "loaded"
    LOST = "lost"
    GIVE_UP = "give_up"
    SLEEP = "sleep"
    STOP = "stop"
    ENDED = "ended"


# FAILED takes no turns: a model that cannot be loaded, an engine that was lost too often, or one that was asleep, or
# lost, and may not be started now. Only the last is started again, when what keeps it from that is gone; others are
# replaced.
# However an engine ends that is SUSPENDING, it is ASLEEP then and not lost: no turn was with it.
ENGINE: Final = StateMachine(
    "engine",
    {
        (EngineState.STOPPED, EngineChange.START): EngineState.STARTING,
        (EngineState.STOPPED, EngineChange.SLEEP): EngineState.ASLEEP,
        (EngineState.STARTING, EngineChange.LOADED): EngineState.READY,
        (EngineState.STARTING, EngineChange.LOST): EngineState.BACKOFF,
        (EngineState.READY, EngineChange.LOST): EngineState.BACKOFF,
        (EngineState.STARTING, EngineChange.GIVE_UP): EngineState.FAILED,
        (EngineState.READY, EngineChange.GIVE_UP): EngineState.FAILED,
        (EngineState.BACKOFF, EngineChange.START): EngineState.STARTING,
        (EngineState.READY, EngineChange.SLEEP): EngineState.SUSPENDING,
        (EngineState.SUSPENDING, EngineChange.ENDED): EngineState.ASLEEP,
        (EngineState.ASLEEP, EngineChange.START): EngineState.STARTING,
        (EngineState.ASLEEP, EngineChange.GIVE_UP): EngineState.FAILED,
        (EngineState.FAILED, EngineChange.START): EngineState.STARTING,
        (EngineState.STARTING, EngineChange.STOP): EngineState.DRAINING,
        (EngineState.READY, EngineChange.STOP): EngineState.DRAINING,
        (EngineState.FAILED, EngineChange.STOP): EngineState.DRAINING,
        (EngineState.BACKOFF, EngineChange.STOP): EngineState.DRAINING,
        (EngineState.SUSPENDING, EngineChange.STOP): EngineState.DRAINING,
        (EngineState.ASLEEP, EngineChange.STOP): EngineState.DRAINING,
        (EngineState.STOPPED, EngineChange.STOP): EngineState.DRAINING,
        (EngineState.DRAINING, EngineChange.ENDED): EngineState.STOPPED,
    },
)

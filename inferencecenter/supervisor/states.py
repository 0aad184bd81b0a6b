"""The state machine of an engine process."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from inferencecenter.core.state_machine import StateMachine
from inferencecenter.ipc.port import EngineState


class EngineChange(StrEnum):
    """An event in the life of an engine process."""

    START = "start"
    LOADED = "loaded"
    LOST = "lost"
    GIVE_UP = "give_up"
    SLEEP = "sleep"
    STOP = "stop"
    ENDED = "ended"


# A FAILED engine accepts no turns: its model cannot be loaded, it was lost too often, or it was asleep or lost and may
# not be started at the moment. Only the last is started again, once the obstacle is gone; the others are replaced, or
# revived if they are replicas.
# An engine that exits while SUSPENDING is ASLEEP however it exited, and not lost: it had no turns.
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

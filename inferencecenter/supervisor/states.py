"""The life of the engine process. Everything that decides which state follows which stands in the table here."""

from __future__ import annotations

from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING

from inferencecenter.ipc.port import EngineState

if TYPE_CHECKING:
    from collections.abc import Mapping


class EngineChange(StrEnum):
    """What can happen to the engine process."""

    START = "start"
    LOADED = "loaded"
    LOST = "lost"
    WAIT = "wait"
    STOP = "stop"
    ENDED = "ended"


class IllegalTransitionError(Exception):
    """A change that the table does not know: a defect of the supervisor."""

    def __init__(self, state: EngineState, change: EngineChange) -> None:
        super().__init__(f"{change.value} cannot happen to an engine that is {state.value}")


# A failure to load leaves the engine FAILED; every other loss goes on to BACKOFF.
ENGINE_TABLE: Mapping[tuple[EngineState, EngineChange], EngineState] = MappingProxyType(
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
    }
)


def engine_after(state: EngineState, change: EngineChange) -> EngineState:
    """Return the state that follows.

    Raises:
        IllegalTransitionError: The table has no such row.
    """
    try:
        return ENGINE_TABLE[state, change]
    except KeyError:
        raise IllegalTransitionError(state, change) from None

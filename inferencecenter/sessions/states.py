"""Lives of sessions and turns. Everything that decides which state follows which stands in the two tables here.

Attached or detached is a property of a session, not a state.
"""

from __future__ import annotations

from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class SessionState(StrEnum):
    """Where a session is in its life."""

    IDLE = "idle"
    BUSY = "busy"
    CLOSED = "closed"
    EXPIRED = "expired"


class SessionChange(StrEnum):
    """What can happen to a session."""

    TURN_QUEUED = "turn_queued"
    TURN_ENDED = "turn_ended"
    CLOSE = "close"
    EXPIRE = "expire"


class TurnState(StrEnum):
    """Where a turn is in its life."""

    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"

    @property
    def is_terminal(self) -> bool:
        """Whether nothing follows; the turn's one ``end`` or ``error`` has been sent."""
        return self not in (TurnState.QUEUED, TurnState.RUNNING)


class TurnChange(StrEnum):
    """What can happen to a turn."""

    START = "start"
    FINISH = "finish"
    ABORT = "abort"
    FAIL = "fail"


class IllegalTransitionError(Exception):
    """A change that the table does not know: a defect of the caller."""

    def __init__(self, state: StrEnum, change: StrEnum) -> None:
        super().__init__(f"{change.value} cannot happen to what is {state.value}")


SESSION_TABLE: Mapping[tuple[SessionState, SessionChange], SessionState] = MappingProxyType(
    {
        (SessionState.IDLE, SessionChange.TURN_QUEUED): SessionState.BUSY,
        (SessionState.BUSY, SessionChange.TURN_ENDED): SessionState.IDLE,
        (SessionState.IDLE, SessionChange.CLOSE): SessionState.CLOSED,
        (SessionState.IDLE, SessionChange.EXPIRE): SessionState.EXPIRED,
    }
)

# A queued turn may end without having run: aborted while it waited, or refused by the engine.
TURN_TABLE: Mapping[tuple[TurnState, TurnChange], TurnState] = MappingProxyType(
    {
        (TurnState.QUEUED, TurnChange.START): TurnState.RUNNING,
        (TurnState.QUEUED, TurnChange.FINISH): TurnState.FINISHED,
        (TurnState.QUEUED, TurnChange.ABORT): TurnState.ABORTED,
        (TurnState.QUEUED, TurnChange.FAIL): TurnState.FAILED,
        (TurnState.RUNNING, TurnChange.FINISH): TurnState.FINISHED,
        (TurnState.RUNNING, TurnChange.ABORT): TurnState.ABORTED,
        (TurnState.RUNNING, TurnChange.FAIL): TurnState.FAILED,
    }
)


def session_after(state: SessionState, change: SessionChange) -> SessionState:
    """Return the state that follows.

    Raises:
        IllegalTransitionError: The table has no such row.
    """
    try:
        return SESSION_TABLE[state, change]
    except KeyError:
        raise IllegalTransitionError(state, change) from None


def turn_after(state: TurnState, change: TurnChange) -> TurnState:
    """Return the state that follows.

    Raises:
        IllegalTransitionError: The table has no such row.
    """
    try:
        return TURN_TABLE[state, change]
    except KeyError:
        raise IllegalTransitionError(state, change) from None

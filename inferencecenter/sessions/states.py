"""The transition tables of sessions and turns: the only place that defines which state follows which.

Attached or detached is a property of a session, not a state.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from inferencecenter.core.state_machine import StateMachine


class SessionState(StrEnum):
    """The state of a session."""

    IDLE = "idle"
    BUSY = "busy"
    CLOSED = "closed"
    EXPIRED = "expired"


class SessionChange(StrEnum):
    """A transition of a session."""

    TURN_QUEUED = "turn_queued"
    TURN_ENDED = "turn_ended"
    CLOSE = "close"
    EXPIRE = "expire"
    ARCHIVE = "archive"


class TurnState(StrEnum):
    """The state of a turn."""

    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"

    @property
    def is_terminal(self) -> bool:
        """Whether the state is final; the turn's one ``end`` or ``error`` has been sent."""
        return self not in (TurnState.QUEUED, TurnState.RUNNING)


class TurnChange(StrEnum):
    """A transition of a turn."""

    START = "start"
    SHIFT = "shift"
    INTERRUPT = "interrupt"
    FINISH = "finish"
    ABORT = "abort"
    FAIL = "fail"


SESSION: Final = StateMachine(
    "session",
    {
        (SessionState.IDLE, SessionChange.TURN_QUEUED): SessionState.BUSY,
        (SessionState.BUSY, SessionChange.TURN_ENDED): SessionState.IDLE,
        (SessionState.IDLE, SessionChange.CLOSE): SessionState.CLOSED,
        (SessionState.IDLE, SessionChange.EXPIRE): SessionState.EXPIRED,
        # Only in memory: it stays stored, and is loaded when it is used.
        (SessionState.IDLE, SessionChange.ARCHIVE): SessionState.CLOSED,
    },
)

# A queued turn may end without having run: aborted while it waits, or refused by the engine. A turn whose context is
# full is queued again with a shorter prompt, and a turn whose engine is lost is queued again unchanged.
TURN: Final = StateMachine(
    "turn",
    {
        (TurnState.QUEUED, TurnChange.START): TurnState.RUNNING,
        (TurnState.QUEUED, TurnChange.SHIFT): TurnState.QUEUED,
        (TurnState.QUEUED, TurnChange.INTERRUPT): TurnState.QUEUED,
        (TurnState.QUEUED, TurnChange.FINISH): TurnState.FINISHED,
        (TurnState.QUEUED, TurnChange.ABORT): TurnState.ABORTED,
        (TurnState.QUEUED, TurnChange.FAIL): TurnState.FAILED,
        (TurnState.RUNNING, TurnChange.SHIFT): TurnState.QUEUED,
        (TurnState.RUNNING, TurnChange.INTERRUPT): TurnState.QUEUED,
        (TurnState.RUNNING, TurnChange.FINISH): TurnState.FINISHED,
        (TurnState.RUNNING, TurnChange.ABORT): TurnState.ABORTED,
        (TurnState.RUNNING, TurnChange.FAIL): TurnState.FAILED,
    },
)

"""State machine of a connection: its states, events and transition table."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from inferencecenter.core.state_machine import StateMachine


class ConnectionState(StrEnum):
    """State of a socket."""

    CONNECTED = "connected"
    AUTHENTICATED = "authenticated"
    DRAINING = "draining"
    CLOSED = "closed"


class ConnectionEvent(StrEnum):
    """Event that changes the state of a connection."""

    AUTHENTICATE = "authenticate"
    DRAIN = "drain"
    CLOSE = "close"


# An unauthenticated socket has nothing to drain.
CONNECTION: Final = StateMachine(
    "connection",
    {
        (ConnectionState.CONNECTED, ConnectionEvent.AUTHENTICATE): ConnectionState.AUTHENTICATED,
        (ConnectionState.CONNECTED, ConnectionEvent.CLOSE): ConnectionState.CLOSED,
        (ConnectionState.AUTHENTICATED, ConnectionEvent.DRAIN): ConnectionState.DRAINING,
        (ConnectionState.AUTHENTICATED, ConnectionEvent.CLOSE): ConnectionState.CLOSED,
        (ConnectionState.DRAINING, ConnectionEvent.CLOSE): ConnectionState.CLOSED,
    },
)

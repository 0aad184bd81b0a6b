"""Everything that affects the state of a connection: its states, the events that move it, and the table of both."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from inferencecenter.core.state_machine import StateMachine


class ConnectionState(StrEnum):
    """Where a socket is in its life."""

    CONNECTED = "connected"
    AUTHENTICATED = "authenticated"
    DRAINING = "draining"
    CLOSED = "closed"


class ConnectionEvent(StrEnum):
    """What moves a connection from one state to another."""

    AUTHENTICATE = "authenticate"
    DRAIN = "drain"
    CLOSE = "close"


# A socket that never authenticated has nothing to drain.
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

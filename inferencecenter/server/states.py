"""Everything that affects the state of a connection: its states, the events that move it, and the table of both."""

from __future__ import annotations

from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping


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


# A pair that is not here is illegal. A socket that never authenticated has nothing to drain.
TRANSITIONS: Final[Mapping[tuple[ConnectionState, ConnectionEvent], ConnectionState]] = MappingProxyType(
    {
        (ConnectionState.CONNECTED, ConnectionEvent.AUTHENTICATE): ConnectionState.AUTHENTICATED,
        (ConnectionState.CONNECTED, ConnectionEvent.CLOSE): ConnectionState.CLOSED,
        (ConnectionState.AUTHENTICATED, ConnectionEvent.DRAIN): ConnectionState.DRAINING,
        (ConnectionState.AUTHENTICATED, ConnectionEvent.CLOSE): ConnectionState.CLOSED,
        (ConnectionState.DRAINING, ConnectionEvent.CLOSE): ConnectionState.CLOSED,
    }
)


class IllegalTransitionError(Exception):
    """The code asked a connection to do what its state does not allow."""


class Lifecycle:
    """The state of one connection; ``apply`` is its only writer."""

    def __init__(self) -> None:
        self._state = ConnectionState.CONNECTED

    @property
    def state(self) -> ConnectionState:
        """The state now."""
        return self._state

    def apply(self, event: ConnectionEvent) -> ConnectionState:
        """Move along the table and return the new state.

        Raises:
            IllegalTransitionError: The table has no such pair.
        """
        try:
            self._state = TRANSITIONS[self._state, event]
        except KeyError:
            raise IllegalTransitionError(f"{event} while {self._state}") from None
        return self._state

    def __repr__(self) -> str:
        return f"<Lifecycle {self._state}>"

"""The transition table of connections."""

from __future__ import annotations

from inferencecenter.server.states import CONNECTION, ConnectionEvent, ConnectionState


def test_closed_is_final() -> None:
    """Every other state can be closed."""
    assert not [state for state, _ in CONNECTION.rows if state is ConnectionState.CLOSED]
    closable = {state for state, event in CONNECTION.rows if event is ConnectionEvent.CLOSE}
    assert closable == set(ConnectionState) - {ConnectionState.CLOSED}


def test_authenticate_and_drain_happen_at_most_once() -> None:
    """This holds for every path from open to closed."""
    assert [state for state, event in CONNECTION.rows if event is ConnectionEvent.AUTHENTICATE] == [
        ConnectionState.CONNECTED
    ]
    assert [state for state, event in CONNECTION.rows if event is ConnectionEvent.DRAIN] == [
        ConnectionState.AUTHENTICATED
    ]

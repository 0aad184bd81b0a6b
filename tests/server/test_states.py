"""The table of connections."""

from __future__ import annotations

from inferencecenter.server.states import CONNECTION, ConnectionEvent, ConnectionState


def test_nothing_leaves_closed() -> None:
    """A closed connection stays closed, and every other state can be closed."""
    assert not [state for state, _ in CONNECTION.rows if state is ConnectionState.CLOSED]
    closable = {state for state, event in CONNECTION.rows if event is ConnectionEvent.CLOSE}
    assert closable == set(ConnectionState) - {ConnectionState.CLOSED}


def test_only_an_open_connection_authenticates_and_only_an_authenticated_one_drains() -> None:
    """Both happen at most once on the way from open to closed."""
    assert [state for state, event in CONNECTION.rows if event is ConnectionEvent.AUTHENTICATE] == [
        ConnectionState.CONNECTED
    ]
    assert [state for state, event in CONNECTION.rows if event is ConnectionEvent.DRAIN] == [
        ConnectionState.AUTHENTICATED
    ]

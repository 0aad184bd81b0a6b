"""Tests of the connection's state table."""

from __future__ import annotations

import itertools

import pytest

from inferencecenter.server.states import (
    TRANSITIONS,
    ConnectionEvent,
    ConnectionState,
    IllegalTransitionError,
    Lifecycle,
)

PATHS = {
    ConnectionState.CONNECTED: (),
    ConnectionState.AUTHENTICATED: (ConnectionEvent.AUTHENTICATE,),
    ConnectionState.DRAINING: (ConnectionEvent.AUTHENTICATE, ConnectionEvent.DRAIN),
    ConnectionState.CLOSED: (ConnectionEvent.CLOSE,),
}


def in_state(state: ConnectionState) -> Lifecycle:
    """Return a lifecycle brought to ``state`` by legal events."""
    lifecycle = Lifecycle()
    for event in PATHS[state]:
        lifecycle.apply(event)
    assert lifecycle.state is state
    return lifecycle


@pytest.mark.parametrize(("state", "event"), list(itertools.product(ConnectionState, ConnectionEvent)))
def test_every_pair_moves_or_raises(state: ConnectionState, event: ConnectionEvent) -> None:
    """A pair in the table leads where the table says; any other raises and changes nothing."""
    lifecycle = in_state(state)
    if (state, event) in TRANSITIONS:
        assert lifecycle.apply(event) is TRANSITIONS[state, event]
        assert lifecycle.state is TRANSITIONS[state, event]
    else:
        with pytest.raises(IllegalTransitionError, match=f"{event} while {state}"):
            lifecycle.apply(event)
        assert lifecycle.state is state


def test_nothing_leaves_closed() -> None:
    """A closed connection stays closed, and every other state can be closed."""
    assert not [state for state, _ in TRANSITIONS if state is ConnectionState.CLOSED]
    closable = {state for state, event in TRANSITIONS if event is ConnectionEvent.CLOSE}
    assert closable == set(ConnectionState) - {ConnectionState.CLOSED}


def test_repr_shows_the_state() -> None:
    """The state can be read off a lifecycle in a debugger."""
    assert repr(in_state(ConnectionState.DRAINING)) == "<Lifecycle draining>"

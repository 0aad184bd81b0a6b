"""The tables of sessions and turns."""

from __future__ import annotations

import itertools

import pytest

from inferencecenter.sessions.states import (
    SESSION_TABLE,
    TURN_TABLE,
    IllegalTransitionError,
    SessionChange,
    SessionState,
    TurnChange,
    TurnState,
    session_after,
    turn_after,
)


@pytest.mark.parametrize(("state", "change"), list(itertools.product(SessionState, SessionChange)))
def test_a_session_changes_only_as_its_table_says(state: SessionState, change: SessionChange) -> None:
    """Every pair of state and change either has a row or raises."""
    if (state, change) in SESSION_TABLE:
        assert session_after(state, change) is SESSION_TABLE[state, change]
    else:
        with pytest.raises(IllegalTransitionError, match=change.value):
            session_after(state, change)


@pytest.mark.parametrize(("state", "change"), list(itertools.product(TurnState, TurnChange)))
def test_a_turn_changes_only_as_its_table_says(state: TurnState, change: TurnChange) -> None:
    """Every pair of state and change either has a row or raises."""
    if (state, change) in TURN_TABLE:
        assert turn_after(state, change) is TURN_TABLE[state, change]
    else:
        with pytest.raises(IllegalTransitionError, match=change.value):
            turn_after(state, change)


def test_nothing_follows_a_terminal_state() -> None:
    """A session that is closed or expired and a turn that has ended stay so."""
    assert not {state for state, _ in SESSION_TABLE} & {SessionState.CLOSED, SessionState.EXPIRED}
    assert {state for state, _ in TURN_TABLE} == {state for state in TurnState if not state.is_terminal}


def test_a_running_turn_never_waits_again() -> None:
    """No row leads from a running turn to a queued one, and none starts it twice."""
    assert TURN_TABLE[TurnState.QUEUED, TurnChange.START] is TurnState.RUNNING
    assert (TurnState.RUNNING, TurnChange.START) not in TURN_TABLE
    assert TurnState.QUEUED not in TURN_TABLE.values()

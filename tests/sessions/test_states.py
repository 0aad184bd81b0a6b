"""The tables of sessions and turns."""

from __future__ import annotations

from inferencecenter.sessions.states import SESSION, TURN, SessionState, TurnChange, TurnState


def test_nothing_follows_a_terminal_state() -> None:
    """A session that is closed or expired and a turn that has ended stay so."""
    assert not {state for state, _ in SESSION.rows} & {SessionState.CLOSED, SessionState.EXPIRED}
    assert {state for state, _ in TURN.rows} == {state for state in TurnState if not state.is_terminal}


def test_a_running_turn_never_waits_again() -> None:
    """No row leads from a running turn to a queued one, and none starts it twice."""
    assert TURN.rows[TurnState.QUEUED, TurnChange.START] is TurnState.RUNNING
    assert (TurnState.RUNNING, TurnChange.START) not in TURN.rows
    assert TurnState.QUEUED not in TURN.rows.values()

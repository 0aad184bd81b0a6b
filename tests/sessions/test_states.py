"""The transition tables of sessions and turns."""

from __future__ import annotations

from inferencecenter.sessions.states import SESSION, TURN, SessionState, TurnChange, TurnState


def test_nothing_follows_a_terminal_state() -> None:
    """Closed and expired sessions and ended turns have no transitions."""
    assert not {state for state, _ in SESSION.rows} & {SessionState.CLOSED, SessionState.EXPIRED}
    assert {state for state, _ in TURN.rows} == {state for state in TurnState if not state.is_terminal}


def test_only_a_shift_or_an_interruption_requeues_a_turn() -> None:
    """A running turn cannot start again."""
    assert TURN.rows[TurnState.QUEUED, TurnChange.START] is TurnState.RUNNING
    assert (TurnState.RUNNING, TurnChange.START) not in TURN.rows
    assert {change for (_, change), after in TURN.rows.items() if after is TurnState.QUEUED} == {
        TurnChange.SHIFT,
        TurnChange.INTERRUPT,
    }

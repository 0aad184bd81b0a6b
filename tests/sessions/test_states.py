"""The tables of sessions and turns."""

from __future__ import annotations

from inferencecenter.sessions.states import SESSION, TURN, SessionState, TurnChange, TurnState


def test_nothing_follows_a_terminal_state() -> None:
    """A session that is closed or expired and a turn that has ended stay so."""
    assert not {state for state, _ in SESSION.rows} & {SessionState.CLOSED, SessionState.EXPIRED}
    assert {state for state, _ in TURN.rows} == {state for state in TurnState if not state.is_terminal}


def test_a_running_turn_waits_again_with_a_shorter_prompt_or_another_engine() -> None:
    """Only a shift and the loss of its engine lead back to the queue, and nothing starts a running turn twice."""
    assert TURN.rows[TurnState.QUEUED, TurnChange.START] is TurnState.RUNNING
    assert (TurnState.RUNNING, TurnChange.START) not in TURN.rows
    assert {change for (_, change), after in TURN.rows.items() if after is TurnState.QUEUED} == {
        TurnChange.SHIFT,
        TurnChange.INTERRUPT,
    }

"""The transition table of the engine process."""

from __future__ import annotations

from inferencecenter.ipc.port import EngineState
from inferencecenter.supervisor.states import ENGINE, EngineChange


def test_ready_requires_a_start_and_any_state_can_stop() -> None:
    """Only a completed load leads to READY, and a stop leaves every state but DRAINING."""
    assert {pair for pair, after in ENGINE.rows.items() if after is EngineState.READY} == {
        (EngineState.STARTING, EngineChange.LOADED)
    }
    assert {state for state, change in ENGINE.rows if change is EngineChange.STOP} == set(EngineState) - {
        EngineState.DRAINING
    }

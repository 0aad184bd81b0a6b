"""The table of the engine process."""

from __future__ import annotations

from inferencecenter.ipc.port import EngineState
from inferencecenter.supervisor.states import ENGINE, EngineChange


def test_it_is_ready_only_after_it_started_and_can_always_be_stopped() -> None:
    """Nothing but a start that loaded leads to READY, and every state but DRAINING can be left by a stop."""
    assert {pair for pair, after in ENGINE.rows.items() if after is EngineState.READY} == {
        (EngineState.STARTING, EngineChange.LOADED)
    }
    assert {state for state, change in ENGINE.rows if change is EngineChange.STOP} == set(EngineState) - {
        EngineState.DRAINING
    }

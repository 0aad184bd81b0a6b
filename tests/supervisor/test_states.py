"""The table of the engine process."""

from __future__ import annotations

import itertools

import pytest

from inferencecenter.ipc.port import EngineState
from inferencecenter.supervisor.states import ENGINE_TABLE, EngineChange, IllegalTransitionError, engine_after


@pytest.mark.parametrize(("state", "change"), list(itertools.product(EngineState, EngineChange)))
def test_the_engine_changes_only_as_its_table_says(state: EngineState, change: EngineChange) -> None:
    """Every pair of state and change either has a row or raises."""
    if (state, change) in ENGINE_TABLE:
        assert engine_after(state, change) is ENGINE_TABLE[state, change]
    else:
        with pytest.raises(IllegalTransitionError, match=change.value):
            engine_after(state, change)


def test_it_is_ready_only_after_it_started_and_can_always_be_stopped() -> None:
    """Nothing but a start that loaded leads to READY, and every state but DRAINING can be left by a stop."""
    assert {pair for pair, after in ENGINE_TABLE.items() if after is EngineState.READY} == {
        (EngineState.STARTING, EngineChange.LOADED)
    }
    assert {state for state, change in ENGINE_TABLE if change is EngineChange.STOP} == set(EngineState) - {
        EngineState.DRAINING
    }

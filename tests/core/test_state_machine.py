"""Every lifecycle of the daemon with every pair of state and change."""

from __future__ import annotations

import itertools
from enum import StrEnum
from typing import Any

import pytest

from inferencecenter.core.state_machine import IllegalTransitionError, StateMachine
from inferencecenter.engine.scheduler.state import REQUEST
from inferencecenter.server.states import CONNECTION
from inferencecenter.sessions.states import SESSION, TURN
from inferencecenter.supervisor.states import ENGINE

PAIRS = [
    pytest.param(lifecycle, state, change, id=f"{lifecycle.name}-{state.value}-{change.value}")
    for lifecycle in (CONNECTION, SESSION, TURN, ENGINE, REQUEST)
    for state, change in itertools.product(type(next(iter(lifecycle.rows))[0]), type(next(iter(lifecycle.rows))[1]))
]


@pytest.mark.parametrize(("lifecycle", "state", "change"), PAIRS)
def test_every_pair_has_a_row_or_raises(lifecycle: StateMachine[Any, Any], state: Any, change: Any) -> None:
    """A pair in the table leads to a state of the same lifecycle; any other raises with both names."""
    if (state, change) in lifecycle.rows:
        assert type(lifecycle.next(state, change)) is type(state)
    else:
        with pytest.raises(IllegalTransitionError, match=f"{lifecycle.name}: {change.value} while {state.value}"):
            lifecycle.next(state, change)


@pytest.mark.parametrize("lifecycle", [CONNECTION, SESSION, TURN, ENGINE, REQUEST], ids=lambda each: each.name)
def test_every_state_is_reachable(lifecycle: StateMachine[Any, Any]) -> None:
    """Each is reachable from the state of the first row."""
    first: StrEnum = next(iter(lifecycle.rows))[0]
    reached, before = {first}, set[Any]()
    while reached != before:
        before = set(reached)
        reached |= {after for (state, _), after in lifecycle.rows.items() if state in reached}
    assert reached == set(type(first).__members__.values())

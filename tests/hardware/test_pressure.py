"""Memory pressure: every state and transition, the effect of eviction, and recovery."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.core.state_machine import IllegalTransitionError
from inferencecenter.hardware.pressure import (
    PRESSURE,
    SETTLED_S,
    MemoryUsage,
    Pressure,
    PressureChange,
    PressureState,
    next_pressure,
)

EASY, SHEDDING, FULL = PressureState
LEGAL = {
    (EASY, PressureChange.TIGHTENED): SHEDDING,
    (EASY, PressureChange.EXHAUSTED): FULL,
    (SHEDDING, PressureChange.EXHAUSTED): FULL,
    (FULL, PressureChange.RELIEVED): SHEDDING,
    (SHEDDING, PressureChange.RELIEVED): EASY,
}


def used(used_bytes: int, *, parked_bytes: int = 0) -> MemoryUsage:
    """Return a usage with a limit of 100 and a recovery level of 90."""
    return MemoryUsage(name="memory", used_bytes=used_bytes, limit_bytes=100, calm_bytes=90, parked_bytes=parked_bytes)


def states(*moments: tuple[float, int, int]) -> list[PressureState]:
    """Return the states after samples of used and offloaded bytes at these seconds."""
    pressure, seen = Pressure(), []
    for now, used_bytes, parked_bytes in moments:
        pressure = next_pressure(pressure, [used(used_bytes, parked_bytes=parked_bytes)], now=now)
        seen.append(pressure.state)
    return seen


@pytest.mark.parametrize("state", list(PressureState))
@pytest.mark.parametrize("change", list(PressureChange))
def test_only_listed_transitions_are_possible(state: PressureState, change: PressureChange) -> None:
    """Any other event raises."""
    if (state, change) in LEGAL:
        assert PRESSURE.next(state, change) is LEGAL[state, change]
    else:
        with pytest.raises(IllegalTransitionError):
            PRESSURE.next(state, change)


def test_use_up_to_the_limit_is_normal() -> None:
    """Neither time nor the size of the offloaded KV matters."""
    assert states((0, 0, 0), (1, 91, 91), (2, 100, 5), (1000, 100, 0)) == [EASY] * 4


def test_eviction_gets_one_sample() -> None:
    """A second sample over the limit makes it full."""
    assert states((0, 101, 1), (2, 101, 0)) == [SHEDDING, FULL]
    assert states((0, 101, 50), (2, 101, 50), (4, 500, 50)) == [SHEDDING, FULL, FULL]


def test_without_offloaded_kv_it_is_full_at_once() -> None:
    """There is nothing to evict."""
    assert states((0, 101, 0)) == [FULL]


def test_each_rise_allows_another_eviction() -> None:
    """Eviction may help again."""
    assert states((0, 101, 9), (2, 90, 2), (4, 101, 2), (6, 95, 1), (8, 101, 1), (10, 101, 0)) == [SHEDDING] * 5 + [
        FULL
    ]


def test_recovery_admits_turns() -> None:
    """Turns start at once; offloading resumes after the settling time."""
    moments = ((0, 101, 0), (2, 91, 0), (4, 90, 0), (SETTLED_S - 1, 0, 0), (SETTLED_S, 0, 0))
    assert states(*moments) == [FULL, FULL, SHEDDING, SHEDDING, EASY]


def test_full_state_ends_below_the_limit() -> None:
    """A model that uses so much by itself would otherwise never run again."""
    moments = ((0, 101, 0), (2, 95, 0), (SETTLED_S - 1, 95, 0), (SETTLED_S, 95, 0), (SETTLED_S + 2, 95, 0))
    assert states(*moments) == [FULL, FULL, FULL, SHEDDING, EASY]


def test_settling_restarts_after_an_excess() -> None:
    """The time counts from the last sample over the limit."""
    moments = ((0, 101, 9), (20, 101, 0), (SETTLED_S + 1, 95, 0), (SETTLED_S + 20, 95, 0))
    assert states(*moments) == [SHEDDING, FULL, FULL, SHEDDING]


def test_every_kind_of_memory_counts() -> None:
    """One over its limit without offloaded KV makes it full; recovery needs all."""
    gpu = MemoryUsage(name="GPU 0", used_bytes=11, limit_bytes=10, calm_bytes=9)
    assert next_pressure(Pressure(), [used(0), gpu], now=0.0).state is FULL
    assert next_pressure(Pressure(), [used(101, parked_bytes=5), gpu], now=0.0).state is FULL
    full = Pressure(state=FULL, over_at_s=0.0)
    assert (
        next_pressure(
            full, [used(0), MemoryUsage(name="GPU 0", used_bytes=10, limit_bytes=10, calm_bytes=9)], now=1.0
        ).state
        is FULL
    )
    assert (
        next_pressure(
            full, [used(0), MemoryUsage(name="GPU 0", used_bytes=9, limit_bytes=10, calm_bytes=9)], now=1.0
        ).state
        is SHEDDING
    )


def test_unknown_use_is_no_pressure() -> None:
    """Without figures the state recovers in order."""
    assert next_pressure(Pressure(), [], now=0.0).state is EASY
    assert next_pressure(Pressure(state=FULL, is_over=True, over_at_s=0.0), [], now=1.0).state is SHEDDING


def test_sample_is_kept() -> None:
    """The readings have its figures by name."""
    pressure = next_pressure(Pressure(), [used(50)], now=0.0)
    assert pressure.usage("memory") == used(50)
    assert pressure.usage("GPU 0") is None


@pytest.mark.parametrize(
    ("used_bytes", "parked_bytes", "kept_bytes"),
    [(101, 50, 39), (101, 11, 0), (101, 5, 0), (90, 50, 50), (50, 50, 50), (1000, 0, 0)],
)
def test_eviction_reaches_the_recovery_level(used_bytes: int, parked_bytes: int, kept_bytes: int) -> None:
    """If that is not possible, everything is evicted."""
    assert used(used_bytes, parked_bytes=parked_bytes).kept_bytes == kept_bytes


@given(st.lists(st.tuples(st.floats(0, 40), st.integers(0, 120), st.integers(0, 20)), max_size=60))
def test_state_sequences_are_valid(moments: list[tuple[float, int, int]]) -> None:
    """Any samples step down one state at a time, and end normal."""
    pressure, now, order = Pressure(), 0.0, list(PressureState)
    history = [pressure]
    for wait_s, used_bytes, parked_bytes in moments:
        now += wait_s
        pressure = next_pressure(pressure, [used(used_bytes, parked_bytes=parked_bytes)], now=now)
        history.append(pressure)
        assert pressure.is_over == (used_bytes > 100)
        assert not pressure.is_over or pressure.state is not EASY
    for before, after in pairwise(history):
        assert order.index(before.state) - order.index(after.state) <= 1
        if after.state is FULL and before.state is not FULL:
            assert before.is_over or after.usages[0].parked_bytes == 0
    for looks in (2, 3):
        pressure = next_pressure(pressure, [used(100)], now=now + SETTLED_S * looks)
    assert pressure.state is EASY

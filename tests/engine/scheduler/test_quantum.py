"""The quantum: how long a turn keeps its slot."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.engine.scheduler.scheduler import Quantum
from tests.engine.scheduler.harness import SchedulerHarness


def test_configured_quantum_is_kept() -> None:
    """The cost of offloading does not change it."""
    quantum = Quantum(7)
    quantum.observe(moves=2, moves_s=1.0, generated_tokens=4, decode_s=0.1)
    assert quantum.tokens == 7


@pytest.mark.parametrize(
    ("moves", "moves_s", "generated_tokens", "decode_s"), [(0, 0.0, 4, 0.1), (2, 0.1, 0, 0.0), (2, 0.0, 4, 0.0)]
)
def test_first_quantum_is_32_tokens(moves: int, moves_s: float, generated_tokens: int, decode_s: float) -> None:
    """It stays until both times have been measured."""
    quantum = Quantum(0)
    quantum.observe(moves=moves, moves_s=moves_s, generated_tokens=generated_tokens, decode_s=decode_s)
    assert quantum.tokens == 32


@given(
    move_s=st.floats(1e-5, 0.1),
    slots=st.integers(1, 32),
    step_s=st.floats(0.001, 0.5),
)
def test_quantum_bounds_the_offload_overhead(move_s: float, slots: int, step_s: float) -> None:
    """Each slot is saved and restored once per quantum; within the limits that takes at most 3 % of the time."""
    quantum = Quantum(0)
    quantum.observe(moves=4, moves_s=4 * move_s, generated_tokens=slots, decode_s=step_s)
    share = slots * 2 * move_s / (quantum.tokens * step_s)
    assert 16 <= quantum.tokens <= 512
    assert quantum.tokens == 512 or share <= 0.03 + 1e-9
    assert quantum.tokens == 16 or (quantum.tokens - 1) * step_s * 0.03 < slots * 2 * move_s + 1e-9


def test_one_slow_move_decays() -> None:
    """The first save into fresh memory takes ten times as long as the others."""
    quantum = Quantum(0)
    for moves_s in (0.04, *[0.004] * 20):
        quantum.observe(moves=2, moves_s=moves_s, generated_tokens=8, decode_s=0.08)
    assert 16 <= quantum.tokens <= 17


def test_quantum_follows_measured_moves() -> None:
    """Preempted turns provide the measurements."""
    world = SchedulerHarness(slots=1, quantum_tokens=0, answer_tokens=60, n_ctx=200)
    world.store.limit_tokens = 200
    for n in range(2):
        world.add([100 * n, 1])
    assert world.scheduler.quantum_tokens == 32
    for _ in range(100):
        world.step(move_s=0.03)
    assert world.scheduler.quantum_tokens == 20

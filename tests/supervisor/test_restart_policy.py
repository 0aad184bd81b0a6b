"""The number of restarts, and the layers on the GPU of each."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.supervisor.lifecycle import RestartBudget, fewer_layers, lacks_memory


def test_restarts_within_the_window_are_bounded() -> None:
    """One more is refused; restarts before the window do not count."""
    budget = RestartBudget(max_restarts=2, window_s=10.0)
    assert [budget.take(now=now) for now in (0.0, 9.0, 10.0)] == [True, True, False]
    assert [budget.take(now=now) for now in (10.5, 11.0, 19.5)] == [True, False, True]


def test_restarts_of_a_removed_cause_are_not_counted() -> None:
    """After it was found, all restarts are available again."""
    budget = RestartBudget(max_restarts=1, window_s=600.0)
    assert budget.take(now=0.0)
    budget.clear()
    assert budget.take(now=1.0)
    assert not budget.take(now=2.0)


def test_limit_of_zero_allows_no_restart() -> None:
    """The engine is marked as failed at its first loss."""
    assert not RestartBudget(max_restarts=0, window_s=600.0).take(now=0.0)


@pytest.mark.parametrize(
    ("current", "known", "fewer"),
    [(-1, None, 32), (-1, 24, 12), (12, 24, 6), (99, 24, 12), (99, None, 49), (1, 24, 0), (1, None, 0), (0, 24, 0)],
)
def test_layers_are_halved(current: int, known: int | None, fewer: int) -> None:
    """All layers are those of the model, or 64 if unknown; a larger number counts as all."""
    assert fewer_layers(current, known) == fewer


@given(current=st.integers(-1, 1000), known=st.none() | st.integers(0, 200))
def test_layers_decrease_to_the_cpu(current: int, known: int | None) -> None:
    """Each attempt uses fewer layers than the one before, and the last one none."""
    attempts = [current]
    while attempts[-1] != 0:
        attempts.append(fewer_layers(attempts[-1], known))
    assert attempts[1:] == sorted(set(attempts[1:]), reverse=True)
    assert len(attempts) <= 12


@pytest.mark.parametrize(
    ("reason", "lacks"),
    [
        ("llama.cpp: unable to allocate CUDA0 buffer", True),
        ("ggml_backend_cuda_buffer_type_alloc_buffer: allocating 998.00 MiB on device 0: cudaMalloc failed", True),
        ("ErrorOutOfDeviceMemory", True),
        ("CUDA error: out of memory", True),
        ("model.gguf is not a GGUF file", False),
        ("unknown model architecture: 'nope'", False),
    ],
)
def test_out_of_memory_messages_of_llama_cpp_are_recognized(reason: str, *, lacks: bool) -> None:
    """Errors about the file are not among them."""
    assert lacks_memory(reason) is lacks

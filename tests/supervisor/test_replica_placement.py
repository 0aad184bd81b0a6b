"""Which replica runs a turn."""

from __future__ import annotations

import pytest

from inferencecenter.ipc.messages import EmbeddingDone, Finished, StepOutput, StepStats
from inferencecenter.supervisor.replica_placement import ReplicaLoad, ReplicaRates, choose_replica


def load(turns: int, *, startup_s: float = 0.0, held_s: float = 10.0, prefill_token_s: float = 0.001) -> ReplicaLoad:
    """Return the load of a replica with four slots."""
    return ReplicaLoad(turns=turns, slots=4, startup_s=startup_s, held_s=held_s, prefill_token_s=prefill_token_s)


@pytest.mark.parametrize(
    ("turns", "chosen"),
    [((0, 0), 0), ((1, 0), 1), ((3, 2), 1), ((2, 2, 1), 2), ((9, 8), 1), ((4, 4), 0)],
)
def test_new_session_goes_to_the_least_work(turns: tuple[int, ...], chosen: int) -> None:
    """Ties go to the first."""
    assert choose_replica([load(each) for each in turns]) == chosen


def test_work_is_time_and_not_turns() -> None:
    """A replica whose turns end sooner may have more of them."""
    assert choose_replica([load(6, held_s=10.0), load(8, held_s=1.0)]) == 1


def test_session_returns_to_its_kv_while_slots_are_free() -> None:
    """However few turns the other has."""
    assert choose_replica([load(0), load(3)], holder=1, n_tokens=1) == 1


@pytest.mark.parametrize(("n_tokens", "chosen"), [(3001, 1), (2999, 0), (0, 0)])
def test_session_moves_where_it_runs_sooner(n_tokens: int, chosen: int) -> None:
    """Four turns ahead of it take 10 s at its KV, 9 s more than a wait of 1 s and prefill of 3 s that counts thrice."""
    loads = [load(4, held_s=4.0), load(7)]
    assert choose_replica(loads, holder=1, n_tokens=n_tokens) == chosen


def test_prefill_takes_as_long_as_on_the_other_replica() -> None:
    """The rate of the holder does not matter: it prefills nothing."""
    loads = [load(0, prefill_token_s=0.01), load(7, prefill_token_s=0.0001)]
    assert choose_replica(loads, holder=1, n_tokens=1000) == 1
    assert choose_replica(list(reversed(loads)), holder=0, n_tokens=1000) == 0


def test_sleeping_replica_is_woken_when_that_is_sooner() -> None:
    """Loading it counts as waiting."""
    assert choose_replica([load(3), load(0, startup_s=5.0)]) == 0
    assert choose_replica([load(7), load(0, startup_s=5.0)]) == 1


def test_preferred_replica_wins_ties_only() -> None:
    """A session whose KV was lost goes back where the rest of it may be parked."""
    assert choose_replica([load(1), load(1)], preferred=1) == 1
    assert choose_replica([load(1), load(2)], preferred=1) == 0


def test_rates_are_measured() -> None:
    """How long turns hold a slot, and what a token of prefill takes; the newest figure counts a fifth."""
    rates = ReplicaRates()
    assert (rates.held_s, rates.prefill_token_s, rates.load_s) == (None, None, None)
    end = Finished(
        turn_id="t1",
        reason="stop",
        stop=None,
        kept_tokens=0,
        kept_chars=0,
        end_text="",
        prompt_tokens=1,
        cached_tokens=0,
        generated_tokens=1,
        queue_ms=500,
        ttft_ms=0,
        total_ms=2500,
        tokens_per_s=0,
    )
    work = StepStats(step_s=1.0, prefill_tokens=100, prefill_s=0.5)
    rates.step(StepOutput(events=(end,), running=0, waiting=0, rss_bytes=0, work=work))
    rates.loaded(3.0)
    assert (rates.held_s, rates.prefill_token_s, rates.load_s) == (2.0, 0.005, 3.0)
    idle = StepStats(step_s=1.0)
    done = EmbeddingDone("e1", queue_ms=0, total_ms=7000)
    rates.step(StepOutput(events=(done,), running=0, waiting=0, rss_bytes=0, work=idle))
    assert (rates.held_s, rates.prefill_token_s) == (3.0, 0.005)

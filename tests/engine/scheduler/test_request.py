"""The life of a request."""

from __future__ import annotations

import pytest

from inferencecenter.core.state_machine import IllegalTransitionError
from inferencecenter.engine.scheduler.state import REQUEST, EngineRequest, RequestChange, RequestState


def make_request(n_tokens: int) -> EngineRequest:
    """A waiting request with a prompt of ``n_tokens``."""
    return EngineRequest(
        turn_id="t", session_id="s", client_id="c", priority=0, arrival=1, submitted_s=0.0, tokens=list(range(n_tokens))
    )


def test_request_follows_its_transition_table() -> None:
    """A turn goes from waiting through prefill and decode to its end; an unlisted change raises and has no effect."""
    request = make_request(10)
    for change, state in (
        (RequestChange.ADMIT, RequestState.PREFILL),
        (RequestChange.PROMPT_READ, RequestState.DECODE),
        (RequestChange.END, RequestState.DONE),
    ):
        request.change(change)
        assert request.state is state
    with pytest.raises(IllegalTransitionError):
        request.change(RequestChange.ADMIT)
    assert request.state is RequestState.DONE


def test_preempted_request_resumes() -> None:
    """It waits again, perhaps for the disk, and decodes at once if no KV is missing."""
    request = make_request(10)
    for change, state in (
        (RequestChange.ADMIT, RequestState.PREFILL),
        (RequestChange.PREEMPT, RequestState.WAITING),
        (RequestChange.FETCH, RequestState.RESTORING),
        (RequestChange.FETCHED, RequestState.WAITING),
        (RequestChange.RESUME, RequestState.DECODE),
        (RequestChange.KV_LOST, RequestState.PREFILL),
        (RequestChange.PROMPT_READ, RequestState.DECODE),
        (RequestChange.PREEMPT, RequestState.WAITING),
    ):
        request.change(change)
        assert request.state is state
    for change in (RequestChange.FETCHED, RequestChange.KV_LOST, RequestChange.PREEMPT, RequestChange.PROMPT_READ):
        with pytest.raises(IllegalTransitionError):
            request.change(change)


def test_every_state_but_the_last_can_end() -> None:
    """A turn can be aborted in any state, and nothing follows its end."""
    ending = {state for state, change in REQUEST.rows if change is RequestChange.END}
    assert ending == set(RequestState) - {RequestState.DONE}
    assert not [state for state, _ in REQUEST.rows if state is RequestState.DONE]


def test_lengths_follow_from_the_tokens() -> None:
    """Generated and pending counts are derived, never stored."""
    request = make_request(3)
    assert (request.prompt_tokens, request.generated_tokens, request.pending_tokens) == (3, 0, 3)
    request.kv_tokens = 3
    request.tokens.append(4)
    assert (request.prompt_tokens, request.generated_tokens, request.pending_tokens) == (3, 1, 1)


@pytest.mark.parametrize(("start", "end"), [(0, 4), (1, 4), (2, 8), (3, 8), (4, 8), (6, 10), (8, 10), (9, 10)])
def test_chunks_end_at_the_grid_or_with_the_prompt(start: int, end: int) -> None:
    """A chunk ends at the next multiple of the grid that is more than half a cell away."""
    request = make_request(10)
    assert request.chunk_end(start, 4) == end


@pytest.mark.parametrize(("start", "end"), [(0, 4), (3, 6), (4, 6), (5, 6), (6, 10), (8, 10)])
def test_boundary_beside_the_grid_ends_a_chunk(start: int, end: int) -> None:
    """The next chunk ends at the grid again."""
    request = make_request(10)
    request.cut_tokens = 6
    assert request.chunk_end(start, 4) == end


def test_prefill_stops_at_a_pending_snapshot() -> None:
    """After the snapshot the prefill may continue to the end of the prompt."""
    request = make_request(10)
    assert request.step_end == 10
    request.cut_tokens, request.snapshot = 6, True
    assert request.step_end == 6
    request.kv_tokens = 6
    assert request.step_end == 10


@pytest.mark.parametrize(("priority", "base_class"), [(-(10**9), 0), (0, 0), (1, 1), (2, 2), (10**9, 2)])
def test_priority_is_clamped_to_three_classes(priority: int, base_class: int) -> None:
    """Any other value is mapped to the nearest class."""
    request = make_request(1)
    request.priority = priority
    assert request.base_class == base_class


@pytest.mark.parametrize(("now", "periods"), [(0.0, 0), (2.9, 0), (3.0, 1), (8.9, 2), (9.0, 3), (1e9, 3)])
def test_request_ages(now: float, periods: int) -> None:
    """Two periods of 3 s lead from the lowest class to the highest, one more makes it the first there."""
    request = make_request(1)
    request.priority = 2
    assert request.periods(now, 3.0) == periods

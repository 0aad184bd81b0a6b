"""The life of a request."""

from __future__ import annotations

import pytest

from inferencecenter.engine.scheduler.request import REQUEST, Request, RequestChange, RequestState
from inferencecenter.lifecycle import IllegalTransitionError


def make_request(n_tokens: int) -> Request:
    """A waiting request with a prompt of ``n_tokens``."""
    return Request(
        turn_id="t", session_id="s", client_id="c", priority=0, arrival=1, submitted_s=0.0, tokens=list(range(n_tokens))
    )


def test_a_request_moves_along_its_table() -> None:
    """From waiting through prefill and decode to its end; whatever the table does not list raises and stays."""
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


def test_every_state_can_end_but_the_end() -> None:
    """A turn can be aborted wherever it is, and nothing follows its end."""
    ending = {state for state, change in REQUEST.rows if change is RequestChange.END}
    assert ending == set(RequestState) - {RequestState.DONE}
    assert not [state for state, _ in REQUEST.rows if state is RequestState.DONE]


def test_lengths_follow_from_the_tokens() -> None:
    """What was generated and what is pending is derived, never stored."""
    request = make_request(3)
    assert (request.prompt_tokens, request.generated_tokens, request.pending_tokens) == (3, 0, 3)
    request.kv_tokens = 3
    request.tokens.append(4)
    assert (request.prompt_tokens, request.generated_tokens, request.pending_tokens) == (3, 1, 1)


@pytest.mark.parametrize(("start", "end"), [(0, 4), (1, 4), (3, 4), (4, 8), (8, 10), (9, 10)])
def test_chunks_end_at_the_grid_or_with_the_prompt(start: int, end: int) -> None:
    """A chunk never crosses a multiple of the grid."""
    request = make_request(10)
    assert request.chunk_end(start, 4) == end

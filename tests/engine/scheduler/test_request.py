"""The life of a request."""

from __future__ import annotations

from itertools import product

import pytest

from inferencecenter.engine.scheduler.request import TRANSITIONS, IllegalTransitionError, Request, RequestState

PATH = [RequestState.WAITING, RequestState.PREFILL, RequestState.DECODE, RequestState.DONE]


def request_in(state: RequestState) -> Request:
    """Return a request that went the usual way to ``state``."""
    request = Request(turn_id="t", session_id="s", priority=0, arrival=1, tokens=[1, 2, 3])
    for each in PATH[1 : PATH.index(state) + 1]:
        request.become(each)
    return request


@pytest.mark.parametrize(("before", "after"), list(product(RequestState, RequestState)))
def test_only_transitions_of_the_table_are_possible(before: RequestState, after: RequestState) -> None:
    """Every pair of states either moves or raises and stays, as the table says."""
    request = request_in(before)
    if after in TRANSITIONS[before]:
        request.become(after)
        assert request.state is after
    else:
        with pytest.raises(IllegalTransitionError, match=f"{before.value} -> {after.value}"):
            request.become(after)
        assert request.state is before


def test_every_state_can_end_but_the_end() -> None:
    """A turn can be aborted wherever it is, and nothing follows its end."""
    assert all(RequestState.DONE in TRANSITIONS[state] for state in PATH[:-1])
    assert not TRANSITIONS[RequestState.DONE]


def test_lengths_follow_from_the_tokens() -> None:
    """What was generated and what is pending is derived, never stored."""
    request = request_in(RequestState.WAITING)
    assert (request.prompt_tokens, request.generated_tokens, request.pending_tokens) == (3, 0, 3)
    request.kv_tokens = 3
    request.tokens.append(4)
    assert (request.prompt_tokens, request.generated_tokens, request.pending_tokens) == (3, 1, 1)


@pytest.mark.parametrize(("start", "end"), [(0, 4), (1, 4), (3, 4), (4, 8), (8, 10), (9, 10)])
def test_chunks_end_at_the_grid_or_with_the_prompt(start: int, end: int) -> None:
    """A chunk never crosses a multiple of the grid."""
    request = Request(turn_id="t", session_id="s", priority=0, arrival=1, tokens=list(range(10)))
    assert request.chunk_end(start, 4) == end

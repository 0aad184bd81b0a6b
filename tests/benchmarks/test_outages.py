"""Outages of engine kills, compared with hand-computed times."""

from __future__ import annotations

import pytest

from benchmarks.observed_turn import Difference
from benchmarks.outages import Outage, Stream


def stream(*times_s: float, prompt_tokens: int = 100, tokens: int | None = None) -> Stream:
    """Return a turn with the expected texts."""
    return Stream(
        times_s=times_s,
        prompt_tokens=prompt_tokens,
        tokens=len(times_s) if tokens is None else tokens,
        finishes=("length",),
        against_transcript=Difference(),
        against_undisturbed=Difference(),
        misnumbered=0,
    )


def outage(*streams: Stream) -> Outage:
    """Return an outage: killed at 10, loading from 11, ready at 13."""
    return Outage(killed_s=10, started_s=11, ready_s=13, streams=streams)


def test_gap_is_the_pause_after_the_kill() -> None:
    """Text in flight still arrives; longer pauses before and after belong to other causes."""
    assert outage(stream(1, 9, 10.1, 14.1, 20)).gaps_s() == (4.0,)


def test_ended_streams_have_no_gap() -> None:
    """Streams whose last piece arrived after the kill have none, either."""
    assert outage(stream(1, 2, 9), stream()).gaps_s() == ()
    assert outage(stream(1, 9), stream(8, 14)).gaps_s() == (6,)


def test_streams_without_text_are_waiting() -> None:
    """They wait from the kill to their first text."""
    found = outage(stream(14.5, 15), stream(9, 14))

    assert found.waits_s() == (4.5,)
    assert found.gaps_s() == (5,)


def test_context_of_running_turns_is_prefilled_again() -> None:
    """Prompt and generated tokens of turns that ran at the kill are counted, and those of other turns are not."""
    found = outage(stream(8, 9, 14, 15, tokens=8), stream(14, 15, tokens=4), stream(1, 2))

    assert found.tokens_to_read() == pytest.approx(100 + 4 + 100)


def test_overhead_excludes_loading_and_prefill() -> None:
    """A pause of 6 s has 2 s of loading and 102 tokens at 51 a second, which leaves 2 s."""
    found = outage(stream(8, 9, 15, 16))

    assert found.beyond_s(prefill_tok_s=51) == pytest.approx(6 - 2 - 2)
    assert outage(stream(1, 2)).beyond_s(prefill_tok_s=51) is None

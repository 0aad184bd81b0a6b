"""Tests of ``bench.outages``, against times worked out by hand."""

from __future__ import annotations

import pytest

from benchmarks.outages import Outage, Stream
from benchmarks.shown import Difference


def stream(*times_s: float, prompt_tokens: int = 100, tokens: int | None = None) -> Stream:
    """A turn whose texts are as they should be."""
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
    """Killed at 10; the next engine began to load at 11 and was ready at 13."""
    return Outage(killed_s=10, started_s=11, ready_s=13, streams=streams)


def test_the_gap_is_the_pause_that_the_kill_made() -> None:
    """What was on its way at the kill still arrives; longer pauses before and after are not the kill's."""
    assert outage(stream(1, 9, 10.1, 14.1, 20)).gaps_s() == (4.0,)


def test_streams_that_had_ended_have_no_gap() -> None:
    """Nor have those whose last piece arrived after the kill and was all."""
    assert outage(stream(1, 2, 9), stream()).gaps_s() == ()
    assert outage(stream(1, 9), stream(8, 14)).gaps_s() == (6,)


def test_streams_without_text_wait() -> None:
    """From the kill to their first text."""
    found = outage(stream(14.5, 15), stream(9, 14))

    assert found.waits_s() == (4.5,)
    assert found.gaps_s() == (5,)


def test_all_that_was_in_the_contexts_has_to_be_read() -> None:
    """Prompts of those that ran, and their tokens so far: half of 8, and none of 4."""
    found = outage(stream(8, 9, 14, 15, tokens=8), stream(14, 15, tokens=4), stream(1, 2))

    assert found.tokens_to_read() == pytest.approx(100 + 4 + 100)


def test_what_is_beyond_loading_and_reading() -> None:
    """A pause of 6 seconds, 2 of loading, 102 tokens at 51 a second."""
    found = outage(stream(8, 9, 15, 16))

    assert found.beyond_s(prefill_tok_s=51) == pytest.approx(6 - 2 - 2)
    assert outage(stream(1, 2)).beyond_s(prefill_tok_s=51) is None

"""Tests of ``bench.scenarios``: from traces to results, by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from inferencecenter.bench.daemon_process import DaemonUsage
from inferencecenter.bench.jobs import Aborted, Round, Turns
from inferencecenter.bench.scenarios import (
    SCENARIOS,
    abort,
    burst,
    context,
    find,
    gateway,
    idle,
    interference,
    overload,
    parking,
    returning,
    shared_prefix,
    sparse,
    throughput,
)
from inferencecenter.bench.stage import Measured
from inferencecenter.bench.target import AbortTrace, TurnTrace
from inferencecenter.bench.usage import Usage
from inferencecenter.errors import InferenceCenterError
from tests.bench.test_timeline import turn

if TYPE_CHECKING:
    from inferencecenter.bench.results import Result

BEFORE = DaemonUsage(front=Usage(cpu_s=1.0, rss_bytes=10**7), engine=Usage(cpu_s=2.0, rss_bytes=2 * 10**7))
AFTER = DaemonUsage(front=Usage(cpu_s=1.5, rss_bytes=2 * 10**7), engine=Usage(cpu_s=6.0, rss_bytes=3 * 10**7))


def measured(*clients: list[TurnTrace]) -> Measured[Turns]:
    """What the generator saw, between two readings of the daemon."""
    return Measured(Turns(tuple(tuple(turns) for turns in clients), cpu_s=0.25), BEFORE, AFTER, vram_bytes=None)


def values(result: Result) -> dict[str, float]:
    """A result's numbers by name."""
    return {metric.name: metric.value for metric in result.metrics()}


def test_throughput_counts_the_busy_time() -> None:
    """Window from 4 to 8 seconds: 5 pieces of 10 tokens; delays before it, and turns begun before it, are left out."""
    early = [turn(0, 1), turn(1, 3, 6, 8, tokens=6)]
    late = [turn(0, 4), turn(4, 6, 7, 8, tokens=6)]
    found = throughput.read(measured(early, late))

    assert found.tok_s == pytest.approx(10 / 4)
    assert found.ttft_ms == (2000,)
    assert found.itl_ms == (2000, 1000, 1000)
    assert values(found) == {
        "generation": 2.5,
        "TTFT p50": 2000,
        "TTFT p95": 2000,
        "TTFT p99": 2000,
        "TTFT worst": 2000,
        "ITL p50": 1000,
        "ITL p95": 2000,
        "ITL p99": 2000,
        "ITL worst": 2000,
        "turns": 1,
        "CPU generator": 0.25,
        "CPU front": 0.5,
        "CPU engine": 4.0,
    }


def test_a_burst_has_two_rates() -> None:
    """Six tokens in five seconds; three of them in the two seconds in which both decode."""
    found = burst.read(measured([turn(10, 11, 13, 14)], [turn(10, 12, 13, 15)]))

    assert found.total_tok_s == pytest.approx(6 / 5)
    assert found.decode_tok_s == pytest.approx(3 / 2)
    assert found.ttft_ms == (1000, 2000)


def test_a_burst_whose_turns_never_all_decode_has_no_decode_rate() -> None:
    """One had ended before the other began to answer."""
    found = burst.read(measured([turn(0, 1, 2)], [turn(0, 3, 4)]))

    assert found.decode_tok_s is None
    assert "decode only" not in values(found)


def test_overload_has_waits_pauses_and_distances() -> None:
    """Six tokens in eight seconds; the first user's pause while the second has its slot is the worst gap."""
    found = overload.read(measured([turn(0, 1, 2, 6)], [turn(0, 4, 5, 8)]))

    assert found.total_tok_s == pytest.approx(6 / 8)
    assert found.ttft_ms == (1000, 4000)
    assert values(found)["ITL worst"] == 4000
    assert values(found)["users apart"] == 2
    assert values(found)["CPU engine"] == 4.0


def test_interference_parts_the_streams_delays_at_the_newcomer() -> None:
    """It comes at 4 and has text at 9; a pause from 3.5 to 9.5 is meanwhile, what was over by 4 is before."""
    streams = [turn(0, 1, 2, 3.5, 9.5, 10), turn(0, 2, 3, 4, 8, 12)]
    found = interference.read(measured(*([stream] for stream in streams), [turn(4, 9, 11)]))

    assert found.newcomer_ttft_ms == 5000
    assert found.before_ms == (1500, 1000, 1000)
    assert found.meanwhile_ms == (6000, 4000, 4000)
    assert values(found)["ITL meanwhile worst"] == 6000
    assert values(found)["ITL before p50"] == 1000


def test_interference_wants_streams_that_outlast_the_newcomers_wait() -> None:
    """A pause whose end nobody saw would be left out."""
    with pytest.raises(InferenceCenterError, match="--max-tokens: a stream ended"):
        interference.read(measured([turn(0, 1, 2, 9)], [turn(0, 1, 2, 12)], [turn(4, 9, 11)]))


def test_a_shared_prefix_is_there_when_all_have_text() -> None:
    """From the first request at 10 to the last first text at 14; 130 of 200 tokens were read."""
    found = shared_prefix.read(measured([turn(10, 12, 20, cached=0)], [turn(10.5, 14, 15, cached=70)]))

    assert values(found)["until all have text"] == 4
    assert found.ttft_ms == (2000, 3500)
    assert values(found)["prompt tokens read"] == 130
    unknown = shared_prefix.read(measured([turn(10, 12)], [turn(10.5, 14)]))
    assert "prompt tokens read" not in values(unknown)


def test_returning_parts_the_first_turns_from_the_later_ones() -> None:
    """Two conversations of three turns, of which the later ones read 30, 100, 30 and 100 tokens."""
    one = [turn(0, 2, cached=0), turn(10, 10.5, cached=70), turn(20, 20.25, cached=0)]
    other = [turn(2, 5, cached=0), turn(12, 12.75, cached=70), turn(22, 23, cached=0)]
    found = returning.read(measured(one, other))

    assert found.first_ttft_ms == (2000, 3000)
    assert found.later_ttft_ms == (500, 250, 750, 1000)
    assert found.read_each_later_tokens == 65
    assert values(found)["TTFT later turns p50"] == 500


def test_sparse_counts_the_time_in_which_all_speakers_decode() -> None:
    """Two rounds of two of three sessions: 4 tokens in the 2 seconds of one, 4 in the 5 seconds of the other."""
    rounds = (Round(100, 1), Round(16, 4, clients=(0, 2)), Round(16, 4, clients=(1, 2)))
    first = [turn(0, 1, cached=0), turn(10, 11, 12, 13, 14, cached=90)]
    second = [turn(0, 1, cached=0), turn(20, 21, 25, 26, cached=70)]
    third = [turn(0, 1, cached=0), turn(10, 10.5, 12, 13, cached=80), turn(20, 20.5, 23, 24.5, 27, cached=80)]
    found = sparse.read(measured(first, second, third), rounds=rounds)

    # From 11 to 13 two tokens of each; from 21 to 26 two of each again.
    assert found.decode_tok_s == pytest.approx((4 + 4) / (2 + 5))
    assert found.read_each_tokens == 20
    assert len(found.itl_ms) == 3 + 2 + 2 + 3


def test_sparse_without_a_common_time_has_no_rate() -> None:
    """One had ended before the other began to answer."""
    rounds = (Round(100, 1), Round(16, 2))
    found = sparse.read(measured([turn(0, 1), turn(2, 3, 4)], [turn(0, 1), turn(2, 5, 6)]), rounds=rounds)

    assert found.decode_tok_s is None
    assert "decode only" not in values(found)


def test_speakers_are_drawn_by_a_seed() -> None:
    """The same for the same seed, other ones in other rounds, in ascending order."""
    found = sparse.drawn(16, 8, rounds=6, seed=8)

    assert found == sparse.drawn(16, 8, rounds=6, seed=8) != sparse.drawn(16, 8, rounds=6, seed=9)
    assert len(set(found)) == 6
    assert all(list(each) == sorted(set(each)) and len(each) == 8 for each in found)
    assert all(0 <= speaker < 16 for each in found for speaker in each)


def test_parking_compares_both_ways_of_the_same_work() -> None:
    """In groups 8 tokens in 4 and 6 seconds, at once in 5 and 7; the reading before is nobody's."""
    first = [turn(0, 3), turn(10, 11, 12), turn(20, 21, 24), turn(30, 31, 37), turn(40, 41, 43, cached=80)]
    second = [turn(3, 6), turn(12, 13, 14), turn(20, 22, 25), turn(30, 33, 34), turn(43, 44, 46, cached=80)]
    found = parking.read(measured(first, second))

    assert found.grouped_tok_s == pytest.approx(8 / 10)
    assert found.shared_tok_s == pytest.approx(8 / 12)
    assert found.apart_tokens == 1
    assert values(found)["all at once / in groups"] == pytest.approx(10 / 12)
    assert "tokens read, in groups" not in values(found)


def test_context_reads_first_and_decodes_then() -> None:
    """200 tokens in four seconds, then two tokens in the one second in which both decode."""
    found = context.read(measured([turn(0, 2), turn(10, 11, 12)], [turn(0, 4), turn(10, 11, 12)]))

    assert found.prefill_tok_s == 50
    assert found.decode_tok_s == 2
    assert values(found)["RSS engine"] == 30
    assert "VRAM in use" not in values(found)


def test_abort_delays_and_steps() -> None:
    """From the request to the end; steps are the distances of what came before the request."""
    traces = (
        AbortTrace(started_s=0, token_times_s=(1.0, 1.5, 2.0, 9.0), aborted_s=2.0, ended_s=2.25),
        AbortTrace(started_s=0, token_times_s=(), aborted_s=1.0, ended_s=1.5),
    )
    found = abort.read(Measured(Aborted(traces, cpu_s=0.1)))

    assert found.abort_ms == (250, 500)
    assert found.step_ms == 500
    reading = abort.read(Measured(Aborted(traces[1:], cpu_s=0.1)))
    assert values(reading)["first chunk"] == 1000
    assert "step" not in values(reading)


def test_gateway_divides_the_fronts_cpu_by_all_frames() -> None:
    """0.5 seconds for ten frames, warm-up included; four of them in the busy two seconds, with two tokens each."""
    early = [turn(0, 1, tokens=2), turn(1, 2.5, 3, 3.5, 4, tokens=8)]
    late = [turn(0, 2, tokens=2), turn(2, 3.5, 4.5, 5, 6, tokens=8)]
    found = gateway.read(measured(early, late))

    assert found.front_us_per_frame == pytest.approx(50_000)
    assert found.frames_s == pytest.approx(5 / 2)
    assert found.tokens_per_frame == 2


def test_idle_is_scaled_to_a_minute() -> None:
    """Half a second and four seconds of CPU in half a minute."""
    found = idle.read(BEFORE, AFTER, duration_s=30)

    assert (found.front_s_per_minute, found.engine_s_per_minute) == (1.0, 8.0)
    assert values(found)["CPU"] == 9.0


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_takes_what_it_has_defaults_for(name: str) -> None:
    """A default that cannot be changed is a setting nobody finds; the gateway is about the echo backend alone."""
    scenario = SCENARIOS[name]

    fixed = {"backend"} if name == "gateway" else set()
    assert scenario.defaults.given() - fixed <= scenario.takes
    assert scenario.name == name
    assert scenario.defaults.repeat is not None


def test_an_unknown_scenario_is_refused() -> None:
    """The hint names those that exist."""
    with pytest.raises(InferenceCenterError) as refused:
        find("speed")

    assert refused.value.hint is not None
    assert all(name in refused.value.hint for name in SCENARIOS)

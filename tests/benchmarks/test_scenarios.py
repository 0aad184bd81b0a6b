"""Tests of ``bench.scenarios``: from traces to results, by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from benchmarks.daemon_process import DaemonUsage
from benchmarks.jobs import Aborted, Round, Turns
from benchmarks.peers.line import TurnUsage
from benchmarks.scenarios import (
    SCENARIOS,
    abort,
    abuse,
    burst,
    context,
    crash,
    find,
    gateway,
    idle,
    interference,
    overload,
    parking,
    restart,
    returning,
    shared_prefix,
    soak,
    sparse,
    store,
    throughput,
)
from benchmarks.shown import Difference, Shown
from benchmarks.soak.acts import Kind
from benchmarks.soak.memory import Growth
from benchmarks.soak.tally import Tally, Timed
from benchmarks.stage import Measured
from benchmarks.target import AbortTrace, TurnTrace
from inferencecenter.core.errors import InferenceCenterError
from inferencecenter.hardware.process_usage import ProcessUsage
from tests.benchmarks.test_outages import outage, stream
from tests.benchmarks.test_timeline import turn

if TYPE_CHECKING:
    from benchmarks.results import Result

BEFORE = DaemonUsage(
    front=ProcessUsage(cpu_s=1.0, rss_bytes=10**7), engine=ProcessUsage(cpu_s=2.0, rss_bytes=2 * 10**7)
)
AFTER = DaemonUsage(
    front=ProcessUsage(cpu_s=1.5, rss_bytes=2 * 10**7), engine=ProcessUsage(cpu_s=6.0, rss_bytes=3 * 10**7)
)


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
    """A pause without an observed end would be omitted."""
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
    """In groups 8 tokens in 4 and 6 seconds, at once in 5 and 7; the reading before counts for neither."""
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
    """A default that cannot be changed is a hidden setting; the gateway is about the echo backend alone."""
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


def test_a_crash_has_pauses_and_clean_texts() -> None:
    """A pause of 6 seconds, of which loading took 2 and reading 102 tokens at 51 a second another 2."""
    reference = crash.Reference(duration_s=8, prefill_tok_s=51)
    found = values(crash.Crash((outage(stream(8, 9, 15, 16)),), reference, max_tokens=4))

    assert (found["gap worst"], found["no engine, worst"], found["engine load p50"]) == (6000, 1000, 2000)
    assert found["prefill of what was there p50"] == 2000
    assert found["gap beyond load and prefill, worst"] == pytest.approx(2000)
    for name in ("characters lost", "characters repeated", "tokens missing", "turns failed", "turns not ended once"):
        assert found[name] == 0
    assert "first character that differs" not in found
    assert "first text after the kill, worst" not in found


def test_a_crash_that_damages_texts_says_how() -> None:
    """Each kind of damage has its own count."""
    broken = replace(
        stream(8, 9, 15, tokens=3),
        finishes=("engine_crashed", "length"),
        against_transcript=Difference(lost_chars=5, extra_chars=2, first=7),
        against_undisturbed=Difference(lost_chars=1, extra_chars=1, first=40),
        misnumbered=1,
    )
    waiting = replace(stream(14, 15, tokens=6), against_undisturbed=Difference(0, 1, first=12))
    reference = crash.Reference(duration_s=8, prefill_tok_s=51)
    found = values(crash.Crash((outage(broken, waiting),), reference, max_tokens=4))

    assert (found["characters lost"], found["characters repeated"], found["texts unlike the transcript"]) == (5, 2, 1)
    assert (found["tokens missing"], found["tokens too many"]) == (1, 2)
    assert (found["turns failed"], found["turns not ended once"], found["events misnumbered"]) == (1, 1, 1)
    assert (found["texts unlike the undisturbed"], found["first character that differs"]) == (2, 12)
    assert found["first text after the kill, worst"] == 4000


def test_moments_are_drawn_by_a_seed() -> None:
    """Within the part of a round in which most turns run."""
    drawn = crash.moments(50, seed=4)

    assert drawn == crash.moments(50, seed=4) != crash.moments(50, seed=5)
    assert all(0 <= moment < 0.9 for moment in drawn)
    assert min(drawn) < 0.1
    assert max(drawn) > 0.8


def shown(started_s: float, *times_s: float, prompt: int = 100, cached: int = 0) -> Shown:
    """A turn that ran to its end."""
    usage = TurnUsage(prompt_tokens=prompt, cached_tokens=cached, completion_tokens=len(times_s))
    return Shown(started_s, times_s=list(times_s), finishes=["length"], usage=usage, ended_s=times_s[-1])


def test_a_restart_holds_the_resumed_turn_against_a_cold_one() -> None:
    """First texts after 0.5 and 4 seconds; the one read 17 tokens, the other all."""
    found = values(
        restart.Restart(
            stop_s=0.5,
            to_resumed_s=1.0,
            to_ready_s=2.0,
            is_in_place=True,
            transcript=Difference(),
            resumed=shown(10, 10.5, 11, prompt=1032, cached=1015),
            after=shown(12, 12.25),
            cold=shown(20, 24, 25, prompt=1032),
        )
    )

    assert (found["TTFT resumed"], found["TTFT cold"], found["TTFT of the next turn"]) == (500, 4000, 250)
    assert found["TTFT resumed / cold"] == 0.125
    assert (found["tokens read, resumed"], found["tokens read, cold"]) == (17, 1032)
    assert (found["resumed in place"], found["characters lost"]) == (1, 0)


def test_a_turn_that_failed_has_no_time_to_first_text() -> None:
    """Nothing is measured of it."""
    failed = shown(10, 11)
    failed.finishes = ["engine_crashed"]

    with pytest.raises(InferenceCenterError, match="engine_crashed"):
        restart.ttft_ms(failed)


def test_a_store_counts_the_turns_that_end_while_all_are_busy() -> None:
    """Window from 2 to 6 seconds, in which four turns end; the front used half a second for seven."""
    one = [turn(0, 1), turn(1, 3), turn(3, 5), turn(5, 7)]
    other = [turn(0, 2), turn(2, 4), turn(4, 6)]
    found = store.read(measured(one, other))

    assert found.turns_s == pytest.approx(4 / 4)
    assert found.turn_ms == (2000, 2000, 2000, 2000)
    assert values(found)["front CPU a turn"] == pytest.approx(500 / 7)


def test_abuse_is_compared_with_the_quiet_before_it() -> None:
    """Delays of counted turns only, as ratios; what the act was answered, and how much memory it left behind."""
    quiet = abuse.read([[turn(0, 50), turn(50, 51, 52, 53)]])
    noisy = abuse.read([[turn(0, 50), turn(50, 53, 54, 57)], [turn(0, 1), turn(1, 3, 4)]])
    assert (quiet.itl_p99_ms, quiet.ttft_p50_ms) == (1000, 1000)
    found = values(abuse.Abuse("forks", quiet, noisy, Counter(session_created=4), growth_bytes=3 * 2**20))

    assert found["forks: ITL p99, with / without"] == 3.0
    assert found["forks: TTFT p99, with / without"] == 3.0
    assert found["forks: TTFT p50, with / without"] == 2.0
    assert found["forks: ITL worst, with"] == 3000
    assert found["forks: answered session_created"] == 4
    assert found["forks: RSS growth, both processes"] == 3


def test_a_soak_names_its_errors_and_its_drift() -> None:
    """Expected ones apart from the others; delays of the last third over those of the first."""
    tally = Tally()
    tally.acts.update({Kind.TALK: 4, Kind.ABORT: 2})
    tally.error(Kind.ABORT, "nothing_to_abort")
    tally.error(Kind.TALK, "internal")
    tally.ttft += [Timed(0, 100), Timed(50, 900), Timed(80, 150)]
    found = values(soak.Soak(tally, Growth(1.5, 3.0), None, start_s=0, end_s=90))

    assert (found["acts: turn"], found["acts: abort"], found["unexplained errors"]) == (4, 2, 1)
    assert (found["expected: abort, nothing_to_abort"], found["unexplained: turn, internal"]) == (1, 1)
    assert (found["RSS front, trend"], found["RSS front, most above first"]) == (1.5, 3.0)
    assert not any(name.startswith("RSS engine") for name in found)
    assert found["TTFT p50, last / first"] == 1.5
    assert not any(name.startswith("ITL") for name in found)

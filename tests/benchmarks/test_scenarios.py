"""From traces to results, compared with hand-computed values."""

from __future__ import annotations

from collections import Counter
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.daemon_process import DaemonUsage
from benchmarks.jobs import Aborted, Round, Turns
from benchmarks.observed_turn import Difference, ObservedTurn
from benchmarks.options import Peer
from benchmarks.peers.line import TurnUsage
from benchmarks.scenarios import (
    SCENARIOS,
    abort,
    abuse,
    burst,
    context,
    crash,
    find,
    front,
    gateway,
    idle,
    interference,
    overload,
    parking,
    replicas,
    restart,
    returning,
    shared_prefix,
    soak,
    sparse,
    start,
    store,
    throughput,
)
from benchmarks.soak.actions import Kind
from benchmarks.soak.memory import Growth
from benchmarks.soak.tally import Tally, Timed
from benchmarks.stage import Measured
from benchmarks.target import AbortTrace, TurnTrace
from inferencecenter.core.errors import InferenceCenterError
from inferencecenter.hardware.process_usage import ProcessUsage
from tests.benchmarks.test_compare import OURS
from tests.benchmarks.test_outages import outage, stream
from tests.benchmarks.test_timeline import turn

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from benchmarks.results import Result

BEFORE = DaemonUsage(
    front=ProcessUsage(cpu_s=1.0, rss_bytes=10**7), engine=ProcessUsage(cpu_s=2.0, rss_bytes=2 * 10**7)
)
AFTER = DaemonUsage(
    front=ProcessUsage(cpu_s=1.5, rss_bytes=2 * 10**7), engine=ProcessUsage(cpu_s=6.0, rss_bytes=3 * 10**7)
)


def measured(*clients: list[TurnTrace]) -> Measured[Turns]:
    """Return the generator's traces between two readings of the daemon."""
    return Measured(Turns(tuple(tuple(turns) for turns in clients), cpu_s=0.25), BEFORE, AFTER, vram_bytes=None)


def values(result: Result) -> dict[str, float]:
    """Return a result's numbers by name."""
    return {metric.name: metric.value for metric in result.metrics()}


def test_throughput_counts_the_busy_window() -> None:
    """Ten tokens arrive in the four seconds in which all clients generate; turns and delays before are excluded."""
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


def test_burst_has_two_rates() -> None:
    """Six tokens take five seconds; three of them come in the two seconds in which both turns decode."""
    found = burst.read(measured([turn(10, 11, 13, 14)], [turn(10, 12, 13, 15)]))

    assert found.total_tok_s == pytest.approx(6 / 5)
    assert found.decode_tok_s == pytest.approx(3 / 2)
    assert found.ttft_ms == (1000, 2000)


def test_burst_without_common_decode_has_no_decode_rate() -> None:
    """One ended before the other began to answer."""
    found = burst.read(measured([turn(0, 1, 2)], [turn(0, 3, 4)]))

    assert found.decode_tok_s is None
    assert "decode only" not in values(found)


def test_overload_has_waits_pauses_and_gaps() -> None:
    """Six tokens take eight seconds; the longest gap is the first user's, while the second user's turn runs."""
    found = overload.read(measured([turn(0, 1, 2, 6)], [turn(0, 4, 5, 8)]))

    assert found.total_tok_s == pytest.approx(6 / 8)
    assert found.ttft_ms == (1000, 4000)
    assert values(found)["ITL worst"] == 4000
    assert values(found)["users apart"] == 2
    assert values(found)["CPU engine"] == 4.0


def test_interference_groups_delays_by_the_arrival() -> None:
    """It arrives at 4 and has text at 9; the pause from 3.5 to 9.5 overlaps, what ended by 4 is before."""
    streams = [turn(0, 1, 2, 3.5, 9.5, 10), turn(0, 2, 3, 4, 8, 12)]
    found = interference.read(measured(*([stream] for stream in streams), [turn(4, 9, 11)]))

    assert found.newcomer_ttft_ms == 5000
    assert found.before_ms == (1500, 1000, 1000)
    assert found.meanwhile_ms == (6000, 4000, 4000)
    assert values(found)["ITL meanwhile worst"] == 6000
    assert values(found)["ITL before p50"] == 1000


def test_interference_requires_streams_longer_than_the_wait() -> None:
    """A pause without an observed end would be omitted."""
    with pytest.raises(InferenceCenterError, match="--max-tokens: a stream ended"):
        interference.read(measured([turn(0, 1, 2, 9)], [turn(0, 1, 2, 12)], [turn(4, 9, 11)]))


def test_shared_prefix_ends_with_the_last_first_text() -> None:
    """It lasts from the first request at 10 s to the last first text at 14 s, and 130 of 200 tokens are prefilled."""
    found = shared_prefix.read(measured([turn(10, 12, 20, cached=0)], [turn(10.5, 14, 15, cached=70)]))

    assert values(found)["until all have text"] == 4
    assert found.ttft_ms == (2000, 3500)
    assert values(found)["prompt tokens read"] == 130
    unknown = shared_prefix.read(measured([turn(10, 12)], [turn(10.5, 14)]))
    assert "prompt tokens read" not in values(unknown)


def test_returning_separates_first_and_later_turns() -> None:
    """The four later turns of two conversations prefill 30, 100, 30 and 100 tokens, 65 on average."""
    one = [turn(0, 2, cached=0), turn(10, 10.5, cached=70), turn(20, 20.25, cached=0)]
    other = [turn(2, 5, cached=0), turn(12, 12.75, cached=70), turn(22, 23, cached=0)]
    found = returning.read(measured(one, other))

    assert found.first_ttft_ms == (2000, 3000)
    assert found.later_ttft_ms == (500, 250, 750, 1000)
    assert found.read_each_later_tokens == 65
    assert values(found)["TTFT later turns p50"] == 500


def test_replicas_count_returning_turns() -> None:
    """Rounds of 2 s and 3 s generate 10 tokens; three of four turns found more than half of their prompts."""
    rounds = (Round(100, 2),) * 3
    one = [turn(0, 9), turn(10, 11, 12, cached=70), turn(20, 21, 22, 23, cached=51)]
    other = [turn(0, 9), turn(10, 11, 12, cached=50), turn(20, 21, 22, 23, cached=99)]
    found = replicas.read(measured(one, other).answer, rounds)

    assert (found.tok_s, found.found_kv) == (2.0, 0.75)
    assert found.ttft_ms == (1000,) * 4
    assert "relative to one replica" not in values(found)
    assert values(replace(found, alone_tok_s=0.5))["relative to one replica"] == 4
    unknown = replicas.read(measured([turn(0, 1), turn(1, 2)]).answer, rounds[:2])
    assert unknown.found_kv is None


def test_front_costs_are_those_of_its_intervals() -> None:
    """Half a second of CPU for ten tokens, and as much in ten seconds without turns."""
    answer = measured([turn(0, 1, 2, 5, tokens=5)], [turn(1, 2, 3, 4, tokens=5)]).answer
    later = replace(AFTER, front=replace(AFTER.front, cpu_s=2.0))
    found = values(front.read(answer, quiet=BEFORE, before=AFTER, after=later, duration_s=10))

    assert found["front CPU, no turns"] == pytest.approx(50)
    assert found["front CPU a token"] == pytest.approx(50_000)
    assert (found["generation"], found["front RSS"]) == (2, 20)


def test_sparse_counts_common_decode_time() -> None:
    """In two rounds two of three sessions decode together: 4 tokens in 2 s, then 4 in 5 s."""
    rounds = (Round(100, 1), Round(16, 4, clients=(0, 2)), Round(16, 4, clients=(1, 2)))
    first = [turn(0, 1, cached=0), turn(10, 11, 12, 13, 14, cached=90)]
    second = [turn(0, 1, cached=0), turn(20, 21, 25, 26, cached=70)]
    third = [turn(0, 1, cached=0), turn(10, 10.5, 12, 13, cached=80), turn(20, 20.5, 23, 24.5, 27, cached=80)]
    found = sparse.read(measured(first, second, third), rounds=rounds)

    # From 11 to 13 each has two tokens, from 21 to 26 two more.
    assert found.decode_tok_s == pytest.approx((4 + 4) / (2 + 5))
    assert found.read_each_tokens == 20
    assert len(found.itl_ms) == 3 + 2 + 2 + 3


def test_sparse_without_common_decode_has_no_rate() -> None:
    """One ended before the other began to answer."""
    rounds = (Round(100, 1), Round(16, 2))
    found = sparse.read(measured([turn(0, 1), turn(2, 3, 4)], [turn(0, 1), turn(2, 5, 6)]), rounds=rounds)

    assert found.decode_tok_s is None
    assert "decode only" not in values(found)


def test_active_sessions_are_drawn_by_seed() -> None:
    """Equal seeds draw the same sessions; every round differs and is in ascending order."""
    found = sparse.drawn(16, 8, rounds=6, seed=8)

    assert found == sparse.drawn(16, 8, rounds=6, seed=8) != sparse.drawn(16, 8, rounds=6, seed=9)
    assert len(set(found)) == 6
    assert all(list(each) == sorted(set(each)) and len(each) == 8 for each in found)
    assert all(0 <= active < 16 for each in found for active in each)


def test_parking_compares_both_orders_of_the_same_work() -> None:
    """In groups 8 tokens take 4 and 6 s, at once 5 and 7 s; the prefill before them does not count."""
    first = [turn(0, 3), turn(10, 11, 12), turn(20, 21, 24), turn(30, 31, 37), turn(40, 41, 43, cached=80)]
    second = [turn(3, 6), turn(12, 13, 14), turn(20, 22, 25), turn(30, 33, 34), turn(43, 44, 46, cached=80)]
    found = parking.read(measured(first, second))

    assert found.grouped_tok_s == pytest.approx(8 / 10)
    assert found.shared_tok_s == pytest.approx(8 / 12)
    assert found.apart_tokens == 1
    assert values(found)["all at once / in groups"] == pytest.approx(10 / 12)
    assert "tokens read, in groups" not in values(found)


def test_context_separates_prefill_and_decode() -> None:
    """200 tokens are prefilled in four seconds, and two decoded in the second in which both turns decode."""
    found = context.read(measured([turn(0, 2), turn(10, 11, 12)], [turn(0, 4), turn(10, 11, 12)]))

    assert found.prefill_tok_s == 50
    assert found.decode_tok_s == 2
    assert values(found)["RSS engine"] == 30
    assert "VRAM in use" not in values(found)


def test_abort_delays_and_steps() -> None:
    """Delays are from the request to the end; steps are the gaps before the request."""
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


def test_gateway_divides_front_cpu_by_frames() -> None:
    """Ten frames cost half a second of CPU, warm-up included; those of the busy window have two tokens each."""
    early = [turn(0, 1, tokens=2), turn(1, 2.5, 3, 3.5, 4, tokens=8)]
    late = [turn(0, 2, tokens=2), turn(2, 3.5, 4.5, 5, 6, tokens=8)]
    found = gateway.read(measured(early, late))

    assert found.front_us_per_frame == pytest.approx(50_000)
    assert found.frames_s == pytest.approx(5 / 2)
    assert found.tokens_per_frame == 2


def test_idle_is_scaled_to_a_minute() -> None:
    """CPU of half a minute, 0.5 s and 4 s, is reported as 1 s and 8 s a minute."""
    found = idle.read(BEFORE, AFTER, duration_s=30)

    assert (found.front_s_per_minute, found.engine_s_per_minute) == (1.0, 8.0)
    assert values(found)["CPU"] == 9.0


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_default_is_an_option(name: str) -> None:
    """A default that cannot be changed is a hidden setting; some scenarios measure all but decoding."""
    scenario = SCENARIOS[name]

    fixed = {"backend"} if name in {"gateway", "cluster", "front"} else set()
    assert scenario.defaults.given() - fixed <= scenario.takes
    assert scenario.name == name
    assert scenario.defaults.repeat is not None


def test_unknown_scenario_is_refused() -> None:
    """The hint names the existing ones."""
    with pytest.raises(InferenceCenterError) as refused:
        find("speed")

    assert refused.value.hint is not None
    assert all(name in refused.value.hint for name in SCENARIOS)


def test_crash_has_gaps_and_intact_texts() -> None:
    """A gap of 6 s has 2 s of loading, 2 s of prefill and 2 s of neither; no character is lost or repeated."""
    reference = crash.Reference(duration_s=8, prefill_tok_s=51)
    found = values(crash.Crash((outage(stream(8, 9, 15, 16)),), reference, max_tokens=4))

    assert (found["gap worst"], found["no engine, worst"], found["engine load p50"]) == (6000, 1000, 2000)
    assert found["prefill of what was there p50"] == 2000
    assert found["gap beyond load and prefill, worst"] == pytest.approx(2000)
    for name in ("characters lost", "characters repeated", "tokens missing", "turns failed", "turns not ended once"):
        assert found[name] == 0
    assert "first character that differs" not in found
    assert "first text after the kill, worst" not in found


def test_crash_counts_damaged_texts() -> None:
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


def test_kill_times_are_drawn_by_seed() -> None:
    """They are within the part of a round in which most turns run."""
    drawn = crash.moments(50, seed=4)

    assert drawn == crash.moments(50, seed=4) != crash.moments(50, seed=5)
    assert all(0 <= moment < 0.9 for moment in drawn)
    assert min(drawn) < 0.1
    assert max(drawn) > 0.8


def observed_turn(started_s: float, *times_s: float, prompt: int = 100, cached: int = 0) -> ObservedTurn:
    """Return a turn that ran to its end."""
    usage = TurnUsage(prompt_tokens=prompt, cached_tokens=cached, completion_tokens=len(times_s))
    return ObservedTurn(started_s, times_s=list(times_s), finishes=["length"], usage=usage, ended_s=times_s[-1])


def test_restart_compares_resumed_and_cold_turns() -> None:
    """The resumed turn has its text after 0.5 s and prefills 17 tokens, the cold one after 4 s and prefills all."""
    found = values(
        restart.Restart(
            stop_s=0.5,
            to_resumed_s=1.0,
            to_ready_s=2.0,
            is_in_place=True,
            transcript=Difference(),
            resumed=observed_turn(10, 10.5, 11, prompt=1032, cached=1015),
            after=observed_turn(12, 12.25),
            cold=observed_turn(20, 24, 25, prompt=1032),
        )
    )

    assert (found["TTFT resumed"], found["TTFT cold"], found["TTFT of the next turn"]) == (500, 4000, 250)
    assert found["TTFT resumed / cold"] == 0.125
    assert (found["tokens read, resumed"], found["tokens read, cold"]) == (17, 1032)
    assert (found["resumed in place"], found["characters lost"]) == (1, 0)


def test_failed_turn_has_no_time_to_first_text() -> None:
    """It is not measured."""
    failed = observed_turn(10, 11)
    failed.finishes = ["engine_crashed"]

    with pytest.raises(InferenceCenterError, match="engine_crashed"):
        restart.ttft_ms(failed)


def test_store_counts_turns_of_the_busy_window() -> None:
    """Four turns end in the busy window from 2 to 6 s; the front's CPU is divided by all seven turns."""
    one = [turn(0, 1), turn(1, 3), turn(3, 5), turn(5, 7)]
    other = [turn(0, 2), turn(2, 4), turn(4, 6)]
    found = store.read(measured(one, other))

    assert found.turns_s == pytest.approx(4 / 4)
    assert found.turn_ms == (2000, 2000, 2000, 2000)
    assert values(found)["front CPU a turn"] == pytest.approx(500 / 7)


def test_abuse_is_compared_with_the_baseline() -> None:
    """Delays are ratios to those of the baseline; answers of the action and the growth of memory are reported."""
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


def test_soak_reports_errors_and_drift() -> None:
    """Expected errors are counted apart from others; drift compares the last third's delays with the first third's."""
    tally = Tally()
    tally.actions.update({Kind.TALK: 4, Kind.ABORT: 2})
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


async def test_started_peer_has_as_many_slots_as_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its command gets our daemon's slots and context."""
    commands = []

    @asynccontextmanager
    async def start_peer(command: str, *, url: str) -> AsyncIterator[float]:
        commands.append((command, url))
        yield 0.5

    async def found(*_names: str, **_options: str) -> Any:
        return SimpleNamespace(side=SimpleNamespace(facts=OURS))

    monkeypatch.setattr(start, "start_peer", start_peer)
    monkeypatch.setattr(start, "found", found)
    bench: Any = SimpleNamespace(run=lambda _label: nullcontext())
    peer = Peer(name="peer", url="http://127.0.0.1:2", command="serve -np {slots} -c {context}")
    assert await start._start_peer(bench, peer, OURS) == (OURS, start.Start(0.5))
    assert commands == [("serve -np 8 -c 4096", "http://127.0.0.1:2")]

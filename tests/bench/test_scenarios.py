"""Tests of ``bench.scenarios``: from traces to results, by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from inferencecenter.bench.daemon_process import DaemonUsage
from inferencecenter.bench.jobs import Aborted, Turns
from inferencecenter.bench.scenarios import SCENARIOS, abort, burst, context, find, gateway, idle, throughput
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
    """Window from 4 to 8 seconds: 6 pieces of 12 tokens; the warm-up's delays are left out."""
    early = [turn(0, 1), turn(1, 5, 6, 8, tokens=6)]
    late = [turn(0, 4), turn(4, 6, 7, 8, tokens=6)]
    found = throughput.read(measured(early, late))

    assert found.tok_s == pytest.approx(12 / 4)
    assert found.ttft_ms == (4000, 2000)
    assert found.itl_ms == (1000, 2000, 1000, 1000)
    assert values(found) == {
        "generation": 3.0,
        "TTFT p50": 2000,
        "TTFT p95": 4000,
        "TTFT p99": 4000,
        "TTFT worst": 4000,
        "ITL p50": 1000,
        "ITL p95": 2000,
        "ITL p99": 2000,
        "ITL worst": 2000,
        "turns": 2,
        "CPU generator": 0.25,
        "CPU front": 0.5,
        "CPU engine": 4.0,
    }


def test_a_burst_is_its_last_turn() -> None:
    """Six tokens in five seconds; three of them in the two seconds in which both decode."""
    found = burst.read(measured([turn(0, 1), turn(10, 11, 13, 14)], [turn(0, 1), turn(10, 12, 13, 15)]))

    assert found.total_tok_s == pytest.approx(6 / 5)
    assert found.decode_tok_s == pytest.approx(3 / 2)
    assert found.ttft_ms == (1000, 2000)


def test_a_burst_whose_turns_never_all_decode_has_no_decode_rate() -> None:
    """One had ended before the other began to answer."""
    found = burst.read(measured([turn(0, 1, 2)], [turn(0, 3, 4)]))

    assert found.decode_tok_s is None
    assert "decode only" not in values(found)


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

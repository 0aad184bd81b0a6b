"""The scenario of engines behind hosts, compared with hand-computed values."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks.cluster.frame_times import FrameComparison, FrameTimes
from benchmarks.daemon_process import DaemonSettings
from benchmarks.observed_turn import Difference
from benchmarks.options import Options, resolve
from benchmarks.runner import run_scenario
from benchmarks.scenarios import cluster, find
from benchmarks.stage import Bench
from inferencecenter.core.errors import InferenceCenterError
from tests.benchmarks.test_cli import RecordingProgress
from tests.benchmarks.test_outages import outage, stream
from tests.benchmarks.test_scenarios import measured, values
from tests.benchmarks.test_timeline import turn

if TYPE_CHECKING:
    from benchmarks.generator import LoadGenerator


def test_tokens_share_the_cpu_of_the_front() -> None:
    """Half a second for ten tokens, those of the warm-up among them."""
    found = cluster.read(measured([turn(0, 1), turn(1, 2, 3, 4, tokens=4)], [turn(0, 1), turn(1, 2, 3, 4, tokens=4)]))
    assert values(found)["front CPU a token"] == pytest.approx(0.5 / 10 * 1e6)
    assert values(found)["generation"] == pytest.approx(8 / 3)


def test_host_adds_to_frames() -> None:
    """The difference of percentiles is the host's; the local engine has none."""
    beside = FrameTimes(900, 2000, 300)
    found = FrameComparison(FrameTimes(700, 1500, 260), FrameTimes(300, 500, 180), (beside, beside), (200, 32))
    hosted, local = cluster.frame_metrics(found)
    numbers = {metric.name: metric.value for metric in hosted}
    assert numbers["added to a frame p50"] == pytest.approx(0.4)
    assert numbers["added to a frame p99"] == pytest.approx(1.0)
    assert numbers["frame beside a copy of at most 32 MiB/s p99"] == pytest.approx(2.0)
    assert numbers["copy of at most 256 MiB/s"] == pytest.approx(200)
    assert {metric.name: metric.value for metric in local} == {
        "frame p50": 0.3,
        "frame p99": 0.5,
        "front CPU to receive a frame": 180,
    }


def test_lost_node_is_a_gap() -> None:
    """Each stream has one; what its client did not receive is counted, as are ends."""
    damaged = replace(stream(8, 9, 14), against_transcript=Difference(2, 1, 5), finishes=("length", "length"))
    numbers = {metric.name: metric.value for metric in cluster.loss_metrics([outage(stream(8, 9.5, 10.5), damaged)])}
    assert (numbers["gap p50"], numbers["gap worst"]) == (1, 5)
    assert (numbers["characters lost"], numbers["characters repeated"], numbers["turns not ended once"]) == (2, 1, 1)


def test_daemon_with_hosts() -> None:
    """Its model has a node for each engine, and Ray is not asked."""
    settings = DaemonSettings(backend="echo", model=None, slots=1, n_ctx=256, threads=1, hosted=2)
    environment = settings.environment(Path("state"))
    entry = {"replicated": {"path": "echo", "nodes": ["box1", "box2"]}}
    assert json.loads(environment["INFERENCECENTER_MODELS"]) == entry
    assert environment["INFERENCECENTER_CLUSTER__ADDRESS"] == "127.0.0.1:1"
    assert environment["BENCHMARK_NODES"] == "state/nodes"
    assert settings.n_engines == 2


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("cluster", Options(clients=(5,)), "--slots: one node has to take the 10 streams of two"),
        ("front", Options(clients=(1, 2)), "--clients: this scenario takes one number"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_unsuitable_options_are_refused(generator: LoadGenerator, name: str, given: Options, words: str) -> None:
    """Streams that wait for slots would be taken for a loss."""
    scenario = find(name)
    options = resolve(name, given, defaults=scenario.defaults, takes=scenario.takes)
    with pytest.raises(InferenceCenterError, match=words):
        await scenario.run(Bench(options, generator, RecordingProgress()))


async def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is started."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "ray" else find_spec(name))
    with pytest.raises(InferenceCenterError, match="engines behind hosts need the extra cluster"):
        await run_scenario(cluster.SCENARIO, cluster.SCENARIO.defaults, RecordingProgress())


@pytest.mark.slow
async def test_scenario_runs() -> None:
    """Nothing is lost or repeated with a node, and most turns find their KV."""
    pytest.importorskip("ray")
    scenario, progress = find("cluster"), RecordingProgress()
    given = Options(clients=(2,), slots=4, max_tokens=16, duration_s=0.3, count=1, repeat=1)
    options = resolve("cluster", given, defaults=scenario.defaults, takes=scenario.takes)
    report = await run_scenario(scenario, options, progress)

    frames, loop, returning, killed, silent = (
        {metric.name: metric.value for metric in point.repetitions[0][0]} for point in report.points
    )
    assert "added to a frame p50" in frames
    assert loop["front CPU a token"] > 0
    assert returning["returning turns that find their KV"] == 1
    for found in (killed, silent):
        assert (found["characters lost"], found["characters repeated"], found["turns not ended once"]) == (0, 0, 0)
    assert silent["gap worst"] > killed["gap worst"]
    assert progress.finished == progress.expected

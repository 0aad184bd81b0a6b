"""``inferencecenter bench`` end to end on echo daemons."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks.options import Options, Peer, resolve
from benchmarks.runner import run_scenario
from benchmarks.scenarios import SCENARIOS, find
from benchmarks.stage import Bench
from inferencecenter.cli import main
from inferencecenter.core.errors import InferenceCenterError

if TYPE_CHECKING:
    from benchmarks.daemon_process import RunningDaemon
    from benchmarks.generator import LoadGenerator


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["inferencecenter", "bench", *arguments])
    monkeypatch.setenv("COLUMNS", "160")
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@dataclass
class RecordingProgress:
    """Records the progress of a run."""

    expected: int = 0
    descriptions: list[str] = field(default_factory=list)
    finished: int = 0

    def expect(self, runs: int) -> None:
        """Record it."""
        self.expected += runs

    def begin(self, what: str) -> None:
        """Record it."""
        self.descriptions.append(what)

    def done(self) -> None:
        """Record it."""
        self.finished += 1


def test_scenarios_are_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The list contains the name of every scenario."""
    assert call(monkeypatch, "list") == 0

    written = capsys.readouterr().out
    assert all(name in written for name in SCENARIOS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("speed",), "there is no scenario 'speed'"),
        (("idle", "--clients", "4"), "--clients"),
        (("burst", "--draft", "small.gguf"), "--draft"),
        (("burst", "--clients", "many"), "--clients"),
        (("context", "--plot", "x.svg"), "--plot"),
        (("burst", "--json", "/nowhere/x.json"), "--json"),
        (("burst", "--peer", "absent"), "--peer"),
        (("restart", "--restart-by", "luck"), "--restart-by"),
        (("start", "--restart-by", "kill"), "--restart-by"),
    ],
)
def test_invalid_options_are_refused_before_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    """The result is a usage error that names the option."""
    assert call(monkeypatch, *arguments) == 64
    assert words in capsys.readouterr().err


def test_run_prints_records_and_plots(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With the record on standard output the table goes to standard error."""
    plotted = tmp_path / "speed.svg"
    options = ("--backend", "echo", "--clients", "1,2", "--max-tokens", "8", "--repeat", "2")
    assert call(monkeypatch, "burst", *options, "--json", "-", "--plot", str(plotted)) == 0

    written = capsys.readouterr()
    found = json.loads(written.out)
    assert [point["parameters"][0]["value"] for point in found["points"]] == [1, 2]
    assert [len(point["repetitions"][0]) for point in found["points"]] == [2, 2]
    assert [point["sides"][0]["facts"]["slots"] for point in found["points"]] == [1, 2]
    assert "from first to last" in written.err
    assert plotted.read_text().startswith("<svg")


@pytest.mark.asyncio(loop_scope="module")
async def test_sides_alternate_and_comparable_ones_have_ratios(daemon: RunningDaemon) -> None:
    """Unknown facts of the peer are assumed equal."""
    progress = RecordingProgress()
    facts = daemon.settings
    given = Options(
        backend="echo",
        slots=facts.slots,
        n_ctx=facts.n_ctx,
        clients=(2,),
        repeat=2,
        peers=(Peer(name="peer", url=daemon.spec.url, token=daemon.spec.token),),
        assume_same=("library", "threads"),
    )
    burst = find("burst")
    report = await run_scenario(burst, resolve("burst", given, defaults=burst.defaults, takes=burst.takes), progress)

    assert progress.descriptions == [
        "inferencecenter: 2 clients (1 of 2)",
        "peer: 2 clients (1 of 2)",
        "inferencecenter: 2 clients (2 of 2)",
        "peer: 2 clients (2 of 2)",
    ]
    assert progress.finished == progress.expected == 4
    comparison = report.sides[1].comparison
    assert comparison is not None
    assert comparison.fair
    (point,) = report.points
    assert [len(repetitions) for repetitions in point.repetitions] == [2, 2]


@pytest.mark.asyncio(loop_scope="module")
async def test_peer_with_other_slots_has_no_ratio(daemon: RunningDaemon) -> None:
    """It is still measured."""
    given = Options(
        backend="echo",
        slots=daemon.settings.slots + 1,
        n_ctx=daemon.settings.n_ctx,
        clients=(1,),
        repeat=1,
        peers=(Peer(name="peer", url=daemon.spec.url, token=daemon.spec.token),),
        assume_same=("library", "threads"),
    )
    burst = find("burst")
    report = await run_scenario(
        burst, resolve("burst", given, defaults=burst.defaults, takes=burst.takes), RecordingProgress()
    )

    comparison = report.sides[1].comparison
    assert comparison is not None
    assert len(comparison.refusals) == 1
    assert "slots" in comparison.refusals[0]
    assert len(report.points[0].repetitions[1]) == 1


def test_sigterm_stops_the_daemon_of_a_measurement(tmp_path: Path) -> None:
    """``timeout`` and service managers end a program so; its files are removed too."""
    command = [sys.executable, "-m", "inferencecenter", "bench", "idle", "--backend", "echo", "--duration-s", "600"]
    bench = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(tmp_path)})
    try:
        while not (tokens := list(tmp_path.glob("*/state/admin.token"))):
            assert bench.poll() is None, "the measurement has ended"
            time.sleep(0.05)
        (daemon,) = (pid for pid in _children(bench.pid) if b"serve" in Path(f"/proc/{pid}/cmdline").read_bytes())
        bench.terminate()
        assert bench.wait(timeout=60) == 128 + signal.SIGTERM
    finally:
        bench.kill()
        bench.wait()
    assert not Path(f"/proc/{daemon}").exists()
    assert not tokens[0].exists()


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "given", "metric"),
    [
        ("context", Options(backend="echo", clients=(1, 2), prompt_tokens=(300,), max_tokens=8), "prefill"),
        (
            "overload",
            Options(backend="echo", clients=(2, 5), slots=2, max_tokens=32, repeat=2),
            "users apart",
        ),
        (
            "interference",
            Options(backend="echo", clients=(2,), prompt_tokens=(100,), max_tokens=1500, repeat=1),
            "ITL meanwhile worst",
        ),
        (
            "shared-prefix",
            Options(backend="echo", clients=(2, 3), prompt_tokens=(50, 80), max_tokens=2, repeat=1),
            "until all have text",
        ),
        (
            "returning",
            Options(backend="echo", sessions=5, slots=2, prompt_tokens=(50,), max_tokens=2, repeat=1),
            "TTFT later turns p50",
        ),
        pytest.param(
            "replicas",
            Options(clients=(2,), count=2, prompt_tokens=(20,), max_tokens=4, repeat=1),
            "returning turns that find their KV",
            marks=pytest.mark.slow,
        ),
        (
            "sparse",
            Options(backend="echo", sessions=4, clients=(2,), count=2, prompt_tokens=(30, 60), max_tokens=8, repeat=1),
            "tokens read a turn",
        ),
        (
            "parking",
            Options(backend="echo", clients=(4,), slots=2, prompt_tokens=(100,), max_tokens=40, repeat=1),
            "all at once / in groups",
        ),
        ("gateway", Options(clients=(2,), duration_s=0.1, connections=20, repeat=1), "front CPU a frame"),
        ("front", Options(clients=(1,), max_tokens=4, duration_s=0.1, repeat=1), "front CPU to open a session"),
        ("idle", Options(backend="echo", sessions=3, duration_s=0.1), "CPU"),
        ("start", Options(backend="echo", repeat=1), "time to ready"),
        (
            "crash",
            Options(backend="echo", clients=(2,), count=1, prompt_tokens=(20,), max_tokens=60),
            "streams that had text",
        ),
        (
            "restart",
            Options(backend="echo", prompt_tokens=(300,), max_tokens=4, restart_by="kill", repeat=1),
            "TTFT resumed / cold",
        ),
        pytest.param(
            "store",
            Options(backend="echo", clients=(2,), max_tokens=8, duration_s=0.2, repeat=1),
            "turns",
        ),
        (
            "speculation",
            Options(backend="echo", clients=(2,), max_tokens=8, duration_s=0.2, repeat=1),
            "generation",
        ),
        pytest.param(
            "dialects",
            Options(backend="echo", clients=(2,), max_tokens=8, duration_s=0.2, repeat=1),
            "front CPU a token",
        ),
        pytest.param(
            "resend",
            Options(backend="echo", clients=(1,), prompt_tokens=(800,), max_tokens=8, count=2, repeat=1),
            "tokens read a turn",
        ),
        pytest.param(
            "agents",
            Options(clients=(1,), count=3, prompt_tokens=(60,), repeat=1),
            "tokens read for each new one",
        ),
        pytest.param(
            "soak",
            Options(backend="echo", clients=(3,), duration_s=1.0, repeat=2),
            "unexplained errors",
        ),
        pytest.param(
            "abuse",
            Options(backend="echo", clients=(2,), max_tokens=8, duration_s=0.2, repeat=1),
            "openapi document: ITL p99, with / without",
            marks=pytest.mark.slow,
        ),
    ],
)
async def test_every_scenario_runs(name: str, given: Options, metric: str) -> None:
    """Each runs from the start of the daemon to the report."""
    scenario, progress = find(name), RecordingProgress()
    options = resolve(name, given, defaults=scenario.defaults, takes=scenario.takes)
    report = await run_scenario(scenario, options, progress)

    assert report.scenario == name
    names = {each.name for point in report.points for run in point.repetitions[0] for each in run}
    assert metric in names
    assert progress.finished == progress.expected > 0


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("returning", Options(sessions=4, slots=4), "--sessions: 4 sessions do not lose their slots"),
        ("returning", Options(count=1), "--count: a client returns only"),
        ("replicas", Options(count=1), "--count: a client returns only"),
        ("sparse", Options(sessions=6, clients=(2,), slots=4), "--sessions: 6 sessions have no slot each"),
        ("sparse", Options(sessions=4, clients=(5,)), "--clients: 5 of 4 sessions cannot be active"),
        ("parking", Options(clients=(4,), slots=4), "--clients: 4 turns are no whole number of groups of 4"),
        ("parking", Options(clients=(6,), slots=4), "--clients: 6 turns are no whole number of groups of 4"),
        ("interference", Options(clients=(2,), max_tokens=8), "a stream of 8 tokens ended"),
        ("report", Options(prompt_tokens=(20,), max_tokens=2, repeat=1), "--model: the daemon made no plan"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_unsuitable_options_of_a_scenario_are_refused(
    generator: LoadGenerator, name: str, given: Options, words: str
) -> None:
    """They would measure something else."""
    scenario = find(name)
    options = resolve(name, replace(given, backend="echo"), defaults=scenario.defaults, takes=scenario.takes)
    with pytest.raises(InferenceCenterError, match=words):
        await scenario.run(Bench(options, generator, RecordingProgress()))


@pytest.mark.slow
async def test_structured_and_plain_answers_have_equal_length(demo_model_path: Path) -> None:
    """Both end at the token limit, else their rates were not comparable."""
    scenario = find("structured")
    given = Options(model=demo_model_path, threads=1, clients=(2,), max_tokens=32, duration_s=0.2, repeat=1)
    report = await run_scenario(
        scenario, resolve("structured", given, defaults=scenario.defaults, takes=scenario.takes), RecordingProgress()
    )

    assert [side.facts.name for side in report.sides] == ["with a schema", "without"]
    assert report.sides[1].comparison is not None
    assert report.sides[1].comparison.fair
    for (repetition,) in report.points[0].repetitions:
        assert {metric.name: metric.value for metric in repetition}["tokens a turn"] == 32


async def test_aborts_are_measured_in_both_phases(demo_model_path: Path) -> None:
    """During decode the delay is compared with a step, during prefill with a chunk."""
    scenario = find("abort")
    given = Options(
        model=demo_model_path, threads=1, clients=(1,), prompt_tokens=(4000,), max_tokens=400, count=1, repeat=1
    )
    options = resolve("abort", given, defaults=scenario.defaults, takes=scenario.takes)
    report = await run_scenario(scenario, options, RecordingProgress())

    decoding, reading = ({metric.name for metric in point.repetitions[0][0]} for point in report.points)
    assert decoding == {"abort p50", "abort p95", "abort p99", "abort worst", "step"}
    assert reading == decoding - {"step"} | {"first chunk"}


@pytest.mark.slow
async def test_engine_crash_on_the_demo_model_loses_nothing(demo_model_path: Path) -> None:
    """All shown text is in the transcript once, and every turn ends once."""
    scenario = find("crash")
    given = Options(model=demo_model_path, threads=1, clients=(3,), count=2, prompt_tokens=(40,), max_tokens=80)
    options = resolve("crash", given, defaults=scenario.defaults, takes=scenario.takes)
    (point,) = (await run_scenario(scenario, options, RecordingProgress())).points

    found = {metric.name: metric.value for metric in point.repetitions[0][0]}
    for name in (
        "characters lost",
        "characters repeated",
        "texts unlike the transcript",
        "tokens missing",
        "tokens too many",
        "turns failed",
        "turns not ended once",
        "events misnumbered",
    ):
        assert found[name] == 0, name


@pytest.mark.slow
async def test_resumed_session_on_the_demo_model_is_not_prefilled(demo_model_path: Path) -> None:
    """After a clean stop its KV is loaded from disk; a cold history of equal length is prefilled."""
    scenario = find("restart")
    given = Options(model=demo_model_path, threads=1, prompt_tokens=(300,), max_tokens=8, repeat=1)
    options = resolve("restart", given, defaults=scenario.defaults, takes=scenario.takes)
    (point,) = (await run_scenario(scenario, options, RecordingProgress())).points

    found = {metric.name: metric.value for metric in point.repetitions[0][0]}
    assert found["tokens read, resumed"] < 32
    assert found["tokens read, cold"] > 300
    assert (found["resumed in place"], found["characters lost"]) == (1, 0)

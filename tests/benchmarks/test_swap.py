"""The swap scenario: from shown streams to results by hand, and once with a daemon."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks.daemon_process import MODEL_NAMES, DaemonSettings
from benchmarks.observed_turn import Difference
from benchmarks.options import Options, resolve
from benchmarks.runner import run_scenario
from benchmarks.scenarios import swap
from inferencecenter.core.errors import InferenceCenterError
from tests.benchmarks.test_cli import RecordingProgress
from tests.benchmarks.test_scenarios import observed_turn, values

if TYPE_CHECKING:
    from benchmarks.observed_turn import ObservedTurn

SAME = Difference()


def change(*streams: ObservedTurn, different: Difference = SAME) -> swap.Change:
    """Return a swap requested at 10 and done at 13, of which the engine took 2."""
    differences = (different, *[SAME] * (len(streams) - 1))
    return swap.Change(requested_s=10, done_s=13, load_s=2, streams=streams, against_transcripts=differences)


def test_pauses_that_overlap_the_swap_belong_to_it() -> None:
    """Pauses that end at the request are before it; those that begin at the end are neither."""
    found = change(observed_turn(0, 8, 9, 10, 11.5, 12, 16, 17), observed_turn(0, 7, 9.5, 13.5))

    assert found.before_ms() == [1000, 1000, 2500]
    assert found.meanwhile_ms() == [1500, 500, 4000, 4000]


def test_swap_without_visible_effect() -> None:
    """All turns are whole; the times are those of the swap and its engine."""
    found = values(
        swap.Swaps((change(observed_turn(0, 8, 9, 11, 14)), change(observed_turn(0, 8, 9, 11, 14))), max_tokens=4)
    )

    assert (found["turns"], found["asked to done p50"], found["engine load p50"]) == (2, 3000, 2000)
    assert (found["ITL before worst"], found["ITL meanwhile worst"]) == (1000, 3000)
    for name in ("turns failed", "tokens missing", "texts unlike the transcript"):
        assert found[name] == 0


def test_swap_counts_damaged_turns() -> None:
    """Each kind of damage has its own count; a turn that ends twice has failed too."""
    failed = replace(observed_turn(0, 8, 9, 11), finishes=["engine_crashed"], usage=None)
    twice = replace(observed_turn(0, 8, 9, 11, 12), finishes=["length", "length"])
    found = values(swap.Swaps((change(failed, twice, different=Difference(1, 0, 3)),), max_tokens=4))

    assert (found["turns failed"], found["tokens missing"], found["texts unlike the transcript"]) == (2, 4, 1)


def test_two_model_daemon_has_the_file_twice() -> None:
    """The first of the two names is the default."""
    settings = DaemonSettings(backend="llama", model=Path("a.gguf"), slots=1, n_ctx=256, threads=1, two_models=True)
    environment = settings.environment(Path("state"))

    assert environment["INFERENCECENTER_MODEL__NAME"] == MODEL_NAMES[0]
    assert environment["INFERENCECENTER_MODEL__PATH"] == "a.gguf"
    assert json.loads(environment["INFERENCECENTER_MODELS"]) == {MODEL_NAMES[1]: {"path": "a.gguf"}}
    assert "INFERENCECENTER_MODELS" not in replace(settings, two_models=False).environment(Path("state"))


def test_daemon_with_replicas() -> None:
    """Its model is an entry, with or without a file."""
    settings = DaemonSettings(backend="llama", model=Path("a.gguf"), slots=1, n_ctx=256, threads=1, replicas=3)
    environment = settings.environment(Path("state"))
    assert json.loads(environment["INFERENCECENTER_MODELS"]) == {"replicated": {"path": "a.gguf", "replicas": 3}}
    assert environment["INFERENCECENTER_MODEL__NAME"] == "replicated"
    assert "INFERENCECENTER_MODEL__PATH" not in environment
    echo = replace(settings, backend="echo", model=None).environment(Path("state"))
    assert json.loads(echo["INFERENCECENTER_MODELS"])["replicated"]["path"] == "echo"


def test_measured_daemon_inherits_only_the_settings_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices and RPC servers belong to the machine; other settings would change what is measured."""
    monkeypatch.setenv("INFERENCECENTER_GPU__RPC_SERVERS", '["10.0.0.7:50052"]')
    monkeypatch.setenv("INFERENCECENTER_ENGINE__QUANTUM_TOKENS", "1")
    environment = DaemonSettings(backend="echo", model=None, slots=1, n_ctx=256, threads=1).environment(Path("state"))

    assert environment["INFERENCECENTER_GPU__RPC_SERVERS"] == '["10.0.0.7:50052"]'
    assert "INFERENCECENTER_ENGINE__QUANTUM_TOKENS" not in environment


@pytest.mark.slow
async def test_scenario_runs() -> None:
    """It swaps to the other model and back, loading each."""
    given = Options(backend="echo", clients=(2,), count=2, prompt_tokens=(20,), max_tokens=400)
    options = resolve("swap", given, defaults=swap.SCENARIO.defaults, takes=swap.SCENARIO.takes)
    progress = RecordingProgress()
    report = await run_scenario(swap.SCENARIO, options, progress)

    found = {each.name: each.value for each in report.points[0].repetitions[0][0]}
    assert (found["turns"], found["turns failed"], found["tokens missing"]) == (4, 0, 0)
    assert found["engine load p50"] <= found["asked to done, worst"]
    assert progress.finished == progress.expected == 2


@pytest.mark.slow
async def test_short_streams_are_reported() -> None:
    """The run says that no stream overlapped the swap."""
    given = Options(backend="echo", clients=(1,), count=1, prompt_tokens=(20,), max_tokens=4)
    options = resolve("swap", given, defaults=swap.SCENARIO.defaults, takes=swap.SCENARIO.takes)
    with pytest.raises(InferenceCenterError, match="all streams ended before the other model was loaded"):
        await run_scenario(swap.SCENARIO, options, RecordingProgress())

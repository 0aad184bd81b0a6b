"""The scenario `embeddings`: its figures, its clients, and a whole run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from benchmarks import protocols
from benchmarks.options import Options, resolve
from benchmarks.runner import run_scenario
from benchmarks.scenarios import embeddings, find
from benchmarks.target import TargetSpec
from inferencecenter.core.errors import InferenceCenterError
from tests.benchmarks.test_cli import RecordingProgress
from tests.benchmarks.test_scenarios import measured, values
from tests.benchmarks.test_timeline import turn
from tests.embedding_models import write_embedding_model

if TYPE_CHECKING:
    from pathlib import Path


def test_rates_are_those_of_the_busy_window() -> None:
    """From second 4 to 8 two requests of 100 tokens and 3 texts each ended, after 2 s and 4 s."""
    early = [turn(0, 1, tokens=3), turn(1, 5, tokens=3), turn(6, 8, tokens=3)]
    late = [turn(0, 4, tokens=3), turn(4, 12, tokens=3)]
    found = values(embeddings.read(measured(early, late)))
    assert (found["embedding"], found["texts"]) == (200 / 4, 6 / 4)
    assert found["request p50"] == 2000


def test_any_server_is_measured_over_http() -> None:
    """Our daemon is measured at its HTTP address, another server at the given one."""
    ours = TargetSpec("ours", "inferencecenter", "ws://127.0.0.1:3000/", "t")
    peer = TargetSpec("peer", "llama-server", "http://127.0.0.1:8080")
    assert protocols.embeddings(ours) == replace(ours, kind="embeddings", url="http://127.0.0.1:3000")
    assert protocols.embeddings(peer) == replace(peer, kind="embeddings")


async def test_scenario_runs(tmp_path: Path) -> None:
    """It starts a daemon on an embedding model and ends with the report."""
    write_embedding_model(tmp_path / "bert.gguf", n_ctx=512)
    given = Options(model=tmp_path / "bert.gguf", clients=(2,), prompt_tokens=(20,), max_tokens=3)
    scenario, progress = find("embeddings"), RecordingProgress()
    options = resolve(
        "embeddings",
        replace(given, duration_s=0.2, repeat=1),
        defaults=scenario.defaults,
        takes=scenario.takes,
    )
    report = await run_scenario(scenario, options, progress)
    figures = {each.name: each.value for each in report.points[0].repetitions[0][0]}
    assert figures["embedding"] == pytest.approx(20 * figures["texts"])
    assert progress.finished == progress.expected == 1


async def test_chat_model_is_refused_before_anything_is_started() -> None:
    """The bundled model makes no embeddings."""
    scenario = find("embeddings")
    options = resolve("embeddings", Options(), defaults=scenario.defaults, takes=scenario.takes)
    with pytest.raises(InferenceCenterError, match="makes no embeddings"):
        await run_scenario(scenario, options, RecordingProgress())

"""The scenario `images`: its figures, its requests, and a whole run."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from benchmarks import protocols
from benchmarks.jobs import Round
from benchmarks.options import Options, resolve
from benchmarks.peers.http import Http
from benchmarks.peers.images import ImageChatSession
from benchmarks.peers.prompts import Prompts
from benchmarks.projector import ProjectorSize, write_projector
from benchmarks.runner import run_scenario
from benchmarks.scenarios import find, images
from benchmarks.target import Opening, TargetSpec, Work
from inferencecenter.core.errors import InferenceCenterError
from tests.benchmarks.test_cli import RecordingProgress
from tests.benchmarks.test_scenarios import measured, values
from tests.benchmarks.test_timeline import turn

if TYPE_CHECKING:
    from pathlib import Path

DEMO_WIDTH = 192
SMALL = ProjectorSize(image=32, patch=8, width=32, heads=2, ffn=64, layers=2)


def test_first_and_second_questions_are_separate() -> None:
    """The last round is one image for all clients, until the last has text."""
    one = [turn(0, 1, 9), turn(10, 10.2, 19), turn(40, 42, 50)]
    other = [turn(20, 23, 29), turn(30, 30.4, 39), turn(40, 43, 50)]
    rounds = (Round(20, 8, image=True), Round(20, 8), Round(20, 8, image=True, opening_tokens=8))
    found = values(images.read(measured(one, other), rounds=rounds))
    assert (found["TTFT new image p50"], found["TTFT new image worst"]) == (1000, 3000)
    assert found["TTFT second question worst"] == pytest.approx(400)
    assert found["second question / new image"] == pytest.approx(0.3 / 2)
    assert found["all have text about one image"] == 3000


async def test_images_stay_in_their_messages() -> None:
    """A conversation has each image where it was sent; clients with the same opening have the same image."""
    spec = TargetSpec("ours", "image-chat", "http://127.0.0.1:1")
    async with Http(spec) as http:
        session = ImageChatSession(http, spec)
        session.prompts = Prompts((" a", " b"), 2)
        first = Work(20, 8, seed=1, history_id="c", image=True)
        session._body(first, ("one",))
        session._body(replace(first, seed=2, image=False), ("one", "answer", "two"))
        opening = Opening(8, seed=9)
        texts = ("one", "answer", "two", "answer", "three")
        messages = session._body(replace(first, seed=3, opening=opening), texts)["messages"]
        other = session._body(Work(20, 8, seed=4, opening=opening, image=True), ("one",))["messages"]
    assert [isinstance(message["content"], list) for message in messages] == [True, False, False, False, True]
    assert messages[0]["content"][0] != messages[4]["content"][0] == other[0]["content"][0]


def test_any_server_is_measured_over_http() -> None:
    """Our daemon is measured at its HTTP address, another server at the given one."""
    ours = TargetSpec("ours", "inferencecenter", "ws://127.0.0.1:3000/", "t")
    peer = TargetSpec("peer", "llama-server", "http://127.0.0.1:8080")
    assert protocols.chat_with_images(ours) == replace(ours, kind="image-chat", url="http://127.0.0.1:3000")
    assert protocols.chat_with_images(peer) == replace(peer, kind="image-chat")


@pytest.mark.slow
async def test_scenario_runs(tmp_path: Path) -> None:
    """It starts a daemon with a projector and ends with the report."""
    await asyncio.to_thread(write_projector, tmp_path / "mmproj.gguf", n_embd=DEMO_WIDTH, size=SMALL)
    given = Options(mmproj=tmp_path / "mmproj.gguf", clients=(2,), max_tokens=4, repeat=1)
    scenario, progress = find("images"), RecordingProgress()
    options = resolve("images", given, defaults=scenario.defaults, takes=scenario.takes)
    report = await run_scenario(scenario, options, progress)
    figures = {each.name: each.value for each in report.points[0].repetitions[0][0]}
    assert figures["TTFT new image p50"] > 0
    assert figures["all have text about one image"] > 0
    beside = {each.name: each.value for each in report.points[1].repetitions[0][0]}
    assert beside["ITL meanwhile worst"] > 0
    assert progress.finished == progress.expected == 2


async def test_projector_is_required() -> None:
    """The bundled model has none."""
    scenario = find("images")
    options = resolve("images", Options(), defaults=scenario.defaults, takes=scenario.takes)
    with pytest.raises(InferenceCenterError, match="needs a projector"):
        await run_scenario(scenario, options, RecordingProgress())

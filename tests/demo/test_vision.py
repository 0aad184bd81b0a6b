"""The vision tower's network against llama.cpp, and its training; skipped where the `train` extra is not installed."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from inferencecenter.demo import demo_model_path  # noqa: E402 (needs torch)
from tools.demo_model import vision_export, vision_train  # noqa: E402
from tools.demo_model.frozen import load_frozen  # noqa: E402
from tools.demo_model.pictures import COLORS, DIGITS, SHAPES, draw, letterbox  # noqa: E402
from tools.demo_model.seeing import SeeingModel  # noqa: E402
from tools.demo_model.vision import VisionShape, VisionTower  # noqa: E402
from tools.demo_model.vision_corpus import conversation  # noqa: E402
from tools.demo_model.vision_export import export  # noqa: E402
from tools.demo_model.vision_train import TargetRows, VisionEncoder, VisionLearner, varied  # noqa: E402
from tools.demo_model.world import Draw  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_exported_tower_computes_the_same_rows(tmp_path: Path) -> None:
    """llama.cpp resizes, normalizes and encodes as training does, for square and other pictures."""
    torch.manual_seed(1)
    tower = VisionTower(VisionShape(), 192)
    for parameter in tower.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, std=0.3)
    path = tmp_path / "mmproj.gguf"
    export(tower.state_dict(), tower.shape, path)
    with SeeingModel.load(demo_model_path(), path) as model, torch.no_grad():
        for number in range(20):
            pixels = draw([77, number]).pixels
            expected = tower(torch.from_numpy(letterbox(pixels, tower.shape.side))[None])[0].numpy()
            np.testing.assert_allclose(model.rows(pixels), expected, atol=2e-3)


def test_frozen_model_computes_the_shipped_logits(tmp_path: Path) -> None:
    """llama.cpp rounds activations to 8 bits, so they differ a little."""
    language = load_frozen(demo_model_path())
    path = tmp_path / "mmproj.gguf"
    export(VisionTower(VisionShape(), 192).state_dict(), VisionShape(), path)
    with SeeingModel.load(demo_model_path(), path) as model, torch.no_grad():
        text = "<|im_start|>user\nMy name is Ada.<|im_end|>\n<|im_start|>assistant\nNice to"
        states = language.hidden(torch.tensor([model.tokens(text)]))[0, -1]
        np.testing.assert_allclose(model.logits([text]), (states @ language.token_embd.weight.T).numpy(), atol=0.5)


def test_training_reduces_the_loss_on_a_repeated_batch() -> None:
    """Rows are learned through the language model, which keeps its weights, and then by the tower."""
    torch.manual_seed(0)
    language = load_frozen(demo_model_path())
    before = {name: each.clone() for name, each in language.state_dict().items()}
    shape = VisionShape(layers=1)
    phrases = torch.randn(len(COLORS), len(SHAPES) + len(DIGITS), shape.rows, language.shape.width) * 0.1
    learner = VisionLearner(shape, language, TargetRows(phrases))
    encoder = VisionEncoder(lambda text: [3 + ord(character) % 250 for character in text], shape.rows)
    messages = conversation(Draw(Random(1)), ["A red circle.", "A blue 2."])
    batch = encoder.batch([(messages, [0, 1]), (messages, [1, 0])])
    classes = tuple(torch.tensor(numbers)[batch.pictures] for numbers in ([0, 2], [0, 7]))
    pixels = torch.from_numpy(np.stack([letterbox(draw([5, number]).pixels, shape.side) for number in range(2)]))
    optimizer = torch.optim.AdamW(learner.parameters(), lr=1e-2)

    def learn(loss_now: Callable[[], Any]) -> list[float]:
        losses = []
        for _ in range(8):
            loss = loss_now()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses

    answers = learn(lambda: learner.loss_of_targets(classes, batch))
    rows = learn(lambda: learner.loss_of_rows(pixels[batch.pictures], classes))
    assert answers[-1] < answers[0]
    assert rows[-1] < rows[0]
    assert all(torch.equal(before[name], each) for name, each in language.state_dict().items())


def test_rows_of_another_figure_cost_more_than_distant_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the same distance from the right rows, those towards another figure are the worse decision."""
    torch.manual_seed(0)
    shape = VisionShape(layers=1)
    language = load_frozen(demo_model_path())
    phrases = torch.randn(len(COLORS), len(SHAPES) + len(DIGITS), shape.rows, language.shape.width)
    learner = VisionLearner(shape, language, TargetRows(phrases))
    classes = (torch.tensor([2]), torch.tensor([3]))
    right = learner.targets(*classes).detach()
    towards = learner.targets(classes[0], torch.tensor([4])).detach() - right
    elsewhere = torch.randn_like(towards)
    elsewhere *= towards.norm() / elsewhere.norm()
    pixels = torch.zeros(1, shape.side, shape.side, 3)

    def loss(rows: Any) -> float:
        monkeypatch.setattr(learner.tower, "project", lambda _: rows)
        return float(learner.loss_of_decisions(pixels, classes).detach())

    assert loss(right) < loss(right + elsewhere) < loss(right + towards)


def test_varied_pictures_stay_near_the_given_ones() -> None:
    """Their mean changes little, their pixels do; equal seeds give equal pictures."""
    pixels = torch.from_numpy(np.stack([letterbox(draw([5, number]).pixels, 40) for number in range(8)]))
    torch.manual_seed(3)
    one = varied(pixels)
    torch.manual_seed(3)
    assert torch.equal(one, varied(pixels))
    assert one.shape == pixels.shape
    assert 0 <= float(one.min()) <= float(one.max()) <= 255
    apart = (one - pixels).flatten(1)
    assert float(apart.mean(1).abs().max()) < 30
    assert float(apart.abs().mean(1).min()) > 0.5


@pytest.mark.slow
def test_recipe_runs_to_the_end_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The documented commands with two steps a stage: a run that is continued gives the weights of one that is not."""
    stages = tuple(replace(stage, steps=2, batch=2) for stage in vision_train.STAGES)
    for name, value in (("STAGES", stages), ("PICTURES", 40), ("_PICTURES_BESIDE", 4)):
        monkeypatch.setattr(vision_train, name, value)
    n_steps = 2 * len(stages)
    for name, stops in (("whole", (n_steps,)), ("parts", (1, 7, n_steps))):
        for stop in stops:
            vision_train.main(tmp_path / name, steps=stop)
        vision_export.main(tmp_path / name, tmp_path / f"{name}.gguf")
    assert (tmp_path / "whole.gguf").read_bytes() == (tmp_path / "parts.gguf").read_bytes()
    with SeeingModel.load(demo_model_path(), tmp_path / "whole.gguf") as model:
        assert model.rows(draw([1, 1]).pixels).shape == (VisionShape().rows, 192)

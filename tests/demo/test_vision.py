"""The vision tower's network against llama.cpp, and its training; skipped where the `train` extra is not installed."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from inferencecenter.demo import demo_model_path  # noqa: E402 (needs torch)
from tools.demo_model.frozen import load_frozen  # noqa: E402
from tools.demo_model.pictures import COLORS, DIGITS, SHAPES, draw, letterbox  # noqa: E402
from tools.demo_model.seeing import SeeingModel  # noqa: E402
from tools.demo_model.vision import VisionShape, VisionTower  # noqa: E402
from tools.demo_model.vision_corpus import conversation  # noqa: E402
from tools.demo_model.vision_export import export  # noqa: E402
from tools.demo_model.vision_train import TargetRows, VisionEncoder, VisionLearner  # noqa: E402
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

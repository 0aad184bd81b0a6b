"""The shipped projector: what the demo model says of pictures that training never showed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf
import pytest

from inferencecenter.demo import demo_model_path, demo_projector_path
from tools.demo_model.seeing import SeeingModel
from tools.demo_model.vision_evaluate import LEAST_SHARE, NAMED, RECALLED, score

if TYPE_CHECKING:
    from collections.abc import Iterator

_LARGEST_BYTES = 1 << 20


@pytest.fixture(scope="module")
def model() -> Iterator[SeeingModel]:
    """The shipped files, loaded."""
    with SeeingModel.load(demo_model_path(), demo_projector_path()) as loaded:
        yield loaded


def test_projector_file_is_packaged() -> None:
    """It is package data of bounded size, and describes itself."""
    path = demo_projector_path()
    assert path.stat().st_size < _LARGEST_BYTES
    metadata: dict[str, Any] = {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items()}
    assert metadata["general.architecture"] == "clip"
    assert metadata["clip.projector_type"] == "mlp"
    assert metadata["general.license"] == "Apache-2.0"


@pytest.mark.parametrize("kind", [NAMED, RECALLED])
def test_pictures_are_named_and_recalled(model: SeeingModel, kind: str) -> None:
    """Of 20 pictures, at once and three turns later."""
    assert score(model, kind, 20).share >= LEAST_SHARE


@pytest.mark.slow
@pytest.mark.parametrize("kind", [NAMED, RECALLED])
def test_projector_meets_its_release_criteria(model: SeeingModel, kind: str) -> None:
    """On 300 pictures; the model card has the shares that were measured on 1,000."""
    assert score(model, kind, 300).share >= LEAST_SHARE

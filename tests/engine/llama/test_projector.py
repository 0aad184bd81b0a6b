"""Images become tokens and rows by a projector of random weights."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from llama_cpp import llama_cpp as lib

from inferencecenter.core.errors import InferenceCenterError
from inferencecenter.engine.llama.model_file import check_projector_file
from inferencecenter.engine.llama.projector import LlamaProjector
from inferencecenter.ipc.images import ImageRef, is_row
from tests.engine.llama.tiny_projectors import ROWS, write_grid_projector, write_projector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from inferencecenter.engine.llama.log import LlamaLog
    from tests.engine.llama.conftest import Loaded


def image_of(pixels: bytes, width: int, height: int) -> ImageRef:
    """Name an image by its pixels."""
    return ImageRef(hashlib.sha256(pixels).hexdigest(), width, height)


def noise(width: int, height: int, *, seed: int) -> bytes:
    """Return the pixels of a picture of noise."""
    return np.random.default_rng(seed).integers(0, 256, 3 * width * height, np.uint8).tobytes()


@pytest.fixture
def projector(demo: Loaded, tmp_path: Path, log: LlamaLog) -> Iterator[LlamaProjector]:
    """A projector for the demo model."""
    path = tmp_path / "mmproj.gguf"
    write_projector(path, n_embd=lib.llama_model_n_embd_inp(demo.model.handle))
    loaded = LlamaProjector.load(path, demo.model, device=None, n_threads=1, max_rows=64, log=log)
    yield loaded
    loaded.close()


@pytest.mark.parametrize("size", [(32, 32), (7, 90), (640, 480)])
def test_image_of_any_size_becomes_rows(projector: LlamaProjector, size: tuple[int, int]) -> None:
    """Their number is known without pixels, and each has the width of the model."""
    pixels = noise(*size, seed=1)
    image = image_of(pixels, *size)
    tokens = projector.tokens(image)
    assert len(tokens) == ROWS
    assert all(map(is_row, tokens))
    run = projector.encode(image, pixels, 0)
    assert run.shape == (ROWS, projector.n_embd)
    assert np.isfinite(run).all()


def test_equal_images_have_equal_rows(projector: LlamaProjector) -> None:
    """Ids and embeddings depend on the pixels alone; those of other pixels differ."""
    one, other = noise(32, 32, seed=1), noise(32, 32, seed=2)
    first, again, second = (
        projector.encode(image_of(pixels, 32, 32), pixels, 0) for pixels in (one, bytes(bytearray(one)), other)
    )
    assert np.array_equal(first, again)
    assert not np.allclose(first, second, atol=0.1)
    ids = [projector.tokens(image_of(pixels, 32, 32)) for pixels in (one, one, other)]
    assert ids[0] == ids[1]
    assert not set(ids[0]) & set(ids[2])


def test_pixels_must_match_the_size(projector: LlamaProjector) -> None:
    """C code would read beyond the end."""
    with pytest.raises(ValueError, match="3071 bytes for 32 x 32 pixels"):
        projector.encode(ImageRef("00", 32, 32), bytes(3071), 0)


@pytest.mark.parametrize("damage", ["missing", "empty", "model", "width", "kind"])
def test_unusable_projector_is_refused_by_name(demo: Loaded, tmp_path: Path, log: LlamaLog, damage: str) -> None:
    """The error names the file and what llama.cpp says of it."""
    path = tmp_path / "mmproj.gguf"
    n_embd = lib.llama_model_n_embd_inp(demo.model.handle)
    match damage:
        case "empty":
            path.touch()
        case "model":
            path.write_bytes(Path(demo.model.path).read_bytes())
        case "width":
            write_projector(path, n_embd=n_embd + 32)
        case "kind":
            write_projector(path, n_embd=n_embd, kind="unheard_of")
    with pytest.raises(InferenceCenterError, match=r"mmproj\.gguf") as refused:
        LlamaProjector.load(path, demo.model, device=None, n_threads=1, max_rows=64, log=log)
    assert refused.value.code == "invalid_model_file"


@pytest.mark.parametrize(
    ("write", "tensor"),
    [
        *[
            (write_projector, name)
            for name in ("v.patch_embd.weight", "v.position_embd.weight", "v.blk.0.attn_q.weight")
        ],
        *[(write_projector, f"mm.{number}.{part}") for number in (0, 2) for part in ("weight", "bias")],
        (write_grid_projector, "v.patch_embd.weight.1"),
        (write_grid_projector, "v.blk.1.attn_v.bias"),
    ],
)
def test_missing_tensor_is_named(
    demo: Loaded, tmp_path: Path, log: LlamaLog, write: Callable[..., None], tensor: str
) -> None:
    """Llama.cpp would follow a null pointer, which ends the process."""
    path = tmp_path / "mmproj.gguf"
    write(path, n_embd=lib.llama_model_n_embd_inp(demo.model.handle), without=tensor)
    with pytest.raises(InferenceCenterError) as refused:
        LlamaProjector.load(path, demo.model, device=None, n_threads=1, max_rows=64, log=log)
    assert refused.value.code == "invalid_model_file"
    assert refused.value.message == f"{path} lacks 1 of its tensors: {tensor}."


def test_shorter_file_than_its_tensors_is_refused(demo: Loaded, tmp_path: Path, log: LlamaLog) -> None:
    """A download that was interrupted has a whole header."""
    path = tmp_path / "mmproj.gguf"
    write_projector(path, n_embd=lib.llama_model_n_embd_inp(demo.model.handle))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InferenceCenterError, match=r"mmproj\.gguf is truncated: "):
        LlamaProjector.load(path, demo.model, device=None, n_threads=1, max_rows=64, log=log)


def test_unsupported_kind_is_refused_by_name(tmp_path: Path) -> None:
    """A second image of HunyuanVL would get the positions of a first one."""
    path = tmp_path / "mmproj.gguf"
    write_projector(path, n_embd=64, kind="hunyuanvl")
    with pytest.raises(InferenceCenterError, match="a projector of the type hunyuanvl: positions of its images"):
        check_projector_file(path)

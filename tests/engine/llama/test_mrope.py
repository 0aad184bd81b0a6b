"""Images in a model with M-RoPE, where the rows of an image share positions. The reference is libmtmd's own helper."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest
from llama_cpp import llama_cpp as lib
from llama_cpp import mtmd_cpp

from inferencecenter.engine.backend import Chunk
from inferencecenter.engine.llama.backend import BatchArrays
from inferencecenter.engine.llama.projector import LlamaProjector
from inferencecenter.ipc.images import is_row
from tests.engine.llama.conftest import Loaded, _loaded
from tests.engine.llama.test_projector import image_of, noise
from tests.engine.llama.tiny_models import MODEL_WIDTH, write_mrope_model
from tests.engine.llama.tiny_projectors import write_grid_projector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from inferencecenter.engine.llama.log import LlamaLog
    from inferencecenter.ipc.engine_options import EngineOptions
    from inferencecenter.ipc.images import ImageRef

BEFORE, AFTER = [5, 6, 7], [8, 9, 10]


@dataclass(frozen=True)
class Seeing:
    """A loaded model, its projector, and a picture with its rows."""

    loaded: Loaded
    projector: LlamaProjector
    image: ImageRef
    pixels: bytes
    rows: NDArray[np.float32]
    row_ids: list[int]

    def show(self, slot: int) -> NDArray[np.float32]:
        """Append the rows to a slot and return the logits after the last."""
        context = self.loaded.context
        positions = self.projector.positions(self.image, 0)
        chunk = Chunk(slot, context.length(slot), self.row_ids, sample=True, embeddings=self.rows, positions=positions)
        context.decode([chunk])
        return self.loaded.logits(0)


@pytest.fixture
def seeing(options: EngineOptions, tmp_path_factory: pytest.TempPathFactory, log: LlamaLog) -> Iterator[Seeing]:
    """A model of Qwen2-VL's shape, and a wide picture."""
    folder = tmp_path_factory.mktemp("mrope")
    write_mrope_model(folder / "model.gguf")
    write_grid_projector(folder / "mmproj.gguf", n_embd=MODEL_WIDTH)
    for loaded in _loaded(options.replace(model_path=str(folder / "model.gguf"))):
        projector = LlamaProjector.load(
            folder / "mmproj.gguf", loaded.model, device=None, n_threads=1, max_rows=100, log=log
        )
        pixels = noise(96, 64, seed=1)
        image = image_of(pixels, 96, 64)
        ids = [token for token in projector.tokens(image) if is_row(token)]
        yield Seeing(loaded, projector, image, pixels, projector.encode(image, pixels, 0), ids)
        projector.close()


def by_helper(seeing: Seeing, slot: int) -> list[NDArray[np.float32]]:
    """Return the logits after each token of ``AFTER``, computed by libmtmd and plain llama.cpp."""
    loaded, handle = seeing.loaded, seeing.loaded.context.handle
    loaded.feed(slot, BEFORE)
    position = ctypes.c_int32()
    with seeing.projector._parts(seeing.image, seeing.pixels) as parts:
        (part,) = (each for each in parts if mtmd_cpp.mtmd_input_chunk_get_type(each) != 0)
        embeddings = seeing.rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        handles = seeing.projector._handle, handle, part, embeddings
        assert not mtmd_cpp.mtmd_helper_decode_image_chunk(
            *handles, len(BEFORE), slot, 64, ctypes.byref(position), mtmd_cpp.mtmd_helper_post_decode_callback(), None
        )
    logits = []
    for number, token in enumerate(AFTER):
        batch = BatchArrays(n_batch=4, slots=loaded.context.slots)
        assert not lib.llama_decode(handle, batch.fill([Chunk(slot, position.value + number, [token], sample=True)]))
        pointer = lib.llama_get_logits_ith(handle, 0)
        logits.append(np.ctypeslib.as_array(pointer, (loaded.model.vocab.n_tokens,)).copy())
    lib.llama_memory_seq_rm(lib.llama_get_memory(handle), slot, -1, -1)
    return logits


def test_rows_and_what_follows_are_at_the_positions_of_mtmd(seeing: Seeing) -> None:
    """The picture takes as many positions as its longer side has rows."""
    expected = by_helper(seeing, 1)
    loaded = seeing.loaded
    loaded.context.truncate(1, 0)
    loaded.feed(0, BEFORE)
    seeing.show(0)
    assert loaded.context.length(0) == len(BEFORE) + len(seeing.rows)
    for token, logits in zip(AFTER, expected, strict=True):
        np.testing.assert_allclose(loaded.feed(0, [token]), logits, atol=1e-5)
    positions = seeing.projector.positions(seeing.image, 0)
    assert positions is not None
    assert positions.n_positions < len(seeing.rows)


@pytest.mark.parametrize("way", ["truncate", "copy", "save", "swap"])
def test_context_is_continued_after(seeing: Seeing, way: str) -> None:
    """At the same positions, whether text, the rows or a second picture comes next."""
    loaded, context = seeing.loaded, seeing.loaded.context
    loaded.feed(0, BEFORE)
    seeing.show(0)
    shown = context.length(0)
    loaded.feed(0, AFTER)
    seeing.show(0)
    expected = loaded.feed(0, AFTER)
    slot = 0
    if way == "truncate":
        assert context.truncate(0, shown)
    elif way == "copy":
        assert context.copy(0, 3, shown)
        slot = 3
    elif way == "save":
        buffer = memoryview(bytearray(context.state_bytes(0)))
        saved = buffer[: context.save(0, buffer)]
        assert context.restore(2, saved, context.length(0))
        assert context.truncate(2, shown)
        slot = 2
    else:
        context.swap(0, 4)
        assert context.truncate(4, shown)
        slot = 4
    loaded.feed(slot, AFTER)
    seeing.show(slot)
    np.testing.assert_allclose(loaded.feed(slot, AFTER), expected, atol=1e-5)
    assert context.truncate(slot, len(BEFORE))
    seeing.show(slot)
    loaded.feed(slot, AFTER)
    seeing.show(slot)
    np.testing.assert_allclose(loaded.feed(slot, AFTER), expected, atol=1e-5)


def test_sequence_is_restored_with_another_number_of_slots(seeing: Seeing) -> None:
    """The runs are in front of what is rewritten."""
    loaded = seeing.loaded
    loaded.feed(0, BEFORE)
    seeing.show(0)
    buffer = memoryview(bytearray(loaded.context.state_bytes(0)))
    saved = buffer[: loaded.context.save(0, buffer)]
    length, expected = loaded.context.length(0), loaded.feed(0, AFTER)
    with loaded.with_slots(2) as other:
        assert other.context.restore(1, saved, length)
        np.testing.assert_allclose(other.feed(1, AFTER), expected, atol=1e-5)


def test_slot_is_emptied_rather_than_cut_within_a_picture(seeing: Seeing) -> None:
    """llama.cpp would keep rows of the same time."""
    loaded = seeing.loaded
    loaded.feed(0, BEFORE)
    seeing.show(0)
    assert not loaded.context.truncate(0, len(BEFORE) + 1)
    assert loaded.context.length(0) == 0
    np.testing.assert_array_equal(loaded.feed(0, BEFORE), loaded.feed(1, BEFORE))


def test_rows_beyond_a_batch_keep_their_positions(seeing: Seeing) -> None:
    """A picture of more rows than a batch holds is decoded in parts."""
    loaded = seeing.loaded
    pixels = noise(192, 160, seed=2)
    image = image_of(pixels, 192, 160)
    large = Seeing(
        loaded,
        seeing.projector,
        image,
        pixels,
        seeing.projector.encode(image, pixels, 0),
        [token for token in seeing.projector.tokens(image) if is_row(token)],
    )
    assert len(large.rows) > loaded.options.n_batch
    expected = by_helper(large, 1)
    loaded.context.truncate(1, 0)
    loaded.feed(0, BEFORE)
    large.show(0)
    for token, logits in zip(AFTER, expected, strict=True):
        np.testing.assert_allclose(loaded.feed(0, [token]), logits, atol=1e-5)

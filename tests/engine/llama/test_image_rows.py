"""Rows of an image in a context: an embedding takes the place of a token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf
import numpy as np
import pytest

from inferencecenter.engine.backend import Chunk, DecodeError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tests.engine.llama.conftest import Loaded


@pytest.fixture(scope="module")
def embeddings(demo_model_path: str) -> NDArray[np.float32]:
    """The embedding of each token of the demo model."""
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(demo_model_path).tensors}
    matrix = tensors["token_embd.weight"]
    return np.ascontiguousarray(gguf.quants.dequantize(matrix.data, matrix.tensor_type), np.float32)


def rows_of(slot: int, start: int, rows: NDArray[np.float32], *, sample: bool = False) -> Chunk:
    """A chunk of an image's rows."""
    return Chunk(slot, start, [-1 - row for row in range(len(rows))], sample=sample, embeddings=rows)


def test_row_is_computed_as_the_token_with_its_embedding(demo: Loaded, embeddings: NDArray[np.float32]) -> None:
    """Between tokens, at the end, and beyond a batch of 64."""
    before, image, after = [5, 6, 7], [*range(20, 120)], [8, 9]
    for slot in (0, 1):
        demo.context.decode([Chunk(slot, 0, before, sample=False)])
    expected_last = demo.feed(0, image)
    demo.context.decode([rows_of(1, 3, embeddings[image], sample=True)])
    np.testing.assert_allclose(demo.logits(0), expected_last, atol=2e-3)
    assert demo.context.length(1) == 103
    np.testing.assert_allclose(demo.feed(1, after), demo.feed(0, after), atol=2e-3)


def test_rows_are_saved_and_restored(demo: Loaded, embeddings: NDArray[np.float32]) -> None:
    """KV does not show what it was computed from."""
    demo.context.decode([rows_of(0, 0, embeddings[20:60])])
    buffer = memoryview(bytearray(demo.context.state_bytes(0)))
    saved = buffer[: demo.context.save(0, buffer)]
    expected = demo.feed(0, [5])
    assert demo.context.restore(1, saved, 40)
    np.testing.assert_array_equal(demo.feed(1, [5]), expected)


def test_rows_may_attend_to_each_other(demo: Loaded, embeddings: NDArray[np.float32]) -> None:
    """The first row then depends on the last, which changes what follows; tokens after them are causal again."""
    causal, mutual = 0, 1
    demo.context.decode([rows_of(causal, 0, embeddings[20:60])])
    demo.context.rows_are_causal = False
    try:
        demo.context.decode([rows_of(mutual, 0, embeddings[20:60])])
        with pytest.raises(DecodeError, match="65 rows of an image do not fit n_ubatch, which is 64"):
            demo.context.decode([rows_of(2, 0, embeddings[20:85])])
    finally:
        demo.context.rows_are_causal = True
    one, other = demo.feed(causal, [5, 6]), demo.feed(mutual, [5, 6])
    assert np.abs(one - other).max() > 0.01
    plain = demo.feed(3, [5, 6])
    np.testing.assert_array_equal(demo.feed(4, [5, 6]), plain)


def test_rows_are_decoded_alone(demo: Loaded, embeddings: NDArray[np.float32]) -> None:
    """A batch holds either tokens or embeddings, and as many as the chunk says."""
    with pytest.raises(ValueError, match="decoded alone"):
        demo.context.decode([rows_of(0, 0, embeddings[:4]), Chunk(1, 0, [5], sample=False)])
    with pytest.raises(ValueError, match="decoded alone"):
        demo.context.decode([Chunk(0, 0, [-1, -2], sample=False, embeddings=embeddings[:3])])

"""Tests of ``engine.llama.batch``."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.engine.backend import Chunk
from inferencecenter.engine.llama.backend import BatchArrays, split


def test_rows_follow_the_chunks() -> None:
    """Every token gets its position, its slot and, at the end of a sampled chunk, its logits."""
    arrays = BatchArrays(n_batch=8, slots=4)
    arrays.fill([Chunk(0, 0, [9] * 8, sample=True)])
    batch = arrays.fill([Chunk(1, 5, [10, 11], sample=True), Chunk(2, 0, [12], sample=False), Chunk(3, 7, [13], True)])
    assert batch.n_tokens == 4
    assert batch.token[:4] == [10, 11, 12, 13]
    assert batch.pos[:4] == [5, 6, 0, 7]
    assert [batch.seq_id[row][0] for row in range(4)] == [1, 1, 2, 3]
    assert batch.n_seq_id[:4] == [1] * 4
    assert batch.logits[:4] == [0, 1, 0, 1]
    assert arrays.sampled == [1, 3]


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6), spare=st.integers(0, 20))
def test_split_covers_every_token_once_with_final_tokens_last(lengths: list[int], spare: int) -> None:
    """Parts fit and continue each other; only the last has final tokens, so all logits are available."""
    n_batch = len(lengths) + spare
    chunks = [Chunk(slot, 3 * slot, list(range(length)), sample=True) for slot, length in enumerate(lengths)]
    parts = list(split(chunks, n_batch))
    seen: dict[int, list[int]] = {chunk.slot: [] for chunk in chunks}
    for part in parts:
        assert 0 < sum(len(chunk.tokens) for chunk in part) <= n_batch
        for chunk in part:
            assert chunk.tokens
            assert chunk.start == 3 * chunk.slot + len(seen[chunk.slot])
            assert chunk.sample == (part is parts[-1])
            seen[chunk.slot] += chunk.tokens
    assert [chunk.slot for chunk in parts[-1]] == [chunk.slot for chunk in chunks]
    assert seen == {chunk.slot: chunk.tokens for chunk in chunks}


def test_split_keeps_small_batches() -> None:
    """Chunks that fit one call are one call."""
    chunks = [Chunk(0, 0, [1, 2], sample=True)]
    assert list(split(chunks, 2)) == [chunks]


def test_drafts_and_the_token_before_them_have_logits() -> None:
    """Rows of several chunks are numbered consecutively."""
    arrays = BatchArrays(n_batch=16, slots=4)
    chunks = [
        Chunk(0, 5, [10], sample=True),
        Chunk(1, 3, [11, 12, 13, 14], sample=True, drafts=2),
        Chunk(2, 0, [15], sample=False),
        Chunk(3, 7, [16, 17], sample=True, drafts=1),
    ]
    batch = arrays.fill(chunks)
    assert batch.logits[:8] == [1, 0, 1, 1, 1, 0, 1, 1]
    assert arrays.sampled == [0, 2, 3, 4, 6, 7]


@given(
    chunks=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 4)), min_size=1, max_size=5), spare=st.integers(0, 20)
)
def test_split_keeps_drafts_in_the_last_part(chunks: list[tuple[int, int]], spare: int) -> None:
    """The token before them is in that part, too, so their logits are available together."""
    whole = [
        Chunk(slot, slot, list(range(length + drafts)), sample=True, drafts=drafts)
        for slot, (length, drafts) in enumerate(chunks)
    ]
    n_batch = sum(chunk.n_sampled for chunk in whole) + spare
    *heads, last = split(whole, n_batch)
    assert all(not chunk.sample and not chunk.drafts for part in heads for chunk in part)
    assert all(sum(len(chunk.tokens) for chunk in part) <= n_batch for part in (*heads, last))
    for chunk, end in zip(whole, last, strict=True):
        assert (end.sample, end.drafts) == (True, chunk.drafts)
        assert len(end.tokens) > chunk.drafts
        assert end.start + len(end.tokens) == chunk.start + len(chunk.tokens)
        begun = [token for part in heads for head in part if head.slot == chunk.slot for token in head.tokens]
        assert [*begun, *end.tokens] == chunk.tokens


def test_more_logits_than_a_call_has_rows_are_refused() -> None:
    """They could not all be read."""
    with pytest.raises(ValueError, match="more than 4"):
        next(split([Chunk(0, 0, [1, 2, 3], sample=True, drafts=2), Chunk(1, 0, [1, 2], sample=True, drafts=1)], 4))

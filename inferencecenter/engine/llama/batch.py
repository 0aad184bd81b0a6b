"""The arrays of a ``llama_batch``, allocated once, and the cutting of work that is too large for one."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from llama_cpp import llama_cpp as lib

from inferencecenter.engine.backend import Chunk

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_INT32 = ctypes.POINTER(ctypes.c_int32)


class BatchArrays:
    """A ``llama_batch`` whose arrays stay where they are and are filled in place."""

    def __init__(self, *, n_batch: int, slots: int) -> None:
        self._token = np.zeros(n_batch, np.int32)
        self._pos = np.zeros(n_batch, np.int32)
        self._n_seq_id = np.ones(n_batch, np.int32)
        self._logits = np.zeros(n_batch, np.int8)
        # Each row points at the cell of ``slot_ids`` that holds its slot's number.
        self._slot_ids = np.arange(slots, dtype=np.int32)
        self._slot_pointers = [self._slot_ids.ctypes.data + slot * self._slot_ids.itemsize for slot in range(slots)]
        self._seq_id = np.zeros(n_batch, np.uintp)
        self.sampled: list[int] = []
        self._batch = lib.llama_batch(
            n_tokens=0,
            token=self._token.ctypes.data_as(_INT32),
            embd=None,
            pos=self._pos.ctypes.data_as(_INT32),
            n_seq_id=self._n_seq_id.ctypes.data_as(_INT32),
            seq_id=self._seq_id.ctypes.data_as(ctypes.POINTER(_INT32)),
            logits=self._logits.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def fill(self, chunks: Sequence[Chunk]) -> lib.llama_batch:
        """Write chunks into the arrays in order; ``sampled`` then lists the rows whose logits are asked for."""
        tokens: list[int] = []
        positions: list[int] = []
        pointers: list[int] = []
        sampled: list[int] = []
        for chunk in chunks:
            n_tokens = len(chunk.tokens)
            tokens += chunk.tokens
            positions += range(chunk.start, chunk.start + n_tokens)
            pointers += [self._slot_pointers[chunk.slot]] * n_tokens
            if chunk.sample:
                sampled += range(len(tokens) - chunk.n_sampled, len(tokens))
        # One assignment an array: writing it chunk by chunk costs 10 µs a chunk.
        n_rows = len(tokens)
        self._token[:n_rows] = tokens
        self._pos[:n_rows] = positions
        self._seq_id[:n_rows] = pointers
        self._logits[:n_rows] = 0
        self._logits[sampled] = 1
        self.sampled = sampled
        self._batch.n_tokens = n_rows
        return self._batch


def split(chunks: Sequence[Chunk], n_batch: int) -> Iterator[Sequence[Chunk]]:
    """Yield what goes into each call of at most ``n_batch`` rows.

    Logits live until the next call, so every chunk keeps its last token for the last one, and with it its drafts; all
    of these must fit it. Before that the chunks advance in equal strides, which llama.cpp can compute together.

    Raises:
        ValueError: The last tokens and the drafts alone do not fit a call.
    """
    if sum(1 + chunk.drafts for chunk in chunks) > n_batch:
        raise ValueError(f"{len(chunks)} chunks have more than {n_batch} last tokens and drafts")
    while sum(len(chunk.tokens) for chunk in chunks) > n_batch:
        growing = [chunk for chunk in chunks if len(chunk.tokens) > 1 + chunk.drafts]
        stride = max(1, n_batch // len(growing))
        heads = [_head(chunk, min(stride, len(chunk.tokens) - 1 - chunk.drafts)) for chunk in growing[:n_batch]]
        yield heads
        done = {head.slot: len(head.tokens) for head in heads}
        chunks = [_rest(chunk, done.get(chunk.slot, 0)) for chunk in chunks]
    yield chunks


def _head(chunk: Chunk, n_tokens: int) -> Chunk:
    return Chunk(chunk.slot, chunk.start, chunk.tokens[:n_tokens], sample=False)


def _rest(chunk: Chunk, begin: int) -> Chunk:
    return replace(chunk, start=chunk.start + begin, tokens=chunk.tokens[begin:])

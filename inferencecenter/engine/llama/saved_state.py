"""A saved sequence: what llama.cpp wrote, behind a header that says where it depends on the number of slots.

llama.cpp writes its mark and the sequence's id, and then its caches one after the other. A KV cache is its number of
streams, which is the number of slots, and for each stream how many cells of it follow; only the sequence's own stream
has any. A context with another number of slots refuses these bytes, but takes the same cells behind its own number and
as many counts of zero. Which stream the cells stood in does not matter: they go to the slot they are restored into.

Recurrent caches do not count streams. Kinds of memory that are laid out otherwise than expected here are restored as
they are; llama.cpp checks every number of streams, and refuses them where the number of slots has changed.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING

import numpy as np
from llama_cpp import llama_cpp as lib

from inferencecenter.engine.llama.model_file import shards, unusable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from inferencecenter.engine.llama.model import LlamaModel
    from inferencecenter.ipc.messages import EngineOptions


# Two lengths of streamed parts: no known cache has more of them before anything else.
_HEADER = struct.Struct("<4sIIIQQQ")
_MARK = b"ICKV"
HEADER_BYTES = _HEADER.size
# llama.cpp's mark and sequence id.
_PREFIX_BYTES = 8
_WORD_BYTES = 4


@dataclass(frozen=True, slots=True)
class Layout:
    """How the bytes that llama.cpp wrote for a sequence are divided.

    ``size_bytes`` is all of them, ``streamed_bytes`` the lengths of the parts after the prefix that begin with the
    number of streams; what follows these is the same for any number of slots.
    """

    n_tokens: int
    slots: int
    size_bytes: int
    streamed_bytes: tuple[int, int]

    def write(self, buffer: memoryview) -> None:
        """Write the header into the first ``HEADER_BYTES``."""
        _HEADER.pack_into(buffer, 0, _MARK, self.n_tokens, self.slots, 0, self.size_bytes, *self.streamed_bytes)

    @classmethod
    def read(cls, data: memoryview) -> Layout | None:
        """Return what the header says; None where it is foreign, or ``data`` is shorter than it says."""
        if len(data) < HEADER_BYTES:
            return None
        mark, n_tokens, slots, reserved, size_bytes, first, second = _HEADER.unpack_from(data)
        fits = first + second + _PREFIX_BYTES <= size_bytes <= len(data) - HEADER_BYTES
        if mark != _MARK or reserved or not slots or not fits:
            return None
        return cls(n_tokens, slots, size_bytes, (first, second))

    def size_with(self, slots: int) -> int:
        """Return how many bytes llama.cpp takes for the same sequence in a context of so many slots."""
        n_parts = sum(map(bool, self.streamed_bytes))
        return self.size_bytes + n_parts * (slots - self.slots) * _WORD_BYTES


def streamed_bytes(full: int, partial: int, *, recurrent: bool, hybrid: bool) -> tuple[int, int]:
    """Return the lengths of the parts that count streams.

    Args:
        full: Bytes of the whole sequence.
        partial: Bytes that llama.cpp writes without the caches that can be cut anywhere, the prefix included: of a
            model with a sliding window those of its window, of a hybrid one those of its recurrent layers.
        recurrent: Whether the model has nothing but recurrent layers.
        hybrid: Whether it has recurrent layers beside attention.
    """
    if recurrent:
        return 0, 0
    if partial == full:
        return full - _PREFIX_BYTES, 0
    return full - partial, 0 if hybrid else partial - _PREFIX_BYTES


def bytes_per_token(first: tuple[int, int], second: tuple[int, int], *, window: int, n_ctx: int) -> int:
    """Return the bytes that a token of a full slot takes in a saved sequence, on average.

    Args:
        first: ``full`` and ``partial`` bytes (see ``streamed_bytes``) of a sequence of one token.
        second: Those of two tokens.
        window: Tokens in the sliding window, beyond which ``partial`` does not grow; 0 without one.
        n_ctx: Tokens in a full slot.
    """
    grows = second[0] - first[0]
    windowed = second[1] - first[1] if window else 0
    full_slot = first[0] + (grows - windowed) * (n_ctx - 1) + windowed * (min(window, n_ctx) - 1)
    return max(1, full_slot // n_ctx)


def rewrite(data: memoryview, layout: Layout, *, slots: int, into: NDArray[np.uint8]) -> bool:
    """Write the sequence for a context of another number of slots; ``False`` when ``data`` is not as laid out.

    Args:
        data: What llama.cpp wrote: ``layout.size_bytes``, without the header.
        layout: Its header.
        slots: The number of slots that it is to fit.
        into: At least ``layout.size_with(slots)`` bytes; written from the first.
    """
    out = into.data
    out[:_PREFIX_BYTES] = data[:_PREFIX_BYTES]
    start, at = _PREFIX_BYTES, _PREFIX_BYTES
    for length in filter(None, layout.streamed_bytes):
        part = data[start : start + length]
        cells = _cells(part, layout.slots)
        if cells is None:
            return False
        counts = struct.pack(f"<{slots}I", slots, *[0] * (slots - 1))
        out[at : at + len(counts)] = counts
        at += len(counts)
        out[at : at + len(cells)] = cells
        at += len(cells)
        start += length
    out[at : layout.size_with(slots)] = data[start:]
    return True


def _cells(part: memoryview, slots: int) -> memoryview | None:
    """Return the count and the cells of the one stream of a part that has any; None where it is otherwise."""
    if len(part) <= (1 + slots) * _WORD_BYTES:
        return None
    n_streams, *counts = struct.unpack_from(f"<{1 + slots}I", part)
    used = next((stream for stream, count in enumerate(counts) if count), None)
    if n_streams != slots or used is None:
        return None
    begin, end = (1 + used) * _WORD_BYTES, len(part) - (slots - 1 - used) * _WORD_BYTES
    return part[begin:end] if not any(part[end:]) else None


# Raised when the header of a saved sequence changes.
_FORMAT = 1
_BLOCKS = 128
_BLOCK_BYTES = 4096
_MODEL_FACTS = (
    lib.llama_model_n_params,
    lib.llama_model_size,
    lib.llama_model_n_layer,
    lib.llama_model_n_embd,
    lib.llama_model_n_head,
    lib.llama_model_n_head_kv,
    lib.llama_model_n_swa,
    lib.llama_model_rope_type,
    lib.llama_model_rope_freq_scale_train,
)


def fingerprint(model: LlamaModel, options: EngineOptions) -> str:
    """Return a hex digest that two engines share when each can go on with sequences that the other saved.

    It does not depend on the file's path, nor on the number and length of the slots. Of the file, the size and 128
    blocks of 4 KiB spread over it count, which tells fine-tuned weights apart without reading all of them. Of a LoRA
    adapter all of the file counts, and its scale.

    Raises:
        InferenceCenterError: ``invalid_model_file`` when a file cannot be read any more.
    """
    digest = hashlib.sha256()
    for fact in _facts(model, options):
        digest.update(f"{fact}\0".encode())
    for shard in shards(model.path):
        try:
            _add_file(digest, shard)
        except OSError as error:
            raise unusable(shard, f"cannot be read any more: {error.strerror}.") from None
    return digest.hexdigest()


def _facts(model: LlamaModel, options: EngineOptions) -> Iterator[object]:
    yield _FORMAT
    yield lib.llama_version().decode()
    yield version("llama-cpp-python")
    for fact in _MODEL_FACTS:
        yield fact(model.handle)
    yield from (options.kv_type_k, options.kv_type_v, options.flash_attention)
    yield from model.all_metadata()
    yield from model.adapters.facts()


def _add_file(digest: hashlib._Hash, path: Path) -> None:
    with path.open("rb") as file:
        size_bytes = path.stat().st_size
        digest.update(f"{size_bytes}\0".encode())
        last = max(0, size_bytes - _BLOCK_BYTES)
        for block in range(_BLOCKS):
            file.seek(last * block // (_BLOCKS - 1))
            digest.update(file.read(_BLOCK_BYTES))

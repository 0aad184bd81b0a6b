"""A saved sequence: llama.cpp's bytes after a header that locates what depends on the number of slots.

llama.cpp writes its magic and the sequence's id, then its caches one after the other. A KV cache is its number of
streams, which is the number of slots, and for each stream its number of cells; only the sequence's own stream has any.
A context with another number of slots rejects these bytes, but accepts the same cells after its own number and as many
counts of zero. Which stream the cells were in does not matter: they go to the slot they are restored into.

A model with M-RoPE gives the rows of an image fewer positions than there are rows. llama.cpp's cells have positions
only, so the runs are written between the header and its bytes.

Recurrent caches do not count streams. Kinds of memory with another layout are restored unchanged; llama.cpp checks
every number of streams, and rejects them if the number of slots has changed.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from llama_cpp import llama_cpp as lib

from inferencecenter.engine.llama.model_file import shards, unusable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from inferencecenter.engine.llama.model import LlamaModel
    from inferencecenter.ipc.engine_options import EngineOptions


# Two lengths of streamed parts: no known cache has more of them before anything else.
_HEADER = struct.Struct("<4sIIIQQQ")
_RUN = struct.Struct("<IIII")
_MARK = b"ICKV"
HEADER_BYTES = _HEADER.size
# llama.cpp's magic and sequence id.
_PREFIX_BYTES = 8
_WORD_BYTES = 4


class RowRun(NamedTuple):
    """A run of an image's rows whose positions are not the numbers of its tokens.

    It is tokens ``start`` to before ``end`` of a sequence; the greatest position of a row is ``last``, and that of the
    next token ``next_position``.
    """

    start: int
    end: int
    last: int
    next_position: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of the bytes that llama.cpp wrote for a sequence.

    ``size_bytes`` is the total, ``streamed_bytes`` the lengths of the parts after the prefix that begin with the number
    of streams; the rest is the same for any number of slots. ``runs`` are those of images.
    """

    n_tokens: int
    slots: int
    size_bytes: int
    streamed_bytes: tuple[int, int]
    runs: tuple[RowRun, ...] = ()

    @property
    def start(self) -> int:
        """Bytes before those of llama.cpp."""
        return start_of(len(self.runs))

    def write(self, buffer: memoryview) -> None:
        """Write the header and the runs into the first ``start`` bytes."""
        facts = self.n_tokens, self.slots, len(self.runs), self.size_bytes, *self.streamed_bytes
        _HEADER.pack_into(buffer, 0, _MARK, *facts)
        for number, run in enumerate(self.runs):
            _RUN.pack_into(buffer, start_of(number), *run)

    @classmethod
    def read(cls, data: memoryview) -> Layout | None:
        """Return the parsed header; ``None`` if it is invalid, or ``data`` is shorter than it states."""
        if len(data) < HEADER_BYTES:
            return None
        mark, n_tokens, slots, n_runs, size_bytes, first, second = _HEADER.unpack_from(data)
        start = start_of(n_runs)
        fits = first + second + _PREFIX_BYTES <= size_bytes <= len(data) - start
        if mark != _MARK or not slots or not fits:
            return None
        runs = tuple(RowRun(*_RUN.unpack_from(data, start_of(number))) for number in range(n_runs))
        return cls(n_tokens, slots, size_bytes, (first, second), runs)

    def size_with(self, slots: int) -> int:
        """Return the size of the same sequence in a context of ``slots`` slots."""
        n_parts = sum(map(bool, self.streamed_bytes))
        return self.size_bytes + n_parts * (slots - self.slots) * _WORD_BYTES


def start_of(n_runs: int) -> int:
    """Return the bytes before those of llama.cpp in a sequence with this many runs of rows."""
    return HEADER_BYTES + n_runs * _RUN.size


def streamed_bytes(full: int, partial: int, *, recurrent: bool, hybrid: bool) -> tuple[int, int]:
    """Return the lengths of the parts that count streams.

    Args:
        full: Bytes of the whole sequence.
        partial: Bytes that llama.cpp writes without the caches that can be cut anywhere, including the prefix: of a
            model with a sliding window those of its window, of a hybrid one those of its recurrent layers.
        recurrent: Whether the model has only recurrent layers.
        hybrid: Whether it has recurrent layers beside attention.
    """
    if recurrent:
        return 0, 0
    if partial == full:
        return full - _PREFIX_BYTES, 0
    return full - partial, 0 if hybrid else partial - _PREFIX_BYTES


def bytes_per_token(first: tuple[int, int], second: tuple[int, int], *, window: int, n_ctx: int) -> int:
    """Return the average bytes per token of a full slot in a saved sequence.

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
    """Rewrite the sequence for another number of slots; ``False`` when ``data`` does not match its layout.

    Args:
        data: llama.cpp's bytes: ``layout.size_bytes``, from ``layout.start`` on.
        layout: Its header.
        slots: The new number of slots.
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
    """Return the count and cells of the only stream of a part that has any; ``None`` if that is not so."""
    if len(part) <= (1 + slots) * _WORD_BYTES:
        return None
    n_streams, *counts = struct.unpack_from(f"<{1 + slots}I", part)
    used = next((stream for stream, count in enumerate(counts) if count), None)
    if n_streams != slots or used is None:
        return None
    begin, end = (1 + used) * _WORD_BYTES, len(part) - (slots - 1 - used) * _WORD_BYTES
    return part[begin:end] if not any(part[end:]) else None


# Incremented when the header of a saved sequence changes.
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
    """Return a hex digest, equal for two engines that can restore each other's saved sequences.

    It does not depend on the file's path, nor on the number and length of the slots. It covers the file's size and 128
    blocks of 4 KiB spread over it, which distinguishes fine-tuned weights without reading all of them. Of a LoRA
    adapter it covers the whole file and its scale.

    Raises:
        InferenceCenterError: ``invalid_model_file`` when a file can no longer be read.
    """
    digest = hashlib.sha256()
    for fact in _facts(model, options):
        digest.update(f"{fact}\0".encode())
    projector = (Path(options.mmproj_path),) if options.mmproj_path else ()
    for shard in (*shards(model.path), *projector):
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

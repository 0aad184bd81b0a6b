"""The llama.cpp backend: one model, one context, a native sampler chain per turn."""

from __future__ import annotations

import ctypes
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn
from weakref import WeakSet

import numpy as np
from llama_cpp import llama_cpp as lib

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.engine.backend import Chunk, DecodeError
from inferencecenter.engine.llama import saved_state
from inferencecenter.engine.llama.devices import pointers
from inferencecenter.engine.llama.draft_model import LlamaDraftModel, check_draft_model, draft_options
from inferencecenter.engine.llama.log import BufferSizes, LlamaLog
from inferencecenter.engine.llama.model import LlamaModel, load_model
from inferencecenter.engine.llama.projector import LlamaProjector
from inferencecenter.engine.llama.row_padding import MOST_APART, RowCounts, padding_slots
from inferencecenter.engine.llama.sampler import NativeSampler
from inferencecenter.engine.llama.saved_state import RowRun, fingerprint
from inferencecenter.engine.sampling.chain import plan_chain
from inferencecenter.engine.scheduler.speculation import most_drafts
from inferencecenter.hardware.memory import physical_cores
from inferencecenter.hardware.placement import decode_threads
from inferencecenter.ipc.images import is_row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from inferencecenter.engine.backend import RowPositions
    from inferencecenter.engine.sampling.constraint import Constraint
    from inferencecenter.ipc.engine_options import EngineOptions
    from inferencecenter.ipc.messages import BufferUse
    from inferencecenter.protocol.params import Params


_INT32 = ctypes.POINTER(ctypes.c_int32)


class BatchArrays:
    """A ``llama_batch`` with preallocated arrays that are filled in place."""

    def __init__(self, *, n_batch: int, slots: int) -> None:
        self._token = np.zeros(n_batch, np.int32)
        self._pos = np.zeros(4 * n_batch, np.int32)  # with M-RoPE a row has four
        self._n_seq_id = np.ones(n_batch, np.int32)
        self._logits = np.zeros(n_batch, np.int8)
        # Each row points at the element of ``slot_ids`` with its slot's number.
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

    def fill(self, chunks: Sequence[Chunk], padding: Sequence[Chunk] = ()) -> lib.llama_batch:
        """Write chunks into the arrays by slot; ``sampled`` then lists the rows whose logits are read.

        Their ``start`` is a position. ``padding`` is computed with them and its logits are not read.
        """
        tokens: list[int] = []
        positions: list[int] = []
        pointers: list[int] = []
        sampled: list[int] = []
        unread: list[int] = []
        padded = {chunk.slot for chunk in padding}
        for chunk in sorted([*chunks, *padding], key=lambda chunk: chunk.slot) if padding else chunks:
            n_tokens = len(chunk.tokens)
            tokens += chunk.tokens
            positions += range(chunk.start, chunk.start + n_tokens)
            pointers += [self._slot_pointers[chunk.slot]] * n_tokens
            if chunk.sample:
                rows = unread if chunk.slot in padded else sampled
                rows += range(len(tokens) - chunk.n_sampled, len(tokens))
        # One assignment per array: writing chunk by chunk costs 10 µs per chunk.
        n_rows = len(tokens)
        self._token[:n_rows] = tokens
        self._pos[:n_rows] = positions
        self._seq_id[:n_rows] = pointers
        self._logits[:n_rows] = 0
        self._logits[sampled + unread] = 1
        self.sampled = sampled
        self._batch.n_tokens = n_rows
        return self._batch

    def fill_embeddings(
        self, chunk: Chunk, rows: NDArray[np.float32], *, begin: int, positions: NDArray[np.int32]
    ) -> lib.llama_batch:
        """Write the ``positions`` of a chunk's ``rows`` from number ``begin`` on, and return their batch.

        Of the chunk's last row the logits are read if it is sampled.
        """
        n_rows = len(rows)
        positions = positions[..., begin : begin + n_rows]
        self._pos[: positions.size] = positions.reshape(-1)
        self._seq_id[:n_rows] = self._slot_pointers[chunk.slot]
        self._logits[:n_rows] = 0
        self.sampled = [n_rows - 1] if chunk.sample and begin + n_rows == len(chunk.tokens) else []
        self._logits[self.sampled] = 1
        return lib.llama_batch(
            n_tokens=n_rows,
            token=None,
            embd=rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float)),
            pos=self._batch.pos,
            n_seq_id=self._batch.n_seq_id,
            seq_id=self._batch.seq_id,
            logits=self._batch.logits,
        )


def split(chunks: Sequence[Chunk], n_batch: int) -> Iterator[Sequence[Chunk]]:
    """Yield the chunks of each call of at most ``n_batch`` rows.

    Logits live until the next call, so every chunk keeps its last token and its drafts for the last call, which all of
    them must fit. Before that the chunks advance in equal strides, which llama.cpp can compute together.

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


# Bits per weight of f16 and bf16, the smallest types that are not quantized.
_UNQUANTIZED_BITS: Final = 16


_KV_TYPES = {
    "f32": lib.GGML_TYPE_F32,
    "f16": lib.GGML_TYPE_F16,
    "bf16": 30,  # GGML_TYPE_BF16 of ggml.h, missing in the binding
    "q8_0": lib.GGML_TYPE_Q8_0,
    "q5_1": lib.GGML_TYPE_Q5_1,
    "q5_0": lib.GGML_TYPE_Q5_0,
    "q4_1": lib.GGML_TYPE_Q4_1,
    "q4_0": lib.GGML_TYPE_Q4_0,
    "iq4_nl": lib.GGML_TYPE_IQ4_NL,
}
FLASH_ATTENTION = {
    "auto": lib.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "on": lib.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": lib.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}
_FAILURES = {
    1: "the KV stream of a slot is full",
    2: "decoding was interrupted",
    -1: "llama.cpp rejected the batch",
    -2: "memory for the batch could not be allocated",
    -3: "computing the batch failed",
}


class LlamaContext:
    """A ``llama_context`` of ``slots`` sequences, used from one thread.

    It counts the tokens of each slot and compares the count with llama.cpp's own after every change, so that a sequence
    is never continued at a wrong position. A slot whose counts differ, or whose batch failed, is emptied. The rows of
    an image share positions with M-RoPE: the runs of each slot are kept, by which the position of any token is found.

    Attributes:
        rows_are_causal: Whether a row of an image attends only to earlier ones; else at most ``max_rows`` are decoded.
    """

    def __init__(self, model: LlamaModel, options: EngineOptions, *, n_threads: int, log: LlamaLog) -> None:
        self.slots = options.slots
        self.n_ctx = model.n_ctx(options.n_ctx)
        self.n_threads = n_threads
        log.take_problems()
        handle = lib.llama_init_from_model(model.handle, _context_params(options, self.n_ctx, n_threads))
        if not handle:
            raise _refusal(options, self.n_ctx, log.take_problems())
        self.handle: int = handle
        model.adapters.set_on(handle)
        self._memory: int = lib.llama_get_memory(handle)
        if not self._memory:
            self.close()
            raise InferenceCenterError(
                ErrorCode.INVALID_MODEL_FILE,
                f"{model.path} keeps no KV, as embedding models do.",
                hint="Choose a text generation model.",
                field="model_path",
            )
        self._window: int = lib.llama_model_n_swa(model.handle)
        self._recurrent: bool = lib.llama_model_is_recurrent(model.handle)
        self._hybrid: bool = lib.llama_model_is_hybrid(model.handle)
        self.can_truncate = not (self._window or self._recurrent or self._hybrid)
        pads_rows = self.can_truncate and not model.n_gpu_layers and _is_quantized(model)
        self._row_counts = RowCounts() if pads_rows else None
        self._n_batch: int = lib.llama_n_batch(handle)
        self.max_rows: int = lib.llama_n_ubatch(handle)
        self.rows_are_causal = True
        self._arrays = BatchArrays(n_batch=self._n_batch, slots=self.slots)
        self._lengths = [0] * self.slots
        self._runs: list[list[RowRun]] = [[] for _ in range(self.slots)]
        self._buffers = [np.empty(0, np.uint8), np.empty(0, np.uint8)]

    def length(self, slot: int) -> int:
        """Return the number of tokens in a slot."""
        return self._lengths[slot]

    def decode(self, chunks: Sequence[Chunk]) -> None:
        """Decode chunks in ascending slot order; afterwards the logits may be read from any thread.

        Raises:
            DecodeError: The named slots have been emptied, all others are unchanged.
            ValueError: There are no chunks, they do not continue their slots, or they are out of order.
        """
        self._check(chunks)
        full = [chunk.slot for chunk in chunks if chunk.start + len(chunk.tokens) > self.n_ctx]
        if full:
            self._fail(full, f"a slot holds {self.n_ctx} tokens at most")
        slots = [chunk.slot for chunk in chunks]
        row_counts = None if any(len(chunk.tokens) > 1 for chunk in chunks) else self._row_counts
        padding = self._padding(chunks, row_counts) if row_counts else []
        began_s = time.perf_counter()
        for batch in self._batches(chunks, padding):
            status = lib.llama_decode(self.handle, batch)
            for pad in padding:
                lib.llama_memory_seq_rm(self._memory, pad.slot, self._position(pad.slot, pad.start), -1)
            if status:
                self._fail(slots, _FAILURES.get(status, f"llama_decode gave {status}"))
        # The first read of the logits waits for the device and puts the rows in batch order.
        lib.llama_get_logits(self.handle)
        if row_counts:
            row_counts.observe(len(chunks) + len(padding), time.perf_counter() - began_s)
        for chunk in chunks:
            if chunk.positions is not None:
                self._runs[chunk.slot].append(self._run_of(chunk, chunk.positions))
            self._lengths[chunk.slot] = chunk.start + len(chunk.tokens)
        if not all(map(self._is_whole, slots)):
            self._fail(slots, "llama.cpp lost count of its tokens")

    def decodes_apart(self, chunks: Sequence[Chunk]) -> bool:
        """Return whether a decode for each chunk takes less time than one for all; see ``RowCounts``."""
        n_turns = len(chunks)
        if self._row_counts is None or not 2 <= n_turns <= MOST_APART or any(len(chunk.tokens) > 1 for chunk in chunks):
            return False
        padding = padding_slots([chunk.slot for chunk in chunks], self._lengths, n_ctx=self.n_ctx)
        return self._row_counts.best(n_turns, most=n_turns + len(padding)) == 1

    def batch_index(self, row: int) -> int:
        """Return the index in the last batch of the ``row``-th token with logits."""
        return self._arrays.sampled[row]

    def truncate(self, slot: int, n_tokens: int) -> bool:
        """Keep the first ``n_tokens`` of a slot; ``False`` when it had to be emptied instead.

        Recurrent models cannot be truncated, and a sliding window may have dropped the tokens before the position.

        Raises:
            ValueError: The slot holds fewer tokens.
        """
        length = self._lengths[slot]
        if not 0 <= n_tokens <= length:
            raise ValueError(f"slot {slot} holds {length} tokens and cannot be cut to {n_tokens}")
        if n_tokens == length:
            return True
        position = self._position(slot, n_tokens)
        within_run = any(run.start < n_tokens < run.end for run in self._runs[slot])
        covered = not within_run and self._window_covers(slot, position)
        if covered and lib.llama_memory_seq_rm(self._memory, slot, position, -1):
            self._lengths[slot] = n_tokens
            self._runs[slot] = [run for run in self._runs[slot] if run.end <= n_tokens]
            if self._is_whole(slot):
                return True
        self._empty(slot)
        return n_tokens == 0

    def swap(self, a: int, b: int) -> None:
        """Swap the sequences of two slots through their saved states.

        ``llama_memory_seq_cp`` between streams is deferred to the next decode and would copy a later owner's content.

        Raises:
            DecodeError: Both slots have been emptied.
        """
        if a == b:
            return
        lengths = self._lengths[a], self._lengths[b]
        saved = [self._save_aside(slot, number) for number, slot in enumerate((a, b))]
        for slot, data, n_tokens in ((a, saved[1], lengths[1]), (b, saved[0], lengths[0])):
            if n_tokens and not self.restore(slot, data, n_tokens):
                self._fail([a, b], "a saved sequence could not be restored")
            if not n_tokens:
                self._empty(slot)

    def copy(self, source: int, target: int, n_tokens: int) -> bool:
        """Replace the content of ``target`` by the first ``n_tokens`` of ``source``; ``False`` when it is empty now.

        Raises:
            ValueError: The slots are the same, or ``source`` holds fewer tokens.
        """
        length = self._lengths[source]
        if source == target or not 0 <= n_tokens <= length:
            raise ValueError(f"slot {source} holds {length} tokens; slot {target} cannot get {n_tokens} of them")
        if not n_tokens:
            return self.truncate(target, 0)
        return self.restore(target, self._save_aside(source, 0), length) and self.truncate(target, n_tokens)

    def state_bytes(self, slot: int) -> int:
        """Return the bytes ``save`` writes now; 0 for an empty slot."""
        if not self._lengths[slot]:
            return 0
        size: int = lib.llama_state_seq_get_size(self.handle, slot)
        return saved_state.start_of(len(self._runs[slot])) + size if size else 0

    def save(self, slot: int, buffer: memoryview) -> int:
        """Write the slot's sequence into ``buffer`` and return its bytes; 0 for an empty slot or too small a buffer.

        Raises:
            ValueError: The buffer is read-only; llama.cpp would write there all the same.
        """
        if buffer.readonly:
            raise ValueError("the buffer is read-only")
        runs = tuple(self._runs[slot])
        start = saved_state.start_of(len(runs))
        if not self._lengths[slot] or len(buffer) <= start:
            return 0
        room = buffer[start:]
        size: int = lib.llama_state_seq_get_data(self.handle, _start(room), len(room), slot)
        if not size:
            return 0
        parts = saved_state.streamed_bytes(*self._sizes(slot, size), recurrent=self._recurrent, hybrid=self._hybrid)
        saved_state.Layout(self._lengths[slot], self.slots, size, parts, runs).write(buffer)
        return start + size

    def restore(self, slot: int, data: memoryview, n_tokens: int) -> bool:
        """Replace a slot's content by a saved sequence of ``n_tokens``; ``False`` when the slot is empty now.

        ``data`` may be longer than the sequence. It is only read: directly into the cache if the number of slots is
        unchanged, otherwise through a copy rewritten for the current number.
        """
        self._empty(slot)
        layout = saved_state.Layout.read(data)
        if layout is None or layout.n_tokens != n_tokens or not 0 < n_tokens <= self.n_ctx:
            return False
        payload = data[layout.start : layout.start + layout.size_bytes]
        if layout.slots != self.slots and any(layout.streamed_bytes):
            rewritten = self._buffer(1, layout.size_with(self.slots))
            if not saved_state.rewrite(payload, layout, slots=self.slots, into=rewritten):
                return False
            payload = rewritten.data[: layout.size_with(self.slots)]
        taken = lib.llama_state_seq_set_data(self.handle, _start(payload), len(payload), slot)
        self._lengths[slot], self._runs[slot] = n_tokens, list(layout.runs)
        whole = taken == len(payload) and self._is_whole(slot)
        if whole and self._window_covers(slot, self._position(slot, n_tokens)):
            return True
        self._empty(slot)
        return False

    def warm_up(self, token: int, *, n_tokens: int = 0) -> int:
        """Decode two tokens and drop them, so that the first turn does not pay for page faults and initialization.

        A chunk of ``n_tokens``, limited by the slot, is decoded before. Returns the average bytes per token of a full
        slot in a saved sequence.
        """
        batch = min(n_tokens, self._n_batch, self.n_ctx)
        if batch:
            self.decode([Chunk(slot=0, start=0, tokens=[token] * batch, sample=True)])
            self._empty(0)
        sizes = []
        for position in range(min(2, self.n_ctx)):
            self.decode([Chunk(slot=0, start=position, tokens=[token], sample=True)])
            sizes.append(self._sizes(0, lib.llama_state_seq_get_size(self.handle, 0)))
        self._empty(0)
        return saved_state.bytes_per_token(sizes[0], sizes[-1], window=self._window, n_ctx=self.n_ctx)

    def close(self) -> None:
        """Free the context, after the samplers that were used on it."""
        lib.llama_free(self.handle)

    def _batches(self, chunks: Sequence[Chunk], padding: Sequence[Chunk]) -> Iterator[lib.llama_batch]:
        """Yield the batches of a decode, each valid until the next."""
        rows = chunks[0].embeddings
        if rows is not None:
            yield from self._embedding_batches(chunks[0], rows)
            return
        if any(self._runs):
            chunks = [replace(chunk, start=self._position(chunk.slot, chunk.start)) for chunk in chunks]
            padding = [replace(pad, start=self._position(pad.slot, pad.start)) for pad in padding]
        for part in split(chunks, self._n_batch):
            yield self._arrays.fill(part, padding)

    def _embedding_batches(self, chunk: Chunk, rows: NDArray[np.float32]) -> Iterator[lib.llama_batch]:
        """Yield the batches of an image's rows; if not causal, all of them attend to each other."""
        start = self._position(chunk.slot, chunk.start)
        shared = chunk.positions
        positions = np.arange(start, start + len(rows), dtype=np.int32) if shared is None else shared.at(start)
        if self.rows_are_causal:
            for begin in range(0, len(rows), self._n_batch):
                part = rows[begin : begin + self._n_batch]
                yield self._arrays.fill_embeddings(chunk, part, begin=begin, positions=positions)
            return
        if len(rows) > self.max_rows:
            self._fail([chunk.slot], f"{len(rows)} rows of an image do not fit n_ubatch, which is {self.max_rows}")
        lib.llama_set_causal_attn(self.handle, False)
        try:
            yield self._arrays.fill_embeddings(chunk, rows, begin=0, positions=positions)
        finally:
            lib.llama_set_causal_attn(self.handle, True)

    def _padding(self, chunks: Sequence[Chunk], row_counts: RowCounts) -> list[Chunk]:
        """Return the rows that make a decode of single tokens faster; they are removed from their slots after it."""
        n_turns = len(chunks)
        slots = padding_slots([chunk.slot for chunk in chunks], self._lengths, n_ctx=self.n_ctx)
        n_rows = row_counts.best(n_turns, most=n_turns + len(slots))
        added = slots[: max(0, n_rows - n_turns)]
        return [Chunk(slot, self._lengths[slot], chunks[0].tokens, sample=True) for slot in added]

    def _check(self, chunks: Sequence[Chunk]) -> None:
        if not chunks:
            raise ValueError("a batch needs a chunk")
        previous = -1
        for chunk in chunks:
            slot = chunk.slot
            if not previous < slot < self.slots:
                raise ValueError(f"slot {slot} after slot {previous}: chunks go by ascending slot, one a slot")
            if chunk.start != self._lengths[slot] or not chunk.tokens:
                raise ValueError(
                    f"slot {slot} holds {self._lengths[slot]} tokens; "
                    f"a chunk of {len(chunk.tokens)} at {chunk.start} does not continue it"
                )
            if chunk.embeddings is not None and (len(chunks) > 1 or len(chunk.embeddings) != len(chunk.tokens)):
                raise ValueError(f"the {len(chunk.tokens)} rows of an image are decoded alone")
            previous = slot

    def _position(self, slot: int, n_tokens: int) -> int:
        """Return the position of the token after the first ``n_tokens``, which the slot has."""
        for run in reversed(self._runs[slot]):
            if run.end <= n_tokens:
                return run.next_position + n_tokens - run.end
        return n_tokens

    def _run_of(self, chunk: Chunk, positions: RowPositions) -> RowRun:
        start = self._position(chunk.slot, chunk.start)
        last = int(positions.at(start)[0].max())
        return RowRun(chunk.start, chunk.start + len(chunk.tokens), last, start + positions.n_positions)

    def _window_covers(self, slot: int, position: int) -> bool:
        """Return whether the sliding window of the token at a position is complete."""
        # A hybrid model's first position is that of its recurrent layers, which are never cut; nor is its window.
        if not self._window or self._hybrid:
            return True
        first_kept: int = lib.llama_memory_seq_pos_min(self._memory, slot)
        return first_kept <= max(0, position - self._window + 1)

    def _is_whole(self, slot: int) -> bool:
        length, runs = self._lengths[slot], self._runs[slot]
        last: int = lib.llama_memory_seq_pos_max(self._memory, slot)
        if runs and runs[-1].end == length:
            return last == runs[-1].last
        return last == self._position(slot, length) - 1

    def _empty(self, slot: int) -> None:
        lib.llama_memory_seq_rm(self._memory, slot, -1, -1)
        self._lengths[slot], self._runs[slot] = 0, []

    def _fail(self, slots: Sequence[int], message: str) -> NoReturn:
        for slot in slots:
            self._empty(slot)
        raise DecodeError(slots, message)

    def _sizes(self, slot: int, full: int) -> tuple[int, int]:
        """Return ``full``, and the part of it outside caches that can be cut anywhere."""
        if self.can_truncate:
            return full, full
        return full, lib.llama_state_seq_get_size_ext(self.handle, slot, lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)

    def _save_aside(self, slot: int, number: int) -> memoryview:
        """Save a slot into a buffer of the context, valid until that buffer's next use; empty for an empty slot."""
        buffer = self._buffer(number, self.state_bytes(slot)).data
        return buffer[: self.save(slot, buffer)]

    def _buffer(self, number: int, n_bytes: int) -> NDArray[np.uint8]:
        if self._buffers[number].size < n_bytes:
            # Spare capacity keeps the next use for a longer sequence in memory that is already mapped.
            self._buffers[number] = np.empty(n_bytes + n_bytes // 2, np.uint8)
        return self._buffers[number]


# What Qwen's models need to locate things in an image, as llama.cpp warns.
_GRID_ROWS: Final = 1024


def _most_rows(model: LlamaModel, context: LlamaContext) -> int:
    """Return the rows that an image may have where its projector leaves a choice.

    Rows may have to be decoded at once, but not with M-RoPE: there an image may have more, up to a quarter of a slot.
    """
    if lib.llama_model_rope_type(model.handle) not in (lib.LLAMA_ROPE_TYPE_MROPE, lib.LLAMA_ROPE_TYPE_IMROPE):
        return context.max_rows
    return max(context.max_rows, min(_GRID_ROWS, context.n_ctx // 4))


def _start(data: memoryview) -> object:
    """Return a pointer to the first byte that does not keep ``data`` from being released."""
    address: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return ctypes.byref(ctypes.c_uint8.from_address(address))


def _context_params(options: EngineOptions, n_ctx: int, n_threads: int) -> lib.llama_context_params:
    params = lib.llama_context_default_params()
    params.n_seq_max = options.slots
    # Each slot has its own stream: no context can crowd out another, and restores are exact.
    params.kv_unified = False
    params.n_ctx = options.slots * n_ctx
    params.n_batch = max(options.n_batch, options.slots)
    params.n_ubatch = min(options.n_ubatch, params.n_batch)
    # A slot has one row with logits, and its drafts; the default reserves a row for every token of a batch.
    drafts = most_drafts(options.draft_tokens) if options.speculative == "lookup" or options.draft_path else 0
    params.n_outputs_max = options.slots + drafts
    params.n_threads = n_threads
    params.n_threads_batch = options.n_threads_batch or n_threads
    params.type_k = _KV_TYPES[options.kv_type_k]
    params.type_v = _KV_TYPES[options.kv_type_v]
    params.flash_attn_type = FLASH_ATTENTION[options.flash_attention]
    # Layers with a sliding window keep only the window; ``truncate`` detects when that is too little.
    params.swa_full = False
    params.no_perf = True
    return params


def _is_quantized(model: LlamaModel) -> bool:
    n_bits = 8 * model.n_bytes
    n_weights: int = lib.llama_model_n_params(model.handle)
    return n_bits < _UNQUANTIZED_BITS * n_weights


def _refusal(options: EngineOptions, n_ctx: int, problems: tuple[str, ...]) -> InferenceCenterError:
    return InferenceCenterError(
        ErrorCode.INVALID_CONFIG,
        f"llama.cpp cannot create a context of {options.slots} slots with {n_ctx} tokens each, KV types "
        f"{options.kv_type_k} and {options.kv_type_v}, flash attention {options.flash_attention}: "
        f"{' '.join(problems) or 'no reason given.'}",
        hint="Choose fewer slots or a smaller n_ctx; a quantized kv_type_v needs flash attention.",
        field="n_ctx",
    )


class LlamaBackend:
    """Implements ``engine.backend.Backend`` for a loaded model: its methods are those of the vocabulary and context."""

    def __init__(  # noqa: PLR0913 - called by ``load`` alone, with what it has made
        self,
        options: EngineOptions,
        model: LlamaModel,
        context: LlamaContext,
        *,
        digest: str,
        kv_bytes_per_token: int,
        draft_model: LlamaDraftModel | None,
        projector: LlamaProjector | None,
        memory: tuple[BufferUse, ...],
        resources: ExitStack,
    ) -> None:
        self._model = model
        self._context = context
        self._resources = resources
        self._samplers: WeakSet[NativeSampler] = WeakSet()
        self.model = model.info(options, n_threads=context.n_threads, memory=memory)
        self.fingerprint = digest
        self.kv_bytes_per_token = kv_bytes_per_token
        self.can_truncate = context.can_truncate
        self.draft_model = draft_model
        self.projector = projector
        self.tokenize = model.vocab.tokenize
        self.token_bytes = model.vocab.token_bytes
        self.token_text = model.vocab.token_text
        self.is_end = model.vocab.is_end
        self.truncate = context.truncate
        self.swap = context.swap
        self.copy = context.copy
        self.state_bytes = context.state_bytes
        self.save = context.save
        self.restore = context.restore
        self.decode = context.decode
        self.decodes_apart = context.decodes_apart

    @classmethod
    def load(
        cls, options: EngineOptions, *, on_progress: Callable[[float], None], on_log: Callable[[str, str], None]
    ) -> LlamaBackend:
        """Load and warm up the model named by ``options``.

        ``on_progress`` receives the fraction loaded, from 0 to 1; ``on_log`` a level and a line of llama.cpp's log, on
        the thread that logs.

        Raises:
            InferenceCenterError: ``invalid_model_file`` or ``invalid_config``.
        """
        sizes = BufferSizes()
        with ExitStack() as resources:
            options, model, log = load_model(
                options, sizes=sizes, on_progress=on_progress, on_log=on_log, resources=resources
            )
            n_threads = options.n_threads or decode_threads(model.n_bytes, physical_cores())
            context = LlamaContext(model, options, n_threads=n_threads, log=log)
            resources.callback(context.close)
            # GPU libraries allocate memory only when they are first used with a batch of full size.
            full_batch = options.n_ubatch if model.n_gpu_layers else 0
            kv_bytes_per_token = context.warm_up(max(model.vocab.bos, 0), n_tokens=full_batch)
            digest = fingerprint(model, options)
            draft_model = None
            if options.draft_path:
                sizes.begin_model()
                draft_model = _load_draft_model(
                    options, model, context, log=log, on_progress=on_progress, on_log=on_log, resources=resources
                )
            projector = None
            if options.mmproj_path:
                sizes.begin_model()
                gpu = pointers((options.mmproj_device,))[0] if options.mmproj_device else None
                projector = LlamaProjector.load(
                    Path(options.mmproj_path),
                    model,
                    device=gpu,
                    n_threads=n_threads,
                    max_rows=_most_rows(model, context),
                    log=log,
                )
                resources.callback(projector.close)
                context.rows_are_causal = projector.is_causal
            return cls(
                options,
                model,
                context,
                digest=digest,
                kv_bytes_per_token=kv_bytes_per_token,
                draft_model=draft_model,
                projector=projector,
                memory=sizes.uses(),
                resources=resources.pop_all(),
            )

    def sampler(
        self, params: Params, prompt: Sequence[int], answer: Sequence[int] = (), constraint: Constraint | None = None
    ) -> NativeSampler:
        """Build a turn's sampler chain; the tail of ``prompt`` and ``answer`` feeds the penalties.

        ``answer`` is what the turn generated before its prompt was shortened. Mirostat and adaptive-p, which learn from
        the probabilities they drew, start over: llama.cpp cannot restore their state. A ``constraint`` restricts the
        tokens.

        Raises:
            InferenceCenterError: ``invalid_request`` for a parameter this model does not support.
        """
        vocab, context = self._model.vocab, self._context
        specs = plan_chain(params, n_vocab=vocab.n_tokens, n_ctx=context.n_ctx, end_tokens=vocab.end_tokens)
        tokens = [*prompt, *answer]
        sampler = NativeSampler(
            context=context.handle,
            batch_index=context.batch_index,
            vocab=vocab.handle,
            specs=specs,
            n_vocab=vocab.n_tokens,
            token_text=vocab.token_text,
            n_probs=params.n_probs,
            prompt=tokens if self.projector is None else [token for token in tokens if not is_row(token)],
            position=len(answer),
            constraint=constraint,
        )
        self._samplers.add(sampler)
        return sampler

    def close(self) -> None:
        """Free everything: samplers, then the context they read, then the model."""
        for sampler in tuple(self._samplers):
            sampler.close()
        self._resources.close()


def _load_draft_model(  # noqa: PLR0913 - called by ``load`` alone, with what it has made
    options: EngineOptions,
    main: LlamaModel,
    context: LlamaContext,
    *,
    log: LlamaLog,
    on_progress: Callable[[float], None],
    on_log: Callable[[str, str], None],
    resources: ExitStack,
) -> LlamaDraftModel:
    own = draft_options(options, n_ctx=context.n_ctx)
    # The engine has loaded all of its model by now; the reports only show that it is alive.
    model = LlamaModel.load(own, on_progress=lambda _fraction: on_progress(1.0), log=log)
    resources.callback(model.close)
    check_draft_model(model, main)
    n_threads = options.n_threads or decode_threads(model.n_bytes, context.n_threads)
    drafting = LlamaContext(model, own, n_threads=n_threads, log=log)
    resources.callback(drafting.close)
    drafting.warm_up(max(model.vocab.bos, 0), n_tokens=own.n_ubatch if model.n_gpu_layers else 0)
    return LlamaDraftModel(model, drafting, main=main, on_log=on_log)

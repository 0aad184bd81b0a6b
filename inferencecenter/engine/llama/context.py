"""One llama context with a KV stream for each slot: decoding, cutting and exchanging sequences."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, NoReturn

import numpy as np
from llama_cpp import llama_cpp as lib

from inferencecenter.engine.backend import Chunk, DecodeError
from inferencecenter.engine.llama.batch import BatchArrays, split
from inferencecenter.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from inferencecenter.engine.llama.log import LlamaLog
    from inferencecenter.engine.llama.model import Model
    from inferencecenter.ipc.messages import EngineOptions

_KV_TYPES = {
    "f32": lib.GGML_TYPE_F32,
    "f16": lib.GGML_TYPE_F16,
    "bf16": 30,  # GGML_TYPE_BF16 of ggml.h, which the binding leaves out
    "q8_0": lib.GGML_TYPE_Q8_0,
    "q5_1": lib.GGML_TYPE_Q5_1,
    "q5_0": lib.GGML_TYPE_Q5_0,
    "q4_1": lib.GGML_TYPE_Q4_1,
    "q4_0": lib.GGML_TYPE_Q4_0,
    "iq4_nl": lib.GGML_TYPE_IQ4_NL,
}
_FLASH_ATTENTION = {
    "auto": lib.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "on": lib.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": lib.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}
_FAILURES = {
    1: "the KV stream of a slot is full",
    2: "decoding was interrupted",
    -1: "llama.cpp refused the batch",
    -2: "memory for the batch could not be had",
    -3: "computing the batch failed",
}
_BYTES = ctypes.POINTER(ctypes.c_uint8)


class Context:
    """A ``llama_context`` of ``slots`` sequences, used from one thread.

    It counts the tokens of each slot and compares them with llama.cpp's own count after every change, so that a
    sequence is never continued at a place where it is not. A slot that fails that, or whose batch failed, is emptied.
    """

    def __init__(self, model: Model, options: EngineOptions, *, n_threads: int, log: LlamaLog) -> None:
        self.slots = options.slots
        self.n_ctx = model.n_ctx(options.n_ctx)
        self.n_threads = n_threads
        log.take_problems()
        handle = lib.llama_init_from_model(model.handle, _context_params(options, self.n_ctx, n_threads))
        if not handle:
            raise _refusal(options, self.n_ctx, log.take_problems())
        self.handle: int = handle
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
        self._n_batch: int = lib.llama_n_batch(handle)
        self._arrays = BatchArrays(n_batch=self._n_batch, slots=self.slots)
        self._lengths = [0] * self.slots
        self._state = [np.empty(0, np.uint8), np.empty(0, np.uint8)]

    def length(self, slot: int) -> int:
        """Return how many tokens a slot holds."""
        return self._lengths[slot]

    def decode(self, chunks: Sequence[Chunk]) -> None:
        """Decode chunks in ascending slot order; afterwards the logits may be read from any thread.

        Raises:
            DecodeError: The named slots have been emptied, all others are as before.
            ValueError: There are no chunks, they do not continue their slots, or they are out of order.
        """
        self._check(chunks)
        full = [chunk.slot for chunk in chunks if chunk.start + len(chunk.tokens) > self.n_ctx]
        if full:
            self._fail(full, f"a slot holds {self.n_ctx} tokens at most")
        slots = [chunk.slot for chunk in chunks]
        for part in split(chunks, self._n_batch):
            status = lib.llama_decode(self.handle, self._arrays.fill(part))
            if status:
                self._fail(slots, _FAILURES.get(status, f"llama_decode gave {status}"))
        # The first read of the logits waits for the device and puts the rows in batch order.
        lib.llama_get_logits(self.handle)
        for chunk in chunks:
            self._lengths[chunk.slot] = chunk.start + len(chunk.tokens)
        if not all(map(self._is_whole, slots)):
            self._fail(slots, "llama.cpp lost count of its tokens")

    def batch_index(self, row: int) -> int:
        """Return where in the last batch the ``row``-th chunk with ``sample`` set has its logits."""
        return self._arrays.sampled[row]

    def truncate(self, slot: int, n_tokens: int) -> bool:
        """Keep the first ``n_tokens`` of a slot; ``False`` when it had to be emptied instead.

        Recurrent models cannot go back, and a sliding window may have passed the place.

        Raises:
            ValueError: The slot holds fewer tokens.
        """
        length = self._lengths[slot]
        if not 0 <= n_tokens <= length:
            raise ValueError(f"slot {slot} holds {length} tokens and cannot be cut to {n_tokens}")
        if n_tokens == length:
            return True
        if self._window_covers(slot, n_tokens) and lib.llama_memory_seq_rm(self._memory, slot, n_tokens, -1):
            self._lengths[slot] = n_tokens
            if self._is_whole(slot):
                return True
        self._empty(slot)
        return n_tokens == 0

    def swap(self, a: int, b: int) -> None:
        """Exchange the sequences of two slots, by their saved states only.

        ``llama_memory_seq_cp`` between streams is put off to the next decode and would copy a later tenant.

        Raises:
            DecodeError: Both slots have been emptied.
        """
        if a == b:
            return
        lengths = self._lengths[a], self._lengths[b]
        saved = self._save(a, self._state[0]), self._save(b, self._state[1])
        self._state = [saved[0][0], saved[1][0]]
        restored = self._restore(a, saved[1], lengths[1]) and self._restore(b, saved[0], lengths[0])
        if not restored:
            self._fail([a, b], "a saved sequence could not be restored")

    def warm_up(self, token: int) -> None:
        """Decode one token and forget it, so that the first turn does not pay for page faults and set-up."""
        self.decode([Chunk(slot=0, start=0, tokens=[token], sample=True)])
        self._empty(0)

    def close(self) -> None:
        """Free the context, after the samplers that were used on it."""
        lib.llama_free(self.handle)

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
            previous = slot

    def _window_covers(self, slot: int, n_tokens: int) -> bool:
        """Tell whether the token at position ``n_tokens`` would find all that its sliding window shows it."""
        if not self._window:
            return True
        first_kept: int = lib.llama_memory_seq_pos_min(self._memory, slot)
        return first_kept <= max(0, n_tokens - self._window + 1)

    def _is_whole(self, slot: int) -> bool:
        last: int = lib.llama_memory_seq_pos_max(self._memory, slot)
        return last == self._lengths[slot] - 1

    def _empty(self, slot: int) -> None:
        lib.llama_memory_seq_rm(self._memory, slot, -1, -1)
        self._lengths[slot] = 0

    def _fail(self, slots: Sequence[int], message: str) -> NoReturn:
        for slot in slots:
            self._empty(slot)
        raise DecodeError(slots, message)

    def _save(self, slot: int, buffer: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], int]:
        """Return a buffer with the state of a slot and the state's size in bytes, 0 for an empty slot."""
        if not self._lengths[slot]:
            return buffer, 0
        needed: int = lib.llama_state_seq_get_size(self.handle, slot)
        if needed > buffer.size:
            # Room to grow keeps the next save of a longer sequence in memory that is already mapped.
            buffer = np.empty(needed + needed // 2, np.uint8)
        size = lib.llama_state_seq_get_data(self.handle, buffer.ctypes.data_as(_BYTES), buffer.size, slot)
        return buffer, size

    def _restore(self, slot: int, saved: tuple[NDArray[np.uint8], int], length: int) -> bool:
        self._empty(slot)
        if not length:
            return True
        buffer, size = saved
        if not size or not lib.llama_state_seq_set_data(self.handle, buffer.ctypes.data_as(_BYTES), size, slot):
            return False
        self._lengths[slot] = length
        return self._is_whole(slot)


def _context_params(options: EngineOptions, n_ctx: int, n_threads: int) -> lib.llama_context_params:
    params = lib.llama_context_default_params()
    params.n_seq_max = options.slots
    # Each slot has its own stream: nobody's context can crowd out another's, and restores are exact.
    params.kv_unified = False
    params.n_ctx = options.slots * n_ctx
    params.n_batch = max(options.n_batch, options.slots)
    params.n_ubatch = min(options.n_ubatch, params.n_batch)
    # A chunk has at most one row with logits; the default reserves a row for every token of a batch.
    params.n_outputs_max = options.slots
    params.n_threads = n_threads
    params.n_threads_batch = options.n_threads_batch or n_threads
    params.type_k = _choice("kv_type_k", options.kv_type_k, _KV_TYPES)
    params.type_v = _choice("kv_type_v", options.kv_type_v, _KV_TYPES)
    params.flash_attn_type = _choice("flash_attention", options.flash_attention, _FLASH_ATTENTION)
    # Only the window is kept of layers that see no further; ``truncate`` knows when that is too little.
    params.swa_full = False
    params.no_perf = True
    return params


def _choice(field: str, value: str, allowed: dict[str, int]) -> int:
    if value not in allowed:
        raise InferenceCenterError(
            ErrorCode.INVALID_CONFIG, f"{field} is {value!r}; allowed: {', '.join(allowed)}.", field=field
        )
    return allowed[value]


def _refusal(options: EngineOptions, n_ctx: int, problems: tuple[str, ...]) -> InferenceCenterError:
    return InferenceCenterError(
        ErrorCode.INVALID_CONFIG,
        f"llama.cpp makes no context of {options.slots} slots with {n_ctx} tokens each, KV types "
        f"{options.kv_type_k} and {options.kv_type_v}, flash attention {options.flash_attention}: "
        f"{' '.join(problems) or 'no reason given.'}",
        hint="Choose fewer slots or a smaller n_ctx; a quantized kv_type_v needs flash attention.",
        field="n_ctx",
    )

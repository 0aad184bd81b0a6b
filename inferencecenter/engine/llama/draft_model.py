"""The draft model: a small model of the same vocabulary, in a llama.cpp context of its own.

Its KV is not part of any plan. Each request brings all tokens of a turn; what the slot holds of them is kept and the
rest is decoded. So rejected drafts, another turn in the slot, preemption and a shortened prompt need no message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from llama_cpp import llama_cpp as lib

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.engine.backend import Chunk, DecodeError
from inferencecenter.engine.scheduler.placement import common_prefix_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from inferencecenter.engine.backend import DraftRequest
    from inferencecenter.engine.llama.backend import LlamaContext
    from inferencecenter.engine.llama.model import LlamaModel
    from inferencecenter.ipc.engine_options import EngineOptions

_CALL_COST: Final = 0.05
"""What a decode costs however small the model is, in units of one of the main model."""
_MOST_READ_TOKENS: Final = 128
"""Tokens read per step: all turns wait while the draft model reads the prompt of one."""


class LlamaDraftModel:
    """Implements ``engine.backend.DraftModel``.

    Args:
        model: A loaded model that ``check_draft_model`` accepts.
        context: Its context, with as many slots, and tokens per slot, as the main model's.
        main: The main model.
        on_log: Called with level and text.
    """

    def __init__(
        self, model: LlamaModel, context: LlamaContext, *, main: LlamaModel, on_log: Callable[[str, str], None]
    ) -> None:
        self.cost: float = _CALL_COST + model.n_bytes / main.n_bytes
        self._context = context
        self._n_vocab = model.vocab.n_tokens
        self._end_tokens = sorted(model.vocab.end_tokens)
        self._on_log = on_log
        # The tokens in each slot's KV, and the client whose turn they are of.
        self._held: list[list[int]] = [[] for _ in range(context.slots)]
        self._owners = [""] * context.slots

    def draft(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Return the likeliest tokens for each request; none as long as not all of its tokens are read."""
        try:
            return self._draft(requests)
        except DecodeError as error:
            for slot in error.slots:
                self._held[slot].clear()
            self._on_log("warning", f"the draft model failed: {error}")
            return [[] for _ in requests]

    def _draft(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        drafts: dict[int, list[int]] = {request.slot: [] for request in requests}
        wanted = {request.slot: request.n_tokens for request in requests}
        chunks = list(self._unread(requests))
        while chunks:
            self._context.decode(chunks)
            for chunk in chunks:
                self._held[chunk.slot] += chunk.tokens
            ready = [chunk.slot for chunk in chunks if chunk.sample]
            for row, slot in enumerate(ready):
                drafts[slot].append(self._likeliest(row))
            chunks = [
                Chunk(slot, len(self._held[slot]), drafts[slot][-1:], sample=True)
                for slot in ready
                if len(drafts[slot]) < wanted[slot]
            ]
        return [drafts[request.slot] for request in requests]

    def _unread(self, requests: Sequence[DraftRequest]) -> Iterator[Chunk]:
        """Yield the chunks that the slots still need, after truncating them; the last chunk of a turn is sampled."""
        left = _MOST_READ_TOKENS
        for request in requests:
            slot, tokens = request.slot, request.tokens
            held = self._held[slot]
            # As with all KV, no turn is sooner ready because another client's text begins like its own.
            same_client = self._owners[slot] == request.client_id
            self._owners[slot] = request.client_id
            kept = min(common_prefix_tokens(held, tokens), len(tokens) - 1) if same_client else 0
            if not self._context.truncate(slot, kept):
                kept = 0
            del held[kept:]
            end = min(len(tokens), kept + max(1, left))
            left -= end - kept
            yield Chunk(slot, kept, tokens[kept:end], sample=end == len(tokens))

    def _likeliest(self, row: int) -> int:
        logits = lib.llama_get_logits_ith(self._context.handle, self._context.batch_index(row))
        scores = np.ctypeslib.as_array(logits, (self._n_vocab,))
        # A turn that draws one ends there: as a draft it brings nothing.
        scores[self._end_tokens] = -np.inf
        return int(scores.argmax())


def draft_options(options: EngineOptions, *, n_ctx: int) -> EngineOptions:
    """Return the options of the draft model: wholly on one GPU, or in the host's memory without any."""
    on_gpu = bool(options.draft_device)
    return options.replace(
        model_path=options.draft_path,
        n_ctx=n_ctx,
        lora=(),
        n_gpu_layers=-1 if on_gpu else 0,
        devices=(options.draft_device,) if on_gpu else (),
        split_mode="none",
        main_gpu=0 if on_gpu else -1,
        tensor_split=(),
        cpu_tensors=(),
    )


def check_draft_model(model: LlamaModel, main: LlamaModel) -> None:
    """Check that a model can draft for another.

    Raises:
        InferenceCenterError: ``invalid_config``: it has another vocabulary, or its KV cannot be truncated.
    """
    reason = model.vocab.difference(main.vocab)
    if reason:
        reason = f"its vocabulary is another: {reason}"
    elif _keeps_state(model):
        reason = "its KV cannot be truncated after a rejected draft"
    if reason:
        raise InferenceCenterError(
            ErrorCode.INVALID_CONFIG,
            f"{model.path} cannot draft for {main.path}: {reason}.",
            hint='Choose a smaller model of the same family, or set draft = "" for this model.',
            field="engine.draft",
        )


def _keeps_state(model: LlamaModel) -> bool:
    handle = model.handle
    return bool(
        lib.llama_model_n_swa(handle) or lib.llama_model_is_recurrent(handle) or lib.llama_model_is_hybrid(handle)
    )

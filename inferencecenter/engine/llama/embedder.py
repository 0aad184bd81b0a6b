"""A llama.cpp context that turns batches of texts into vectors or scores."""

from __future__ import annotations

import re
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Final

import numpy as np
from llama_cpp import llama_cpp as lib

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.engine.backend import Chunk, EmbeddingError
from inferencecenter.engine.llama.backend import FLASH_ATTENTION, BatchArrays
from inferencecenter.engine.llama.log import BufferSizes, LlamaLog
from inferencecenter.engine.llama.model import LlamaModel, load_model
from inferencecenter.hardware.gguf import read_gguf
from inferencecenter.hardware.memory import physical_cores
from inferencecenter.ipc.messages import PromptSegment

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from inferencecenter.ipc.engine_options import EngineOptions
    from inferencecenter.ipc.messages import BufferUse

MAX_TEXTS: Final = 256
"""Maximum texts per batch, which is llama.cpp's maximum number of sequences."""
_CLASSIFIERS: Final = frozenset({"cls.weight", "cls.output.weight"})
_PLACEHOLDERS: Final = re.compile(r"(\{query\}|\{document\})")
_POOLED: Final = tuple(
    str(each) for each in (lib.LLAMA_POOLING_TYPE_MEAN, lib.LLAMA_POOLING_TYPE_CLS, lib.LLAMA_POOLING_TYPE_LAST)
)


class LlamaEmbedder:
    """Implements ``engine.backend.Embedder``.

    The file determines the pooling. A text is computed in one piece, because attention may be bidirectional and means
    cover the whole text: so the context has room for the longest text, and all texts of a batch share its cells. KV is
    not kept between batches.
    """

    max_texts = MAX_TEXTS

    def __init__(  # noqa: PLR0913 - called by ``load`` alone, with what it has made
        self,
        options: EngineOptions,
        model: LlamaModel,
        handle: int,
        *,
        tick: ctypes._FuncPointer,
        n_threads: int,
        memory: tuple[BufferUse, ...],
        resources: ExitStack,
    ) -> None:
        self._handle = handle
        self._tick = tick  # llama.cpp keeps a bare pointer to it
        self._memory: int | None = lib.llama_get_memory(handle)
        self._resources = resources
        self.model = model.info(options, n_threads=n_threads, memory=memory)
        self._width = lib.llama_model_n_cls_out(model.handle) if options.kind == "reranking" else self.model.n_embd
        self._batch = BatchArrays(n_batch=lib.llama_n_batch(handle), slots=MAX_TEXTS)
        template = lib.llama_model_chat_template(model.handle, b"rerank")
        self._template = _PLACEHOLDERS.split((template or b"").decode("utf-8", errors="replace"))
        self._vocab = model.vocab
        self.tokenize = model.vocab.tokenize
        self.token_bytes = model.vocab.token_bytes
        self.token_text = model.vocab.token_text
        self.sequence = model.vocab.sequence

    @classmethod
    def load(
        cls,
        options: EngineOptions,
        *,
        on_progress: Callable[[float], None],
        on_log: Callable[[str, str], None],
        on_tick: Callable[[], None],
    ) -> LlamaEmbedder:
        """Load and warm up the model named by ``options``.

        ``on_progress`` and ``on_log`` are as in ``LlamaBackend.load``; ``on_tick`` is called while a batch is computed.

        Raises:
            InferenceCenterError: ``invalid_model_file`` or ``invalid_config``.
        """
        sizes = BufferSizes()
        with ExitStack() as resources:
            options, model, log = load_model(
                options, sizes=sizes, on_progress=on_progress, on_log=on_log, resources=resources
            )
            if options.kind == "reranking":
                _check_classifier(model)
            options = options.replace(n_ctx=min(model.n_ctx(options.n_ctx), model.n_ctx_train))
            n_threads = options.n_threads or physical_cores()
            tick = _tick_callback(on_tick)
            handle = _context(options, model, tick=tick, n_threads=n_threads, log=log)
            resources.callback(lib.llama_free, handle)
            model.adapters.set_on(handle)
            memory = sizes.uses()
            embedder = cls(
                options, model, handle, tick=tick, n_threads=n_threads, memory=memory, resources=resources.pop_all()
            )
        try:
            embedder.embed([embedder.sequence("a")])
        except BaseException:
            embedder.close()
            raise
        return embedder

    def pair(self, query: str, document: str) -> list[int]:
        """Return the tokens of a query and a document, by the file's template for them if it has one."""
        if len(self._template) == 1:
            return self._vocab.pair(query, document)
        segments = {"{query}": PromptSegment(query), "{document}": PromptSegment(document)}
        pieces = [segments.get(part) or PromptSegment(part, special=True) for part in self._template]
        return self._vocab.tokenize(pieces, first=False)

    def embed(self, texts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Return a row for each tokenized text: a vector as the model computes it, or a score.

        Raises:
            EmbeddingError: llama.cpp could not compute the batch.
        """
        # Every token is an output: the vector of a text is pooled from all of them.
        batch = self._batch.fill(
            [Chunk(slot, 0, tokens, sample=True, drafts=len(tokens) - 1) for slot, tokens in enumerate(texts)]
        )
        if self._memory:
            lib.llama_memory_clear(self._memory, False)
            status = lib.llama_decode(self._handle, batch)
        else:
            status = lib.llama_encode(self._handle, batch)
        if status:
            raise EmbeddingError(f"llama.cpp could not compute {len(texts)} texts (status {status})")
        rows = np.empty((len(texts), self._width), np.float32)
        for index in range(len(texts)):
            pooled = lib.llama_get_embeddings_seq(self._handle, index)
            if not pooled:
                raise EmbeddingError(f"llama.cpp computed no vector for text {index} of a batch")
            rows[index] = np.ctypeslib.as_array(pooled, (self._width,))
        return rows if self.model.kind == "embedding" else rows[:, :1]

    def close(self) -> None:
        """Free the context and the model."""
        self._resources.close()


def _tick_callback(on_tick: Callable[[], None]) -> ctypes._FuncPointer:
    """Return a C callback for llama.cpp to call between the operations of a batch, which never ends the batch."""

    def tick(_user_data: int | None) -> bool:
        # C calls this; no exception may propagate through it.
        with suppress(Exception):
            on_tick()
        return False

    callback: ctypes._FuncPointer = lib.ggml_abort_callback(tick)
    return callback


def _context(
    options: EngineOptions, model: LlamaModel, *, tick: ctypes._FuncPointer, n_threads: int, log: LlamaLog
) -> int:
    params = lib.llama_context_default_params()
    # All texts of a batch share the cells: with streams of their own llama.cpp would cut them to equal lengths.
    params.n_seq_max, params.kv_unified = MAX_TEXTS, True
    params.n_ctx = params.n_batch = params.n_ubatch = max(options.n_ctx, options.n_ubatch, MAX_TEXTS)
    params.n_threads = params.n_threads_batch = options.n_threads_batch or n_threads
    params.flash_attn_type = FLASH_ATTENTION[options.flash_attention]
    params.abort_callback = tick
    params.embeddings = True
    params.pooling_type = _pooling(options, model)
    params.swa_full = False
    params.no_perf = True
    log.take_problems()
    handle: int | None = lib.llama_init_from_model(model.handle, params)
    if not handle:
        raise InferenceCenterError(
            ErrorCode.INVALID_CONFIG,
            f"llama.cpp cannot create a context for texts of {options.n_ctx} tokens: "
            f"{' '.join(log.take_problems()) or 'no reason given.'}",
            hint="Choose a smaller n_ctx.",
            field="n_ctx",
        )
    return handle


def _pooling(options: EngineOptions, model: LlamaModel) -> int:
    """Return the pooling of the file or, where it states none, the usual one of its attention."""
    if options.kind == "reranking":
        return int(lib.LLAMA_POOLING_TYPE_RANK)
    architecture = model.metadata("general.architecture")
    if model.metadata(f"{architecture}.pooling_type") in _POOLED:
        return int(lib.LLAMA_POOLING_TYPE_UNSPECIFIED)
    both_ways = model.metadata(f"{architecture}.attention.causal") == "false"
    return int(lib.LLAMA_POOLING_TYPE_MEAN if both_ways else lib.LLAMA_POOLING_TYPE_LAST)


def _check_classifier(model: LlamaModel) -> None:
    """Refuse a model that cannot score documents: llama.cpp would end the process when it computes the first one.

    Raises:
        InferenceCenterError: ``invalid_model_file``.
    """
    if not any(tensor.name in _CLASSIFIERS for tensor in read_gguf(model.path).tensors):
        raise InferenceCenterError(
            ErrorCode.INVALID_MODEL_FILE,
            f"{model.path} has no classification head, so it cannot rank documents.",
            hint='Choose a reranking model, or kind = "embedding".',
            field="kind",
        )

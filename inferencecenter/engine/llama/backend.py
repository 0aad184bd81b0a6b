"""The llama.cpp backend: one model, one context, a native sampler chain per turn."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from inferencecenter.engine.llama.context import LlamaContext
from inferencecenter.engine.llama.devices import present
from inferencecenter.engine.llama.log import BufferSizes, LlamaLog
from inferencecenter.engine.llama.model import LlamaModel
from inferencecenter.engine.llama.sampler import NativeSampler
from inferencecenter.engine.llama.saved_state import fingerprint
from inferencecenter.engine.sampling.chain import plan_chain
from inferencecenter.hardware.host import physical_cores

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from inferencecenter.engine.backend import Chunk, Sampled
    from inferencecenter.engine.sampling.constraint import Constraint
    from inferencecenter.ipc.engine_options import EngineOptions
    from inferencecenter.ipc.messages import BufferUse, ModelInfo, PromptSegment
    from inferencecenter.protocol.params import Params


class LlamaBackend:
    """Implements ``engine.backend.Backend`` for a loaded model."""

    def __init__(  # noqa: PLR0913 - called by ``load`` alone, with what it has made
        self,
        options: EngineOptions,
        model: LlamaModel,
        context: LlamaContext,
        *,
        digest: str,
        kv_bytes_per_token: int,
        memory: tuple[BufferUse, ...],
        resources: ExitStack,
    ) -> None:
        self._model = model
        self._context = context
        self._resources = resources
        self._samplers: set[LlamaTurnSampler] = set()
        self._info = model.info(options, n_threads=context.n_threads, memory=memory)
        self._fingerprint = digest
        self._kv_bytes_per_token = kv_bytes_per_token

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

        def logged(level: str, line: str) -> None:
            sizes.read(line)
            on_log(level, line)

        with ExitStack() as resources:
            log = LlamaLog(logged)
            log.install()
            resources.callback(log.close)
            options = present(options, on_log=on_log)
            model = LlamaModel.load(options, on_progress=on_progress, log=log)
            resources.callback(model.close)
            context = LlamaContext(model, options, n_threads=options.n_threads or physical_cores(), log=log)
            resources.callback(context.close)
            # GPU libraries allocate memory only when they are first used with a batch of full size.
            full_batch = options.n_ubatch if model.n_gpu_layers else 0
            kv_bytes_per_token = context.warm_up(max(model.vocab.bos, 0), n_tokens=full_batch)
            digest = fingerprint(model, options)
            return cls(
                options,
                model,
                context,
                digest=digest,
                kv_bytes_per_token=kv_bytes_per_token,
                memory=sizes.uses(),
                resources=resources.pop_all(),
            )

    @property
    def model(self) -> ModelInfo:
        """Properties of the loaded model."""
        return self._info

    @property
    def fingerprint(self) -> str:
        """Hex digest, equal where saved sequences are interchangeable, whatever the number of slots and tokens."""
        return self._fingerprint

    @property
    def kv_bytes_per_token(self) -> int:
        """Average bytes per token of a full slot in a saved sequence."""
        return self._kv_bytes_per_token

    @property
    def can_truncate(self) -> bool:
        """Whether ``truncate`` can cut anywhere; false for recurrent layers and sliding windows."""
        return self._context.can_truncate

    def tokenize(self, pieces: Sequence[PromptSegment], *, first: bool) -> list[int]:
        """Return the token ids of ``pieces``, with BOS where the model wants one and ``first`` is set.

        Raises:
            InferenceCenterError: ``invalid_request`` for text that is not Unicode (lone surrogates).
        """
        return self._model.vocab.tokenize(pieces, first=first)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes a token adds to the text; empty for control tokens."""
        return self._model.vocab.token_bytes(token)

    def token_text(self, token: int) -> str:
        """Return a token's text in the template, control tokens included."""
        return self._model.vocab.token_text(token)

    def is_end(self, token: int) -> bool:
        """Return whether the token ends a generation."""
        return self._model.vocab.is_end(token)

    def truncate(self, slot: int, n_tokens: int) -> bool:
        """Keep the first ``n_tokens`` of a slot; ``False`` when the slot had to be emptied instead."""
        return self._context.truncate(slot, n_tokens)

    def swap(self, a: int, b: int) -> None:
        """Swap the sequences of two slots.

        Raises:
            DecodeError: Both slots have been emptied.
        """
        self._context.swap(a, b)

    def copy(self, source: int, target: int, n_tokens: int) -> bool:
        """Replace the content of ``target`` by the first ``n_tokens`` of ``source``; ``False`` when it is empty now.

        Raises:
            ValueError: The slots are the same, or ``source`` holds fewer tokens.
        """
        return self._context.copy(source, target, n_tokens)

    def state_bytes(self, slot: int) -> int:
        """Return the bytes ``save`` would write now; 0 for an empty slot."""
        return self._context.state_bytes(slot)

    def save(self, slot: int, buffer: memoryview) -> int:
        """Write the slot's sequence into ``buffer`` and return its bytes; 0 on failure.

        Raises:
            ValueError: The buffer is read-only.
        """
        return self._context.save(slot, buffer)

    def restore(self, slot: int, data: memoryview, n_tokens: int) -> bool:
        """Replace a slot's content by a saved sequence of ``n_tokens``; ``False`` when the slot is empty now."""
        return self._context.restore(slot, data, n_tokens)

    def decode(self, chunks: Sequence[Chunk]) -> None:
        """Decode chunks sorted by ascending slot, at most one per slot.

        Raises:
            DecodeError: The named slots have been emptied; the others are unchanged.
        """
        self._context.decode(chunks)

    def sampler(
        self, params: Params, prompt: Sequence[int], answer: Sequence[int] = (), constraint: Constraint | None = None
    ) -> LlamaTurnSampler:
        """Build a turn's sampler chain; the tail of ``prompt`` and ``answer`` feeds the penalties.

        ``answer`` is what the turn generated before its prompt was shortened. Mirostat and adaptive-p, which learn from
        the probabilities they drew, start over: llama.cpp cannot restore their state. A ``constraint`` restricts the
        tokens.

        Raises:
            InferenceCenterError: ``invalid_request`` for a parameter this model does not support.
        """
        vocab, context = self._model.vocab, self._context
        specs = plan_chain(params, n_vocab=vocab.n_tokens, n_ctx=context.n_ctx, end_tokens=vocab.end_tokens)
        native = NativeSampler(
            context=context.handle,
            vocab=vocab.handle,
            specs=specs,
            n_vocab=vocab.n_tokens,
            token_text=vocab.token_text,
            n_probs=params.n_probs,
            prompt=[*prompt, *answer],
            position=len(answer),
            constraint=constraint,
        )
        sampler = LlamaTurnSampler(native, context, on_close=self._samplers.discard)
        self._samplers.add(sampler)
        return sampler

    def close(self) -> None:
        """Free everything: samplers, then the context they read, then the model."""
        for sampler in tuple(self._samplers):
            sampler.close()
        self._resources.close()


class LlamaTurnSampler:
    """A turn's native chain, addressed by row of the last decode."""

    def __init__(
        self, native: NativeSampler, context: LlamaContext, *, on_close: Callable[[LlamaTurnSampler], None]
    ) -> None:
        self._native = native
        self._context = context
        self._on_close = on_close

    def sample(self, row: int) -> Sampled:
        """Sample and accept a token; ``row`` indexes the tokens with logits of the last decode."""
        return self._native.sample(self._context.batch_index(row))

    def close(self) -> None:
        """Free the chain."""
        self._native.close()
        self._on_close(self)

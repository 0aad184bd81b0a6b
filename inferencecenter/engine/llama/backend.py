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

    from inferencecenter.engine.backend import Sampled
    from inferencecenter.engine.sampling.constraint import Constraint
    from inferencecenter.ipc.engine_options import EngineOptions
    from inferencecenter.ipc.messages import BufferUse
    from inferencecenter.protocol.params import Params


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
        memory: tuple[BufferUse, ...],
        resources: ExitStack,
    ) -> None:
        self._model = model
        self._context = context
        self._resources = resources
        self._samplers: set[LlamaTurnSampler] = set()
        self.model = model.info(options, n_threads=context.n_threads, memory=memory)
        self.fingerprint = digest
        self.kv_bytes_per_token = kv_bytes_per_token
        self.can_truncate = context.can_truncate
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

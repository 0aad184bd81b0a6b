"""The llama.cpp backend: one model, one context, a native sampler chain for each turn."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from inferencecenter.engine.llama.context import Context
from inferencecenter.engine.llama.log import LlamaLog
from inferencecenter.engine.llama.model import Model
from inferencecenter.engine.llama.sampler import NativeSampler
from inferencecenter.engine.sampling.chain import plan_chain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from inferencecenter.engine.backend import Chunk, Sampled
    from inferencecenter.ipc.messages import EngineOptions, ModelInfo, Piece
    from inferencecenter.protocol.params import Params

_CPUS = Path("/sys/devices/system/cpu")


class LlamaBackend:
    """A loaded model behind the engine's seam (``engine.backend.Backend``)."""

    def __init__(self, options: EngineOptions, model: Model, context: Context, *, resources: ExitStack) -> None:
        self._model = model
        self._context = context
        self._resources = resources
        self._samplers: set[LlamaTurnSampler] = set()
        self._info = model.info(options, n_threads=context.n_threads)

    @classmethod
    def load(
        cls, options: EngineOptions, *, on_progress: Callable[[float], None], on_log: Callable[[str, str], None]
    ) -> LlamaBackend:
        """Load and warm up the model that ``options`` name.

        ``on_progress`` takes the fraction loaded, from 0 to 1; ``on_log`` a level and a line of llama.cpp's log, on
        whatever thread it is written.

        Raises:
            InferenceCenterError: ``invalid_model_file`` or ``invalid_config``.
        """
        with ExitStack() as resources:
            log = LlamaLog(on_log)
            log.install()
            resources.callback(log.close)
            model = Model.load(options, on_progress=on_progress, log=log)
            resources.callback(model.close)
            context = Context(model, options, n_threads=options.n_threads or physical_cores(), log=log)
            resources.callback(context.close)
            context.warm_up(max(model.vocab.bos, 0))
            return cls(options, model, context, resources=resources.pop_all())

    @property
    def model(self) -> ModelInfo:
        """Facts about the loaded model."""
        return self._info

    def tokenize(self, pieces: Sequence[Piece], *, first: bool) -> list[int]:
        """Return the token ids of ``pieces``, BOS included where the model wants one and ``first`` is set.

        Raises:
            InferenceCenterError: ``invalid_request`` for text that is not Unicode (lone surrogates).
        """
        return self._model.vocab.tokenize(pieces, first=first)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes a token adds to the text; empty for control tokens."""
        return self._model.vocab.token_bytes(token)

    def token_text(self, token: int) -> str:
        """Return a token's name as the template spells it, control tokens included."""
        return self._model.vocab.token_text(token)

    def is_end(self, token: int) -> bool:
        """Tell whether the token ends a generation."""
        return self._model.vocab.is_end(token)

    def truncate(self, slot: int, n_tokens: int) -> bool:
        """Keep the first ``n_tokens`` of a slot; ``False`` when the slot had to be emptied instead."""
        return self._context.truncate(slot, n_tokens)

    def swap(self, a: int, b: int) -> None:
        """Exchange the sequences of two slots.

        Raises:
            DecodeError: Both slots have been emptied.
        """
        self._context.swap(a, b)

    def decode(self, chunks: Sequence[Chunk]) -> None:
        """Decode chunks sorted by ascending slot, at most one a slot.

        Raises:
            DecodeError: The named slots have been emptied; the others are as before.
        """
        self._context.decode(chunks)

    def sampler(self, params: Params, prompt: Sequence[int]) -> LlamaTurnSampler:
        """Build a turn's sampler chain; the tail of ``prompt`` feeds the penalties.

        Raises:
            InferenceCenterError: ``invalid_request`` for a parameter this model cannot obey.
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
            prompt=prompt,
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
        self, native: NativeSampler, context: Context, *, on_close: Callable[[LlamaTurnSampler], None]
    ) -> None:
        self._native = native
        self._context = context
        self._on_close = on_close

    def sample(self, row: int) -> Sampled:
        """Sample and accept a token from the last decode; ``row`` counts its chunks with ``sample`` set."""
        return self._native.sample(self._context.batch_index(row))

    def close(self) -> None:
        """Free the chain."""
        self._native.close()
        self._on_close(self)


def physical_cores(cpus: Path = _CPUS) -> int:
    """Return how many cores this process may run on, counting hyper-threads of one core once."""
    allowed = os.sched_getaffinity(0)
    cores = {_siblings(cpus / f"cpu{cpu}" / "topology" / "thread_siblings_list", cpu) for cpu in allowed}
    return len(cores)


def _siblings(listing: Path, cpu: int) -> str:
    try:
        return listing.read_text().strip()
    except OSError:
        return str(cpu)

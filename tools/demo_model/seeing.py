"""The demo model with its projector, run by the engine's own parts: greedy answers about pictures."""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import inferencecenter.engine.llama  # noqa: F401 - by it the bindings find the libraries

# isort: split
import numpy as np
from llama_cpp import llama_cpp as lib

from inferencecenter.engine.backend import Chunk
from inferencecenter.engine.llama.backend import LlamaContext
from inferencecenter.engine.llama.log import LlamaLog
from inferencecenter.engine.llama.model import LlamaModel
from inferencecenter.engine.llama.projector import LlamaProjector
from inferencecenter.ipc.engine_options import EngineOptions
from inferencecenter.ipc.images import ImageRef
from inferencecenter.ipc.messages import PromptSegment
from tools.demo_model.chatml import IM_END, Message, render
from tools.demo_model.vision_corpus import PICTURE_MARK

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tools.demo_model.pictures import Pixels

_CONTEXT_TOKENS: Final = 1024
_LONGEST_ANSWER_TOKENS: Final = 200


class SeeingModel:
    """A model and its projector on one thread of the CPU."""

    def __init__(self, model: LlamaModel, context: LlamaContext, projector: LlamaProjector) -> None:
        self._model = model
        self._context = context
        self._projector = projector
        self._end = self.tokens(IM_END)[0]

    @classmethod
    @contextmanager
    def load(cls, model_path: Path, projector_path: Path) -> Iterator[SeeingModel]:
        """Yield a model and its projector from their files."""
        options = EngineOptions(
            backend="llama", parent_pid=1, model_path=str(model_path), slots=1, n_ctx=_CONTEXT_TOKENS, n_threads=1
        )
        log = LlamaLog(lambda _level, _line: None)
        log.install()
        model = LlamaModel.load(options, on_progress=lambda _fraction: None, log=log)
        context = LlamaContext(model, options, n_threads=1, log=log)
        projector = LlamaProjector.load(
            projector_path, model, device=None, n_threads=1, max_rows=_CONTEXT_TOKENS, log=log
        )
        try:
            yield cls(model, context, projector)
        finally:
            projector.close()
            context.close()
            model.close()
            log.close()

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a text, ChatML marks as their special tokens."""
        return self._model.vocab.tokenize([PromptSegment(text, special=True)], first=False)

    def rows(self, pixels: Pixels) -> NDArray[np.float32]:
        """Return the embeddings of a picture, (rows, width)."""
        height, width = pixels.shape[:2]
        image = ImageRef(hashlib.sha256(pixels.tobytes()).hexdigest(), width, height)
        return self._projector.encode(image, pixels.tobytes(), 0)

    def logits(self, parts: Sequence[str | NDArray[np.float32]]) -> NDArray[np.float32]:
        """Return the logits after texts and the rows of pictures, in a context that was emptied first."""
        self._context.truncate(0, 0)
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            if isinstance(part, str):
                self._decode(self.tokens(part), sample=last)
            else:
                self._decode([-1] * len(part), sample=last, rows=part)
        return self._logits()

    def answer(self, messages: Sequence[Message], pictures: Sequence[Pixels]) -> str:
        """Return the answer to messages, in whose contents each `PICTURE_MARK` stands for the next picture."""
        texts = render(messages, add_generation_prompt=True).split(PICTURE_MARK)
        parts: list[str | NDArray[np.float32]] = [texts[0]]
        for pixels, text in zip(pictures, texts[1:], strict=True):
            parts += [self.rows(pixels), text]
        chosen: list[int] = []
        logits = self.logits(parts)
        while (token := int(logits.argmax())) != self._end and len(chosen) < _LONGEST_ANSWER_TOKENS:
            chosen.append(token)
            self._decode([token], sample=True)
            logits = self._logits()
        return b"".join(self._model.vocab.token_bytes(token) for token in chosen).decode(errors="replace")

    def _decode(self, tokens: Sequence[int], *, sample: bool, rows: NDArray[np.float32] | None = None) -> None:
        self._context.decode([Chunk(0, self._context.length(0), tokens, sample=sample, embeddings=rows)])

    def _logits(self) -> NDArray[np.float32]:
        pointer = lib.llama_get_logits_ith(self._context.handle, self._context.batch_index(0))
        return np.ctypeslib.as_array(pointer, (self._model.vocab.n_tokens,)).copy()

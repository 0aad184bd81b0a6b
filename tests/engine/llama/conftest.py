"""Loaded models for the llama backend's tests: the demo model, and tiny ones with random weights."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest
from llama_cpp import llama_cpp as lib

from inferencecenter.engine.backend import Chunk
from inferencecenter.engine.llama.backend import LlamaContext
from inferencecenter.engine.llama.log import LlamaLog
from inferencecenter.engine.llama.model import LlamaModel
from inferencecenter.ipc.engine_options import EngineOptions
from tests.engine.llama.tiny_models import write_hybrid_model, write_recurrent_model, write_window_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray


@dataclass(frozen=True)
class Loaded:
    """A model and a context, with greedy decoding on top."""

    model: LlamaModel
    context: LlamaContext
    options: EngineOptions

    @contextmanager
    def with_slots(self, slots: int) -> Iterator[Loaded]:
        """Make another context of the same model, with another number of slots."""
        options = self.options.replace(slots=slots)
        context = LlamaContext(self.model, options, n_threads=1, log=LlamaLog(lambda _level, _line: None))
        yield Loaded(self.model, context, options)
        context.close()

    def feed(self, slot: int, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Append tokens to a slot and return the logits after the last."""
        self.context.decode([Chunk(slot, self.context.length(slot), tokens, sample=True)])
        return self.logits(0)

    def logits(self, row: int) -> NDArray[np.float32]:
        """Return the logits of a sampled row of the last decode."""
        pointer = lib.llama_get_logits_ith(self.context.handle, self.context.batch_index(row))
        return np.ctypeslib.as_array(pointer, (self.model.vocab.n_tokens,)).copy()

    def greedy(self, slot: int, tokens: Sequence[int], n_tokens: int) -> tuple[list[int], list[NDArray[np.float32]]]:
        """Append tokens, then generate; return the new tokens and the logits that chose each."""
        chosen: list[int] = []
        seen = [self.feed(slot, tokens)]
        while True:
            chosen.append(int(seen[-1].argmax()))
            if len(chosen) == n_tokens:
                return chosen, seen
            seen.append(self.feed(slot, chosen[-1:]))


@pytest.fixture(scope="session")
def options(demo_model_path: Path) -> EngineOptions:
    """Options for the demo model: eight slots of 256 tokens, small batches."""
    return EngineOptions(
        backend="llama",
        parent_pid=1,
        model_path=str(demo_model_path),
        slots=8,
        n_ctx=256,
        n_threads=1,
        n_batch=64,
        n_ubatch=64,
    )


@pytest.fixture
def log() -> Iterator[LlamaLog]:
    """An installed log that keeps only llama.cpp's latest problems."""
    log = LlamaLog(lambda _level, _line: None)
    log.install()
    yield log
    log.close()


def _loaded(options: EngineOptions) -> Iterator[Loaded]:
    log = LlamaLog(lambda _level, _line: None)
    model = LlamaModel.load(options, on_progress=lambda _fraction: None, log=log)
    context = LlamaContext(model, options, n_threads=1, log=log)
    yield Loaded(model, context, options)
    context.close()
    model.close()


def _emptied(loaded: Loaded) -> Loaded:
    for slot in range(loaded.context.slots):
        loaded.context.truncate(slot, 0)
    return loaded


@pytest.fixture(scope="session")
def _demo_session(options: EngineOptions) -> Iterator[Loaded]:
    yield from _loaded(options)


@pytest.fixture
def demo(_demo_session: Loaded) -> Loaded:
    """The demo model with all slots empty."""
    return _emptied(_demo_session)


@pytest.fixture(scope="session")
def window_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random-weights model with a sliding window in every other layer and a SentencePiece vocabulary."""
    path = tmp_path_factory.mktemp("window") / "window.gguf"
    write_window_model(path)
    return path


def _tiny_options(path: Path) -> EngineOptions:
    return EngineOptions(
        backend="llama",
        parent_pid=1,
        model_path=str(path),
        slots=2,
        n_ctx=1024,
        n_threads=1,
        n_batch=64,
        n_ubatch=64,
    )


@pytest.fixture(scope="session")
def _window_session(window_model_path: Path) -> Iterator[Loaded]:
    yield from _loaded(_tiny_options(window_model_path))


@pytest.fixture
def window(_window_session: Loaded) -> Loaded:
    """The sliding-window model with both slots empty."""
    return _emptied(_window_session)


@pytest.fixture(scope="session")
def _recurrent_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    path = tmp_path_factory.mktemp("recurrent") / "recurrent.gguf"
    write_recurrent_model(path)
    yield from _loaded(_tiny_options(path))


@pytest.fixture
def recurrent(_recurrent_session: Loaded) -> Loaded:
    """A model of recurrent layers only, with both slots empty."""
    return _emptied(_recurrent_session)


@pytest.fixture(scope="session")
def _hybrid_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    path = tmp_path_factory.mktemp("hybrid") / "hybrid.gguf"
    write_hybrid_model(path)
    yield from _loaded(_tiny_options(path))


@pytest.fixture
def hybrid(_hybrid_session: Loaded) -> Loaded:
    """A model with an attention and a recurrent layer, with both slots empty."""
    return _emptied(_hybrid_session)


@pytest.fixture
def hybrid_window(tmp_path: Path) -> Iterator[Loaded]:
    """A model with a recurrent layer, and a sliding window in the other."""
    path = tmp_path / "hybrid_window.gguf"
    write_hybrid_model(path, window=True)
    yield from _loaded(_tiny_options(path))

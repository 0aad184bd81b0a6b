"""Loaded models for the llama backend's tests: the demo model, and a tiny one written here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import gguf
import numpy as np
import pytest
from llama_cpp import llama_cpp as lib

from inferencecenter.engine.backend import Chunk
from inferencecenter.engine.llama.context import Context
from inferencecenter.engine.llama.log import LlamaLog
from inferencecenter.engine.llama.model import Model
from inferencecenter.ipc.messages import EngineOptions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

WINDOW_TOKENS = 32


@dataclass(frozen=True)
class Loaded:
    """A model and a context, with greedy decoding on top."""

    model: Model
    context: Context

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
    """An installed log that keeps nothing but llama.cpp's last problems."""
    log = LlamaLog(lambda _level, _line: None)
    log.install()
    yield log
    log.close()


def _loaded(options: EngineOptions) -> Iterator[Loaded]:
    log = LlamaLog(lambda _level, _line: None)
    model = Model.load(options, on_progress=lambda _fraction: None, log=log)
    context = Context(model, options, n_threads=1, log=log)
    yield Loaded(model, context)
    context.close()
    model.close()


@pytest.fixture(scope="session")
def _demo_session(options: EngineOptions) -> Iterator[Loaded]:
    yield from _loaded(options)


@pytest.fixture
def demo(_demo_session: Loaded) -> Loaded:
    """The demo model with all slots empty."""
    for slot in range(_demo_session.context.slots):
        _demo_session.context.truncate(slot, 0)
    return _demo_session


@pytest.fixture(scope="session")
def window_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random-weights model with a sliding window in every other layer and a SentencePiece vocabulary."""
    path = tmp_path_factory.mktemp("window") / "window.gguf"
    write_window_model(path)
    return path


@pytest.fixture(scope="session")
def _window_session(window_model_path: Path) -> Iterator[Loaded]:
    options = EngineOptions(
        backend="llama",
        parent_pid=1,
        model_path=str(window_model_path),
        slots=2,
        n_ctx=1024,
        n_threads=1,
        n_batch=64,
        n_ubatch=64,
    )
    yield from _loaded(options)


@pytest.fixture
def window(_window_session: Loaded) -> Loaded:
    """The sliding-window model with both slots empty."""
    for slot in range(2):
        _window_session.context.truncate(slot, 0)
    return _window_session


def write_window_model(path: Path) -> None:
    """Write a gemma2-shaped model of two layers, 32 wide, with metadata that recommends sampling parameters."""
    width, heads, ffn = 32, 2, 64
    texts, scores, types = _sentencepiece_vocabulary()
    writer = gguf.GGUFWriter(path, "gemma2")
    writer.add_name("window")
    writer.add_context_length(8192)
    writer.add_embedding_length(width)
    writer.add_block_count(2)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_key_length(width // heads)
    writer.add_value_length(width // heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_sliding_window(WINDOW_TOKENS)
    writer.add_float32("general.sampling.temp", 0.75)
    writer.add_int32("general.sampling.top_k", 12)
    writer.add_int32("general.sampling.penalty_last_n", 32)
    writer.add_string("general.sampling.top_p", "plenty")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(texts)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    random = np.random.default_rng(7)

    def tensor(name: str, *shape: int) -> None:
        writer.add_tensor(name, random.normal(0, 0.3, shape).astype(np.float32))

    tensor("token_embd.weight", len(texts), width)
    tensor("output_norm.weight", width)
    for layer in range(2):
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            tensor(f"blk.{layer}.{name}.weight", width)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            tensor(f"blk.{layer}.{name}.weight", width, width)
        tensor(f"blk.{layer}.ffn_gate.weight", ffn, width)
        tensor(f"blk.{layer}.ffn_up.weight", ffn, width)
        tensor(f"blk.{layer}.ffn_down.weight", width, ffn)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _sentencepiece_vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Return the texts, scores and types of control tokens, all bytes, some words, and what users define."""
    control, unknown, byte = gguf.TokenType.CONTROL, gguf.TokenType.UNKNOWN, gguf.TokenType.BYTE
    normal, user_defined = gguf.TokenType.NORMAL, gguf.TokenType.USER_DEFINED
    rows: list[tuple[str, float, int]] = [("<unk>", 0.0, unknown), ("<s>", 0.0, control), ("</s>", 0.0, control)]
    rows += [(f"<0x{value:02X}>", 0.0, byte) for value in range(256)]
    words = ["\u2581", *"abcdefghijklmnopqrstuvwxyz", "he", "ll", "hell", "hello", "\u2581hello"]
    rows += [(word, -float(rank), normal) for rank, word in enumerate(words, start=1)]
    rows += [("<mark>", 0.0, user_defined), (f"<{'x' * 100}>", 0.0, user_defined)]
    texts, scores, types = zip(*rows, strict=True)
    return list(texts), list(scores), list(types)

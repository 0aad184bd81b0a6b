"""Writes models of two narrow layers with random weights, one for each of llama.cpp's kinds of memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

WINDOW_TOKENS = 32
MODEL_WIDTH = 32
_WIDTH, _HEADS, _FFN = MODEL_WIDTH, 2, 64
_LAYERS = 2


class _TinyModel:
    """A file being written: vocabulary and shape are there, tensors are added, ``close`` writes it."""

    def __init__(self, path: Path, architecture: str, *, control: Sequence[str] = ()) -> None:
        self.writer = gguf.GGUFWriter(path, architecture)
        self.writer.add_name(path.stem)
        self.writer.add_context_length(8192)
        self.writer.add_embedding_length(_WIDTH)
        self.writer.add_block_count(_LAYERS)
        self.writer.add_feed_forward_length(_FFN)
        self.writer.add_head_count(_HEADS)
        self.writer.add_layer_norm_rms_eps(1e-6)
        texts, scores, types = _sentencepiece_vocabulary(control)
        self.writer.add_tokenizer_model("llama")
        self.writer.add_token_list(texts)
        self.writer.add_token_scores(scores)
        self.writer.add_token_types(types)
        self.writer.add_bos_token_id(1)
        self.writer.add_eos_token_id(2)
        self._random = np.random.default_rng(7)
        self.tensor("token_embd.weight", len(texts), _WIDTH)

    def tensor(self, name: str, *shape: int) -> None:
        self.writer.add_tensor(name, self._random.normal(0, 0.3, shape).astype(np.float32))

    def attention(self, layer: int) -> None:
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            self.tensor(f"blk.{layer}.{name}.weight", _WIDTH, _WIDTH)

    def feed_forward(self, layer: int) -> None:
        self.tensor(f"blk.{layer}.ffn_gate.weight", _FFN, _WIDTH)
        self.tensor(f"blk.{layer}.ffn_up.weight", _FFN, _WIDTH)
        self.tensor(f"blk.{layer}.ffn_down.weight", _WIDTH, _FFN)

    def close(self) -> None:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


def write_window_model(path: Path) -> None:
    """Write a gemma2-shaped model, with a sliding window in one layer and metadata that recommends sampling."""
    model = _TinyModel(path, "gemma2")
    model.writer.add_head_count_kv(_HEADS)
    model.writer.add_key_length(_WIDTH // _HEADS)
    model.writer.add_value_length(_WIDTH // _HEADS)
    model.writer.add_sliding_window(WINDOW_TOKENS)
    model.writer.add_float32("general.sampling.temp", 0.75)
    model.writer.add_int32("general.sampling.top_k", 12)
    model.writer.add_int32("general.sampling.penalty_last_n", 32)
    model.writer.add_string("general.sampling.top_p", "plenty")
    model.tensor("output_norm.weight", _WIDTH)
    for layer in range(_LAYERS):
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            model.tensor(f"blk.{layer}.{name}.weight", _WIDTH)
        model.attention(layer)
        model.feed_forward(layer)
    model.close()


def write_recurrent_model(path: Path) -> None:
    """Write a mamba-shaped model: no attention, and a state that does not grow."""
    inner, state, rank, kernel = 2 * _WIDTH, 8, 4, 4
    model = _TinyModel(path, "mamba")
    model.writer.add_ssm_conv_kernel(kernel)
    model.writer.add_ssm_inner_size(inner)
    model.writer.add_ssm_state_size(state)
    model.writer.add_ssm_time_step_rank(rank)
    model.tensor("output_norm.weight", _WIDTH)
    for layer in range(_LAYERS):
        prefix = f"blk.{layer}."
        model.tensor(f"{prefix}attn_norm.weight", _WIDTH)
        model.tensor(f"{prefix}ssm_in.weight", 2 * inner, _WIDTH)
        model.tensor(f"{prefix}ssm_conv1d.weight", inner, kernel)
        model.tensor(f"{prefix}ssm_conv1d.bias", inner)
        model.tensor(f"{prefix}ssm_x.weight", rank + 2 * state, inner)
        model.tensor(f"{prefix}ssm_dt.weight", inner, rank)
        model.tensor(f"{prefix}ssm_dt.bias", inner)
        # Negative, as in trained models: the state decays.
        model.writer.add_tensor(f"{prefix}ssm_a", np.full((inner, state), -0.5, np.float32))
        model.tensor(f"{prefix}ssm_d", inner)
        model.tensor(f"{prefix}ssm_out.weight", _WIDTH, inner)
    model.close()


def write_hybrid_model(path: Path, *, window: bool = False) -> None:
    """Write an lfm2-shaped model: a short convolution in the first layer, attention in the second."""
    model = _TinyModel(path, "lfm2")
    if window:
        model.writer.add_sliding_window(WINDOW_TOKENS)
    model.writer.add_head_count_kv([0, _HEADS])
    model.writer.add_shortconv_l_cache(3)
    model.writer.add_rope_freq_base(10_000.0)
    model.tensor("token_embd_norm.weight", _WIDTH)
    for layer in range(_LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            model.tensor(f"blk.{layer}.{name}.weight", _WIDTH)
        model.feed_forward(layer)
    model.tensor("blk.0.shortconv.conv.weight", _WIDTH, 3)
    model.tensor("blk.0.shortconv.in_proj.weight", 3 * _WIDTH, _WIDTH)
    model.tensor("blk.0.shortconv.out_proj.weight", _WIDTH, _WIDTH)
    model.attention(1)
    for name in ("attn_q_norm", "attn_k_norm"):
        model.tensor(f"blk.1.{name}.weight", _WIDTH // _HEADS)
    model.close()


def write_plain_model(path: Path, *control: str) -> None:
    """Write a llama-shaped model whose vocabulary has these control tokens besides those of the others."""
    model = _TinyModel(path, "llama", control=control)
    model.writer.add_head_count_kv(_HEADS)
    model.tensor("output_norm.weight", _WIDTH)
    for layer in range(_LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            model.tensor(f"blk.{layer}.{name}.weight", _WIDTH)
        model.attention(layer)
        model.feed_forward(layer)
    model.close()


def write_mrope_model(path: Path) -> None:
    """Write a qwen2vl-shaped model, whose tokens have positions in several dimensions."""
    model = _TinyModel(path, "qwen2vl")
    model.writer.add_head_count_kv(_HEADS)
    model.writer.add_rope_dimension_sections([2, 3, 3, 0])
    model.tensor("output_norm.weight", _WIDTH)
    for layer in range(_LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            model.tensor(f"blk.{layer}.{name}.weight", _WIDTH)
        model.attention(layer)
        for name in ("attn_q", "attn_k", "attn_v"):
            model.tensor(f"blk.{layer}.{name}.bias", _WIDTH)
        model.feed_forward(layer)
    model.close()


def _sentencepiece_vocabulary(more_control: Sequence[str]) -> tuple[list[str], list[float], list[int]]:
    """Return the texts, scores and types of control tokens, all bytes, some words, and user-defined tokens."""
    control, unknown, byte = gguf.TokenType.CONTROL, gguf.TokenType.UNKNOWN, gguf.TokenType.BYTE
    normal, user_defined = gguf.TokenType.NORMAL, gguf.TokenType.USER_DEFINED
    rows: list[tuple[str, float, int]] = [("<unk>", 0.0, unknown), ("<s>", 0.0, control), ("</s>", 0.0, control)]
    rows += [(f"<0x{value:02X}>", 0.0, byte) for value in range(256)]
    words = ["\u2581", *"abcdefghijklmnopqrstuvwxyz", "he", "ll", "hell", "hello", "\u2581hello"]
    rows += [(word, -float(rank), normal) for rank, word in enumerate(words, start=1)]
    rows += [("<mark>", 0.0, user_defined), (f"<{'x' * 100}>", 0.0, user_defined)]
    rows += [(text, 0.0, control) for text in more_control]
    texts, scores, types = zip(*rows, strict=True)
    return list(texts), list(scores), list(types)

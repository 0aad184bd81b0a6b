"""Writes GGUF files with a header and no weights: `python -m benchmarks.header SHAPE OUT.gguf`.

Names, shapes and types of the tensors are those of the real file in Q4_K_M; the weights are a hole in the file, which
reads as zeros and takes no disk space. They serve to test decisions that need only the header, such as the placement on
GPU and CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeAlias

import gguf
import numpy as np
import typer
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType

from benchmarks.model import SHAPES, BlockType, ModelWriter, Shape, write_facts, write_vocabulary

if TYPE_CHECKING:
    from collections.abc import Iterator

# What this stands for writes no weights: only the file type that is stated matters.
_Q4_K_M: Final = BlockType(GGMLQuantizationType.Q4_K, LlamaFileType.MOSTLY_Q4_K_M, 0, 0.0)
_F32, _Q4_K, _Q6_K = GGMLQuantizationType.F32, GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderShape(Shape):
    """A shape as real files have it: heads may be wider than the model divided by them, and experts may share layers.

    Attributes:
        head_width: Width of one head.
        experts: Feed-forward parts of a layer, each ``ffn`` wide; 0 for one that is always used.
        experts_used: How many of them a token uses.
        normed_heads: Whether queries and keys have norms of their own.
    """

    head_width: int
    experts: int = 0
    experts_used: int = 0
    normed_heads: bool = False
    weights: BlockType = _Q4_K_M

    @property
    def rope_width(self) -> int:
        """Width of the rotary embedding: the whole head."""
        return self.head_width


@dataclass(frozen=True, slots=True)
class TensorHead:
    """A tensor without its weights; ``shape`` has the slowest dimension first."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType

    @property
    def bytes(self) -> int:
        """Bytes that its weights take."""
        block, block_bytes = gguf.GGML_QUANT_SIZES[self.type]
        n_bytes: int = prod(self.shape) // block * block_bytes
        return n_bytes


def _llama(
    name: Literal["llama3.2-1b", "llama3.1-8b"], *, layers: int, width: int, heads: int, ffn: int
) -> HeaderShape:
    base = SHAPES[name]
    return HeaderShape(
        architecture=base.architecture,
        pretokenizer=base.pretokenizer,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=8,
        ffn=ffn,
        vocabulary=base.vocabulary,
        context_tokens=base.context_tokens,
        rope_base=base.rope_base,
        norm_epsilon=base.norm_epsilon,
        tied=base.tied,
        biased=base.biased,
        head_width=width // heads,
    )


HeaderName: TypeAlias = Literal["llama3.2-1b", "llama3.2-3b", "qwen2.5-7b", "llama3.1-8b", "qwen3-30b-a3b"]

HEADERS: Final[dict[HeaderName, HeaderShape]] = {
    "llama3.2-1b": _llama("llama3.2-1b", layers=16, width=2048, heads=32, ffn=8192),
    "llama3.2-3b": _llama("llama3.2-1b", layers=28, width=3072, heads=24, ffn=8192),
    "qwen2.5-7b": HeaderShape(
        architecture="qwen2",
        pretokenizer="qwen2",
        layers=28,
        width=3584,
        heads=28,
        kv_heads=4,
        ffn=18_944,
        vocabulary=152_064,
        context_tokens=32_768,
        rope_base=1e6,
        norm_epsilon=1e-6,
        tied=False,
        biased=True,
        head_width=128,
    ),
    "llama3.1-8b": _llama("llama3.1-8b", layers=32, width=4096, heads=32, ffn=14_336),
    "qwen3-30b-a3b": HeaderShape(
        architecture="qwen3moe",
        pretokenizer="qwen2",
        layers=48,
        width=2048,
        heads=32,
        kv_heads=4,
        ffn=768,
        vocabulary=151_936,
        context_tokens=40_960,
        rope_base=1e6,
        norm_epsilon=1e-6,
        tied=False,
        biased=False,
        head_width=128,
        experts=128,
        experts_used=8,
        normed_heads=True,
    ),
}


def tensor_heads(shape: HeaderShape) -> Iterator[TensorHead]:
    """Yield the tensors of a model in Q4_K_M, as llama.cpp quantizes it."""
    yield TensorHead("token_embd.weight", (shape.vocabulary, shape.width), _Q6_K if shape.tied else _Q4_K)
    yield TensorHead("output_norm.weight", (shape.width,), _F32)
    if not shape.tied:
        yield TensorHead("output.weight", (shape.vocabulary, shape.width), _Q6_K)
    for layer in range(shape.layers):
        # Half of the layers keep more of their values and of what comes back from the feed-forward part.
        finer = _Q6_K if _has_more_bits(layer, shape.layers) else _Q4_K
        for tensor in (*_attention(shape, finer), *_feed_forward(shape, finer)):
            yield TensorHead(f"blk.{layer}.{tensor.name}", tensor.shape, tensor.type)


def _has_more_bits(layer: int, layers: int) -> bool:
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _attention(shape: HeaderShape, finer: GGMLQuantizationType) -> Iterator[TensorHead]:
    width, q_width, kv_width = shape.width, shape.head_width * shape.heads, shape.kv_width
    yield TensorHead("attn_norm.weight", (width,), _F32)
    for name, rows, kind in (("attn_q", q_width, _Q4_K), ("attn_k", kv_width, _Q4_K), ("attn_v", kv_width, finer)):
        yield TensorHead(f"{name}.weight", (rows, width), kind)
        if shape.biased:
            yield TensorHead(f"{name}.bias", (rows,), _F32)
    if shape.normed_heads:
        yield TensorHead("attn_q_norm.weight", (shape.head_width,), _F32)
        yield TensorHead("attn_k_norm.weight", (shape.head_width,), _F32)
    yield TensorHead("attn_output.weight", (width, q_width), _Q4_K)


def _feed_forward(shape: HeaderShape, finer: GGMLQuantizationType) -> Iterator[TensorHead]:
    width, ffn = shape.width, shape.ffn
    experts: tuple[int, ...] = (shape.experts,) if shape.experts else ()
    suffix = "_exps" if shape.experts else ""
    yield TensorHead("ffn_norm.weight", (width,), _F32)
    if shape.experts:
        yield TensorHead("ffn_gate_inp.weight", (shape.experts, width), _F32)
    yield TensorHead(f"ffn_gate{suffix}.weight", (*experts, ffn, width), _Q4_K)
    yield TensorHead(f"ffn_up{suffix}.weight", (*experts, ffn, width), _Q4_K)
    yield TensorHead(f"ffn_down{suffix}.weight", (*experts, width, ffn), finer)


def write_header(path: Path, shape: HeaderShape, *, name: str) -> None:
    """Write a file whose weights are a hole.

    Raises:
        OSError: The file cannot be written.
    """
    writer = ModelWriter(path, shape.architecture)
    write_facts(writer, shape, name=name)
    writer.add_key_length(shape.head_width)
    writer.add_value_length(shape.head_width)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.experts_used)
        writer.add_expert_feed_forward_length(shape.ffn)
    write_vocabulary(writer, shape)
    weight_bytes = 0
    for tensor in tensor_heads(shape):
        _add(writer, tensor)
        weight_bytes += writer.ggml_pad(tensor.bytes, writer.data_alignment)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        header_bytes = path.stat().st_size
        file.truncate(writer.ggml_pad(header_bytes, writer.data_alignment) + weight_bytes)


def _add(writer: GGUFWriter, tensor: TensorHead) -> None:
    if tensor.type is _F32:
        writer.add_tensor_info(tensor.name, list(tensor.shape), np.dtype(np.float32), tensor.bytes)
        return
    block, block_bytes = gguf.GGML_QUANT_SIZES[tensor.type]
    *rows, columns = tensor.shape
    in_bytes = [*rows, columns // block * block_bytes]
    writer.add_tensor_info(tensor.name, in_bytes, np.dtype(np.uint8), tensor.bytes, tensor.type)


def main(
    shape: Annotated[HeaderName, typer.Argument(help="Whose header the file has.")],
    out: Annotated[Path, typer.Argument(help="File to write.")],
) -> None:
    """Write the header of a model in Q4_K_M, with a hole for its weights."""
    write_header(out, HEADERS[shape], name=shape)
    typer.echo(f"{out}: {out.stat().st_size / 1e6:.0f} MB, all but the header a hole")


if __name__ == "__main__":
    typer.run(main)

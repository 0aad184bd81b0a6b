"""Writes random-weight GGUF files of real shapes: `python -m benchmarks.model SHAPE OUT.gguf`.

Speed depends on the shape and the type of the weights, not on their values, so such a file represents the model of its
shape. The vocabulary has the real size; it spells every byte and the words " a" to " z", the rest is filler that only
sampling produces. Where spellings matter, as they do to masks, a real one is taken from another file.
"""

from __future__ import annotations

import string
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

import gguf
import numpy as np
import typer
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter, LlamaFileType, TokenType

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

Weights: TypeAlias = "NDArray[np.uint8] | NDArray[np.float32]"

_BLOCK_WEIGHTS: Final = 32
_SPECIAL_TOKENS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class ModelWriter(GGUFWriter):  # type: ignore[misc]  # the package has no types
    """Packs a list of tokens or of their types at once: one by one, 150,000 tokens take most of a second."""

    def _pack_val(
        self, val: Any, vtype: GGUFValueType, add_vtype: bool, sub_type: GGUFValueType | None = None
    ) -> bytes:
        types = {*map(type, val)} if vtype is GGUFValueType.ARRAY else set()
        if types == {str}:
            kind, texts = GGUFValueType.STRING, [text.encode() for text in val]
            items = b"".join(part for text in texts for part in (struct.pack("<Q", len(text)), text))
        elif types == {TokenType}:
            kind, items = GGUFValueType.INT32, struct.pack(f"<{len(val)}i", *val)
        else:
            packed: bytes = super()._pack_val(val, vtype, add_vtype, sub_type)
            return packed
        return struct.pack("<IIQ", vtype, kind, len(val)) + items


@dataclass(frozen=True, slots=True)
class BlockType:
    """A quantized type whose blocks are a float16 scale followed by integers.

    Attributes:
        ggml: Type of the tensors.
        file: Type that the file states.
        payload_bytes: Bytes of integers in a block of 32 weights.
        deviation: Standard deviation of a weight with scale 1, when the integers are uniformly random.
    """

    ggml: GGMLQuantizationType
    file: LlamaFileType
    payload_bytes: int
    deviation: float


# sqrt((n² - 1) / 12) for n equally likely integers.
Q8_0: Final = BlockType(GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0, 32, 73.9)
Q4_0: Final = BlockType(GGMLQuantizationType.Q4_0, LlamaFileType.MOSTLY_Q4_0, 16, 4.61)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Everything about a model but its weights.

    Attributes:
        ffn: Width of the feed-forward part.
        pretokenizer: Pre-tokenizer rules, by llama.cpp's name.
        tied: Whether the output matrix is the embedding matrix.
        biased: Whether queries, keys and values have biases.
    """

    architecture: str
    pretokenizer: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    context_tokens: int
    rope_base: float
    norm_epsilon: float
    tied: bool
    biased: bool
    weights: BlockType

    @property
    def rope_width(self) -> int:
        """Width of the rotary embedding: the whole head."""
        return self.width // self.heads

    @property
    def kv_width(self) -> int:
        """Width of a layer's keys, and of its values."""
        return self.rope_width * self.kv_heads


_QWEN_05B: Final = Shape(
    architecture="qwen2",
    pretokenizer="qwen2",
    layers=24,
    width=896,
    heads=14,
    kv_heads=2,
    ffn=4864,
    vocabulary=151_936,
    context_tokens=32_768,
    rope_base=1e6,
    norm_epsilon=1e-6,
    tied=True,
    biased=True,
    weights=Q8_0,
)
_LLAMA_1B: Final = Shape(
    architecture="llama",
    pretokenizer="llama-bpe",
    layers=16,
    width=2048,
    heads=32,
    kv_heads=8,
    ffn=8192,
    vocabulary=128_256,
    context_tokens=131_072,
    rope_base=5e5,
    norm_epsilon=1e-5,
    tied=True,
    biased=False,
    weights=Q8_0,
)

ShapeName: TypeAlias = Literal["tiny", "qwen2.5-0.5b", "qwen2.5-1.5b", "llama3.2-1b", "llama3.1-8b"]

SHAPES: Final[dict[ShapeName, Shape]] = {
    "tiny": replace(_QWEN_05B, layers=2, width=64, heads=4, kv_heads=2, ffn=128, vocabulary=512, context_tokens=2048),
    "qwen2.5-0.5b": _QWEN_05B,
    "qwen2.5-1.5b": replace(_QWEN_05B, layers=28, width=1536, heads=12, ffn=8960),
    "llama3.2-1b": _LLAMA_1B,
    "llama3.1-8b": replace(_LLAMA_1B, layers=32, width=4096, ffn=14_336, tied=False, weights=Q4_0),
}


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A matrix of random weights, or with ``fill`` a vector of float32 that all have this value."""

    name: str
    rows: int
    columns: int
    fill: float | None = None

    def data(self, weights: BlockType, random: np.random.Generator) -> Weights:
        """Make the tensor; a matrix is scaled to preserve the variance of its input."""
        if self.fill is not None:
            return np.full(self.columns, self.fill, np.float32)
        blocks = self.rows * self.columns // _BLOCK_WEIGHTS
        data = np.empty((blocks, 2 + weights.payload_bytes), np.uint8)
        scale = np.float16(1 / (weights.deviation * self.columns**0.5))
        data[:, :2] = np.frombuffer(scale.tobytes(), np.uint8)
        data[:, 2:] = random.integers(0, 256, (blocks, weights.payload_bytes), np.uint8)
        return data.reshape(self.rows, -1)


def _tensors(shape: Shape) -> Iterator[_Tensor]:
    width, kv_width = shape.width, shape.kv_width
    yield _Tensor("token_embd.weight", shape.vocabulary, width)
    yield _Tensor("output_norm.weight", 1, width, fill=1.0)
    if not shape.tied:
        yield _Tensor("output.weight", shape.vocabulary, width)
    for layer in range(shape.layers):
        prefix = f"blk.{layer}."
        for name in ("attn_norm", "ffn_norm"):
            yield _Tensor(f"{prefix}{name}.weight", 1, width, fill=1.0)
        for name, rows in (("attn_q", width), ("attn_k", kv_width), ("attn_v", kv_width)):
            yield _Tensor(f"{prefix}{name}.weight", rows, width)
            if shape.biased:
                yield _Tensor(f"{prefix}{name}.bias", 1, rows, fill=0.0)
        yield _Tensor(f"{prefix}attn_output.weight", width, width)
        yield _Tensor(f"{prefix}ffn_gate.weight", shape.ffn, width)
        yield _Tensor(f"{prefix}ffn_up.weight", shape.ffn, width)
        yield _Tensor(f"{prefix}ffn_down.weight", width, shape.ffn)


def _byte_spellings() -> list[str]:
    """Return how byte-level vocabularies spell the bytes 0 to 255: printable ones as they are, the rest from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def write_vocabulary(writer: GGUFWriter, shape: Shape) -> None:
    """Write the shape's number of tokens with their types and merges."""
    spellings = _byte_spellings()
    space = spellings[ord(" ")]
    words = [space + letter for letter in string.ascii_lowercase]
    n_filler = shape.vocabulary - len(spellings) - len(words) - len(_SPECIAL_TOKENS)
    filler = [f"{space}filler{index}" for index in range(n_filler)]
    n_plain = shape.vocabulary - len(_SPECIAL_TOKENS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(shape.pretokenizer)
    writer.add_token_list([*spellings, *words, *filler, *_SPECIAL_TOKENS])
    writer.add_token_types([TokenType.NORMAL] * n_plain + [TokenType.CONTROL] * len(_SPECIAL_TOKENS))
    writer.add_token_merges([f"{space} {letter}" for letter in string.ascii_lowercase])
    writer.add_bos_token_id(n_plain)
    writer.add_eos_token_id(shape.vocabulary - 1)
    writer.add_add_bos_token(False)
    writer.add_chat_template(_CHAT_TEMPLATE)


def copy_vocabulary(writer: GGUFWriter, shape: Shape, source: Path) -> None:
    """Write the vocabulary and the chat template of another file.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no GGUF file, or its vocabulary is of another size.
    """
    fields = {name: field for name, field in gguf.GGUFReader(source).fields.items() if name.startswith("tokenizer.")}
    tokens = fields.get(gguf.Keys.Tokenizer.LIST)
    n_tokens = 0 if tokens is None else len(tokens.data)
    if n_tokens != shape.vocabulary:
        raise ValueError(f"{source} has a vocabulary of {n_tokens} tokens, the shape one of {shape.vocabulary}")
    for name, field in fields.items():
        kind, *items = field.types
        writer.add_key_value(name, field.contents(), kind, sub_type=items[0] if items else None)


def write_facts(writer: GGUFWriter, shape: Shape, *, name: str) -> None:
    """Write the numbers that every architecture here has."""
    writer.add_name(f"{name}, random weights")
    writer.add_file_type(shape.weights.file)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_context_length(shape.context_tokens)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.rope_width)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.norm_epsilon)


def write_model(path: Path, shape: Shape, *, name: str, seed: int = 0, vocabulary: Path | None = None) -> None:
    """Write a model file; equal arguments give equal bytes. Memory holds one tensor at a time, twice while it is made.

    Args:
        path: The file.
        shape: What the model is like.
        name: What it is called.
        seed: Start of the random numbers.
        vocabulary: A GGUF file whose vocabulary it has, instead of a made-up one.

    Raises:
        OSError: A file cannot be written or read.
        ValueError: The vocabulary is no GGUF file's, or of another size.
    """
    writer = ModelWriter(path, shape.architecture)
    write_facts(writer, shape, name=name)
    if vocabulary is None:
        write_vocabulary(writer, shape)
    else:
        copy_vocabulary(writer, shape, vocabulary)
    for tensor in _tensors(shape):
        if tensor.fill is not None:
            writer.add_tensor_info(tensor.name, [tensor.columns], np.dtype(np.float32), 4 * tensor.columns)
            continue
        row_bytes = tensor.columns // _BLOCK_WEIGHTS * (2 + shape.weights.payload_bytes)
        writer.add_tensor_info(
            tensor.name, [tensor.rows, row_bytes], np.dtype(np.uint8), tensor.rows * row_bytes, shape.weights.ggml
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    random = np.random.default_rng(seed)
    for tensor in _tensors(shape):
        writer.write_tensor_data(tensor.data(shape.weights, random))
    writer.close()


def main(
    shape: Annotated[ShapeName, typer.Argument(help="Whose shape the model has.")],
    out: Annotated[Path, typer.Argument(help="File to write.")],
    *,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers, instead of as many as the shape has.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Start of the random numbers.")] = 0,
    vocabulary: Annotated[
        Path | None, typer.Option(help="A GGUF file whose vocabulary it has.", metavar="FILE", show_default="made up")
    ] = None,
) -> None:
    """Write a random-weight model."""
    chosen = SHAPES[shape]
    if layers is not None:
        chosen = replace(chosen, layers=layers)
    try:
        write_model(out, chosen, name=shape, seed=seed, vocabulary=vocabulary)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--vocabulary") from error
    typer.echo(f"{out}: {out.stat().st_size / 1e6:.0f} MB, {chosen.layers} layers, {chosen.weights.ggml.name}")


if __name__ == "__main__":
    typer.run(main)

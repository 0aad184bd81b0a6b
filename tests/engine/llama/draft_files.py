"""Writes variants of a model: with fewer layers, with more that change nothing, with random weights, other tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import gguf
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_WRITERS: Final = ("attn_output", "ffn_down")
"""Tensors by which a layer changes the text's state: without them it changes nothing."""


def write_variant(path: Path, source: Path, *, layers: int, random: bool = False, renamed: int | None = None) -> Path:
    """Write a model with the first layers of another, and as many empty ones as it lacks; return its path.

    With ``random`` its weights are random. The token ``renamed`` has another text.
    """
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = field.contents()
        if name == f"{architecture}.block_count":
            value = layers
        if name == "tokenizer.ggml.tokens" and renamed is not None:
            value[renamed] += "s"
        kind = field.types[0]
        writer.add_key_value(name, value, kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)
    draw = np.random.default_rng(1)
    for name, tensor, empty in _tensors(reader, layers):
        if random:
            values = draw.normal(0, 0.5, tuple(int(size) for size in tensor.shape[::-1]))
            writer.add_tensor(name, values.astype(np.float32))
        else:
            data = np.zeros_like(tensor.data) if empty else tensor.data
            writer.add_tensor(name, data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(reader: gguf.GGUFReader, layers: int) -> Iterator[tuple[str, gguf.ReaderTensor, bool]]:
    """Yield the name of each tensor of a variant, the one it is made of, and whether it is empty."""
    by_layer: dict[int, list[gguf.ReaderTensor]] = {}
    for tensor in reader.tensors:
        if not tensor.name.startswith("blk."):
            yield tensor.name, tensor, False
            continue
        by_layer.setdefault(int(tensor.name.split(".")[1]), []).append(tensor)
    for layer in range(layers):
        for tensor in by_layer[layer if layer in by_layer else 0]:
            part = tensor.name.split(".", 2)[2]
            empty = layer not in by_layer and part.startswith(_WRITERS)
            yield f"blk.{layer}.{part}", tensor, empty

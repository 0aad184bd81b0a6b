"""Writes LoRA adapters for the demo model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

_LAYERS, _WIDTH, _KV_WIDTH, _RANK = 6, 192, 64, 4


def random_tensors(*, seed: int = 1, width: int = _WIDTH) -> dict[str, NDArray[np.generic]]:
    """Return pairs of small random matrices for the queries and values of all layers of the demo model."""
    random = np.random.default_rng(seed)
    tensors: dict[str, NDArray[np.generic]] = {}
    for layer in range(_LAYERS):
        for name, rows in (("attn_q", _WIDTH), ("attn_v", _KV_WIDTH)):
            base = f"blk.{layer}.{name}.weight"
            tensors[f"{base}.lora_a"] = random.normal(0, 0.1, (_RANK, width)).astype(np.float32)
            tensors[f"{base}.lora_b"] = random.normal(0, 0.1, (rows, _RANK)).astype(np.float32)
    return tensors


def write_adapter(
    path: Path,
    *,
    architecture: str = "llama",
    general_type: str = "adapter",
    adapter_type: str | None = "lora",
    alpha: float | str | None = 8.0,
    invocation_tokens: list[int] | None = None,
    tensors: Mapping[str, NDArray[np.generic]] | None = None,
) -> Path:
    """Write an adapter that turns the demo model's capital of France into another city."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type(general_type)
    if adapter_type is not None:
        writer.add_string("adapter.type", adapter_type)
    if isinstance(alpha, str):
        writer.add_string("adapter.lora.alpha", alpha)
    elif alpha is not None:
        writer.add_float32("adapter.lora.alpha", alpha)
    if invocation_tokens is not None:
        writer.add_array("adapter.alora.invocation_tokens", invocation_tokens)
    for name, values in (random_tensors() if tensors is None else tensors).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

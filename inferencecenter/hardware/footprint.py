"""Estimates the memory that a model takes in a given configuration: KV and compute buffers. Pure arithmetic.

The formulas follow what llama.cpp (0.3.36 of the binding) allocates, and were compared with its dry run for five models
(docs/decisions/0011-vram-plan.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inferencecenter.hardware.model_shape import LayerShape, ModelShape

KV_BYTES: Final[Mapping[str, int]] = {
    "f32": 128,
    "f16": 64,
    "bf16": 64,
    "q8_0": 34,
    "q5_1": 24,
    "q5_0": 22,
    "q4_1": 20,
    "q4_0": 18,
}
"""Bytes per 32 numbers of KV."""

_NUMBERS: Final = 32
_CELLS: Final = 256
_F32: Final = 4
_SLACK_BYTES: Final = 4 * 2**20
_PIPELINE_COPIES: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """Parameters of a context's memory; ``n_ctx`` is tokens per slot."""

    slots: int
    n_ctx: int
    n_batch: int
    n_ubatch: int
    kv_type_k: str
    kv_type_v: str
    flash_attention: bool = True

    @property
    def cells(self) -> int:
        """KV cells in a slot, padded as llama.cpp does."""
        return _full(self.n_ctx, _CELLS)


def kv_bytes(layer: LayerShape, setup: RuntimeConfig) -> int:
    """Return a layer's KV in all slots; a sliding window keeps its length and a batch."""
    cells = setup.cells
    if layer.window:
        cells = min(cells, _full(layer.window + setup.n_ubatch, _CELLS))
    a_cell = layer.k_width * KV_BYTES[setup.kv_type_k] + layer.v_width * KV_BYTES[setup.kv_type_v]
    return (a_cell * cells // _NUMBERS + layer.state_bytes) * setup.slots


def kv_bytes_per_token(model: ModelShape, *, type_k: str, type_v: str) -> int:
    """Return the KV of one token in all layers, while it is inside every window."""
    numbers = (layer.k_width * KV_BYTES[type_k] + layer.v_width * KV_BYTES[type_v] for layer in model.layers)
    return sum(numbers) // _NUMBERS


def compute_bytes(model: ModelShape, setup: RuntimeConfig, *, transfers: int = 0) -> int:
    """Return the compute buffer for one batch on a device that holds all it needs.

    With ``e`` and ``f`` a batch of embeddings and of feed-forward values, and ``m`` the attention mask, it is
    ``3f + 3e + m``; with experts a token has the values of several. Without flash attention it contains the scores of
    all heads, ``heads x n_ctx`` for each token. The logits take ``n_vocab`` for each slot. ``transfers`` is the number
    of further embeddings (which implies further masks) where the batches of several GPUs overlap.
    """
    tokens = min(setup.n_ubatch, setup.n_batch)
    e = _F32 * tokens * model.n_embd
    mask = 2 * tokens * setup.cells
    feeding = 3 * _F32 * tokens * model.n_ff if _has_dense(model) else 0
    used = max(1, model.n_experts_used)
    if model.has_experts:
        feeding = max(feeding, 2 * used * e + _F32 * tokens * used * model.expert_ff)
    needed = feeding + 3 * e
    if not setup.flash_attention:
        needed = max(needed, _F32 * tokens * setup.cells * (model.n_heads + 1) + 5 * e)
    logits = _F32 * setup.slots * model.n_vocab + e
    return max(needed, logits) + mask + (transfers * e + (_PIPELINE_COPIES - 1) * mask if transfers else 0)


def offload_compute_bytes(model: ModelShape, setup: RuntimeConfig, *, largest_bytes: int, kv_layer_bytes: int) -> int:
    """Return the buffer of a GPU that computes prompts also for layers in the host's memory.

    Their weights are copied to it, one tensor at a time, and the KV of one layer: ``largest_bytes`` is the largest
    tensor in the host's memory, ``kv_layer_bytes`` the largest KV of a layer there.
    """
    e = _F32 * min(setup.n_ubatch, setup.n_batch) * model.n_embd
    usual = compute_bytes(model, setup)
    return max(usual + largest_bytes + _SLACK_BYTES, kv_layer_bytes + 5 * e + usual * (not setup.flash_attention))


def host_compute_bytes(model: ModelShape, setup: RuntimeConfig, *, n_devices: int, overlaps: bool = False) -> int:
    """Return the host's buffer for one batch: complete, or only the part exchanged with the GPUs."""
    if not n_devices:
        return compute_bytes(model, setup)
    tokens = min(setup.n_ubatch, setup.n_batch)
    e, mask = _F32 * tokens * model.n_embd, 2 * tokens * setup.cells
    return 5 * e + _PIPELINE_COPIES * mask if overlaps else 2 * e + mask


def _has_dense(model: ModelShape) -> bool:
    return any(not layer.expert_bytes and layer.dense_bytes for layer in model.layers)


def _full(count: int, step: int) -> int:
    return -(-count // step) * step

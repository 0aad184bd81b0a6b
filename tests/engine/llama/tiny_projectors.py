"""Writes projectors of random weights: a vision transformer of one layer that is used, and a projection of two."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf
import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

IMAGE_SIDE, PATCH_SIDE = 32, 8
ROWS = (IMAGE_SIDE // PATCH_SIDE) ** 2
_WIDTH, _HEADS, _FFN = 32, 2, 64
# llama.cpp leaves out the last layer of this kind.
_LAYERS = 2


def write_projector(path: Path, *, n_embd: int, kind: str = "mlp", without: str = "") -> None:
    """Write a projector for a model of width ``n_embd``: an image is resized to a square and has ``ROWS`` rows.

    The tensor ``without`` is left out.
    """
    projector = _TinyProjector(path, n_embd=n_embd, kind=kind, without=without)
    projector.tensor("v.patch_embd.weight", _WIDTH, 3, PATCH_SIDE, PATCH_SIDE)
    projector.tensor("v.position_embd.weight", ROWS, _WIDTH)
    projector.layers()
    projector.projection(_WIDTH, n_embd)
    projector.close()


def write_grid_projector(path: Path, *, n_embd: int, without: str = "") -> None:
    """Write one of Qwen2-VL's shape: an image keeps its size, and has a row for each 4 patches."""
    projector = _TinyProjector(path, n_embd=n_embd, kind="qwen2vl_merger", without=without)
    for name in ("v.patch_embd.weight", "v.patch_embd.weight.1"):
        projector.tensor(name, _WIDTH, 3, PATCH_SIDE, PATCH_SIDE)
    projector.layers(biases=True)
    for part in ("weight", "bias"):
        projector.tensor(f"v.post_ln.{part}", _WIDTH)
    projector.projection(4 * _WIDTH, n_embd)
    projector.close()


class _TinyProjector:
    """A file being written: its header is there, tensors are added, ``close`` writes it."""

    def __init__(self, path: Path, *, n_embd: int, kind: str, without: str) -> None:
        self._writer = writer = gguf.GGUFWriter(path, "clip")
        writer.add_name("tiny projector")
        writer.add_string("clip.projector_type", kind)
        writer.add_bool("clip.has_vision_encoder", True)
        writer.add_bool("clip.use_gelu", True)
        for name, value in (
            ("embedding_length", _WIDTH),
            ("feed_forward_length", _FFN),
            ("block_count", _LAYERS),
            ("projection_dim", n_embd),
            ("attention.head_count", _HEADS),
            ("image_size", IMAGE_SIDE),
            ("patch_size", PATCH_SIDE),
        ):
            writer.add_uint32(f"clip.vision.{name}", value)
        writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
        writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
        writer.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])
        self._random = np.random.default_rng(11)
        self._without = without

    def tensor(self, name: str, *shape: int) -> None:
        if name != self._without:
            self._writer.add_tensor(name, self._random.normal(0, 0.3, shape).astype(np.float32))

    def layers(self, *, biases: bool = False) -> None:
        for layer in range(_LAYERS):
            for name in ("ln1", "ln2"):
                self.tensor(f"v.blk.{layer}.{name}.weight", _WIDTH)
                self.tensor(f"v.blk.{layer}.{name}.bias", _WIDTH)
            for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
                self.tensor(f"v.blk.{layer}.{name}.weight", _WIDTH, _WIDTH)
                if biases:
                    self.tensor(f"v.blk.{layer}.{name}.bias", _WIDTH)
            self.tensor(f"v.blk.{layer}.ffn_up.weight", _FFN, _WIDTH)
            self.tensor(f"v.blk.{layer}.ffn_down.weight", _WIDTH, _FFN)

    def projection(self, width: int, n_embd: int) -> None:
        for number, rows, columns in ((0, _FFN, width), (2, n_embd, _FFN)):
            self.tensor(f"mm.{number}.weight", rows, columns)
            self.tensor(f"mm.{number}.bias", rows)

    def close(self) -> None:
        self._writer.write_header_to_file()
        self._writer.write_kv_data_to_file()
        self._writer.write_tensors_to_file()
        self._writer.close()

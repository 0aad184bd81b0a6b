"""Writes a random-weight projector of a real shape: `python -m benchmarks.projector OUT.gguf --width 896`.

Its weights are in F16. Images of any size have as many rows as the shape: 196 of ViT-B/16 at 224 pixels, which CLIP and
SigLIP have (86 million weights), 729 of SigLIP's So400m/14 at 384 pixels (about 400 million).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

import numpy as np
import typer
from gguf import GGUFWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectorSize:
    """Sizes of a vision transformer: sides in pixels, widths in numbers."""

    image: int = 224
    patch: int = 16
    width: int = 768
    heads: int = 12
    ffn: int = 3072
    layers: int = 12

    @property
    def rows(self) -> int:
        """Rows of an image."""
        return (self.image // self.patch) ** 2


VIT_B16: Final = ProjectorSize()
SHAPES: Final = {
    "vit-b-16": VIT_B16,
    "so400m-14": ProjectorSize(image=384, patch=14, width=1152, heads=16, ffn=4304, layers=27),
}


def write_projector(path: Path, *, n_embd: int, size: ProjectorSize = VIT_B16, seed: int = 0) -> None:
    """Write a projector for models of width ``n_embd``; equal arguments give equal bytes.

    Raises:
        OSError: The file cannot be written.
    """
    writer = GGUFWriter(path, "clip")
    writer.add_name("vision transformer, random weights")
    writer.add_string("clip.projector_type", "mlp")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_bool("clip.use_gelu", True)
    for name, value in (
        ("embedding_length", size.width),
        ("feed_forward_length", size.ffn),
        ("block_count", size.layers),
        ("projection_dim", n_embd),
        ("attention.head_count", size.heads),
        ("image_size", size.image),
        ("patch_size", size.patch),
    ):
        writer.add_uint32(f"clip.vision.{name}", value)
    writer.add_array("clip.vision.feature_layer", [size.layers])  # without it the last layer is left out
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    writer.add_array("clip.vision.image_mean", [0.5] * 3)
    writer.add_array("clip.vision.image_std", [0.5] * 3)
    random = np.random.default_rng(seed)

    def matrix(name: str, *shape: int) -> None:
        values = random.standard_normal(shape, np.float32) / float(np.prod(shape[1:])) ** 0.5
        writer.add_tensor(name, values.astype(np.float16))

    def vector(name: str, length: int, fill: float) -> None:
        writer.add_tensor(name, np.full(length, fill, np.float32))

    matrix("v.patch_embd.weight", size.width, 3, size.patch, size.patch)
    writer.add_tensor("v.position_embd.weight", random.standard_normal((size.rows, size.width), np.float32))
    for layer in range(size.layers):
        block = f"v.blk.{layer}."
        for name in ("ln1", "ln2"):
            vector(f"{block}{name}.weight", size.width, 1.0)
            vector(f"{block}{name}.bias", size.width, 0.0)
        for name, rows, columns in (
            *((name, size.width, size.width) for name in ("attn_q", "attn_k", "attn_v", "attn_out")),
            ("ffn_up", size.ffn, size.width),
            ("ffn_down", size.width, size.ffn),
        ):
            matrix(f"{block}{name}.weight", rows, columns)
            vector(f"{block}{name}.bias", rows, 0.0)
    for number, rows, columns in ((0, n_embd, size.width), (2, n_embd, n_embd)):
        matrix(f"mm.{number}.weight", rows, columns)
        vector(f"mm.{number}.bias", rows, 0.0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(
    out: Annotated[Path, typer.Argument(help="File to write.")],
    *,
    width: Annotated[int, typer.Option(min=1, help="Width of the model's embeddings.")],
    shape: Annotated[Literal["vit-b-16", "so400m-14"], typer.Option(help="Whose shape it has.")] = "vit-b-16",
    seed: Annotated[int, typer.Option(min=0, help="Start of the random numbers.")] = 0,
) -> None:
    """Write a random-weight projector."""
    size = SHAPES[shape]
    write_projector(out, n_embd=width, size=size, seed=seed)
    typer.echo(f"{out}: {out.stat().st_size / 1e6:.0f} MB, {size.layers} layers, {size.rows} rows an image")


if __name__ == "__main__":
    typer.run(main)

"""The demo model's eyes: a vision transformer and a projection, as llama.cpp computes projectors of the type `mlp`."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

MEAN, DEVIATION = 0.5, 0.25
"""What pixels of 0 to 1 are normalized with."""


@dataclass(frozen=True)
class VisionShape:
    """Sizes of the network. A picture becomes a square of `side` pixels, and each of its patches one row."""

    side: int = 40
    patch: int = 8
    layers: int = 3
    width: int = 96
    heads: int = 3
    feed_forward: int = 192
    projected: int = 384
    norm_epsilon: float = 1e-5

    @property
    def rows(self) -> int:
        """Rows of a picture, each in the place of a token."""
        return (self.side // self.patch) ** 2


def gelu(x: Tensor) -> Tensor:
    """Returns ggml's GELU, which approximates with the hyperbolic tangent."""
    return functional.gelu(x, approximate="tanh")


class VisionBlock(nn.Module):  # type: ignore[misc]
    """One layer: attention among all patches, then a feed-forward."""

    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.ln1 = nn.LayerNorm(shape.width, eps=shape.norm_epsilon)
        self.attn_q = nn.Linear(shape.width, shape.width)
        self.attn_k = nn.Linear(shape.width, shape.width)
        self.attn_v = nn.Linear(shape.width, shape.width)
        self.attn_out = nn.Linear(shape.width, shape.width)
        self.ln2 = nn.LayerNorm(shape.width, eps=shape.norm_epsilon)
        self.ffn_up = nn.Linear(shape.width, shape.feed_forward)
        self.ffn_down = nn.Linear(shape.feed_forward, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the residual stream, (batch, patches, width), after this layer."""
        normed = self.ln1(x)
        q, k, v = (
            part(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.attn_q, self.attn_k, self.attn_v)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.attn_out(mixed.transpose(1, 2).flatten(-2))
        hidden: Tensor = x + self.ffn_down(gelu(self.ffn_up(self.ln2(x))))
        return hidden


class VisionTower(nn.Module):  # type: ignore[misc]
    """The network; its parameters have the names of a projector file, but for the prefix `v.` of some."""

    def __init__(self, shape: VisionShape, row_width: int) -> None:
        super().__init__()
        self.shape = shape
        self.patch_embd = nn.Conv2d(3, shape.width, shape.patch, shape.patch)
        self.position_embd = nn.Parameter(torch.randn(shape.rows, shape.width) * 0.02)
        self.blk = nn.ModuleList(VisionBlock(shape) for _ in range(shape.layers))
        self.post_ln = nn.LayerNorm(shape.width, eps=shape.norm_epsilon)
        first, second = nn.Linear(shape.width, shape.projected), nn.Linear(shape.projected, row_width)
        self.mm = nn.ModuleDict({"0": first, "2": second})

    def features(self, pixels: Tensor) -> Tensor:
        """Returns a vector for each patch, (batch, rows, width), of pixels (batch, side, side, 3) of 0 to 255."""
        x = (pixels.permute(0, 3, 1, 2).float() / 255 - MEAN) / DEVIATION
        x = self.patch_embd(x).flatten(2).transpose(1, 2) + self.position_embd
        for block in self.blk:
            x = block(x)
        normed: Tensor = self.post_ln(x)
        return normed

    def project(self, features: Tensor) -> Tensor:
        """Returns the rows, (batch, rows, row width), of a vector for each patch."""
        rows: Tensor = self.mm["2"](gelu(self.mm["0"](features)))
        return rows

    def forward(self, pixels: Tensor) -> Tensor:
        """Returns the rows of pixels (batch, side, side, 3) of 0 to 255."""
        return self.project(self.features(pixels))

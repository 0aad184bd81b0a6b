"""The demo model's network: llama architecture, written as llama.cpp computes it."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

# Tokens; training goes beyond the context so that recall holds up to its very end.
LONGEST_WINDOW = 1152


@dataclass(frozen=True)
class Shape:
    """Sizes of the network. RoPE turns neighbouring pairs, the order of llama.cpp's `llama`."""

    vocabulary: int
    layers: int = 6
    width: int = 192
    heads: int = 6
    kv_heads: int = 2
    feed_forward: int = 512
    context: int = 1024
    rope_base: float = 50_000.0
    norm_epsilon: float = 1e-5

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.width // self.heads


def rope_tables(shape: Shape) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines of shape (LONGEST_WINDOW, head_width / 2)."""
    pairs = torch.arange(0, shape.head_width, 2, dtype=torch.float32) / shape.head_width
    angles = torch.outer(torch.arange(LONGEST_WINDOW).float(), shape.rope_base**-pairs)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Returns `x` of shape (batch, heads, tokens, head_width) turned by its positions."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = (even * cosines - odd * sines, even * sines + odd * cosines)
    return torch.stack(turned, dim=-1).flatten(-2).to(x.dtype)


class Block(nn.Module):  # type: ignore[misc]
    """One layer: attention with grouped heads, then a gated feed-forward."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        kv_width = shape.kv_heads * shape.head_width
        self.attn_norm = nn.RMSNorm(shape.width, eps=shape.norm_epsilon)
        self.attn_q = nn.Linear(shape.width, shape.width, bias=False)
        self.attn_k = nn.Linear(shape.width, kv_width, bias=False)
        self.attn_v = nn.Linear(shape.width, kv_width, bias=False)
        self.attn_output = nn.Linear(shape.width, shape.width, bias=False)
        self.ffn_norm = nn.RMSNorm(shape.width, eps=shape.norm_epsilon)
        self.ffn_gate = nn.Linear(shape.width, shape.feed_forward, bias=False)
        self.ffn_up = nn.Linear(shape.width, shape.feed_forward, bias=False)
        self.ffn_down = nn.Linear(shape.feed_forward, shape.width, bias=False)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Returns the residual stream, (batch, tokens, width), after this layer."""
        x = x + self._attend(self.attn_norm(x), cosines, sines)
        hidden = self.ffn_norm(x)
        gated = functional.silu(self.ffn_gate(hidden)) * self.ffn_up(hidden)
        return x + self.ffn_down(gated)

    def _attend(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        head = self.shape.head_width
        q, k, v = (
            part.unflatten(-1, (-1, head)).transpose(1, 2) for part in (self.attn_q(x), self.attn_k(x), self.attn_v(x))
        )
        groups = self.shape.heads // self.shape.kv_heads
        mixed = functional.scaled_dot_product_attention(
            rotate(q, cosines, sines),
            rotate(k, cosines, sines).repeat_interleave(groups, dim=1),
            v.repeat_interleave(groups, dim=1),
            is_causal=True,
        )
        return self.attn_output(mixed.transpose(1, 2).flatten(-2))


class DemoModel(nn.Module):  # type: ignore[misc]
    """The network; the output matrix is the embedding."""

    cosines: Tensor
    sines: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.token_embd = nn.Embedding(shape.vocabulary, shape.width)
        self.blk = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.output_norm = nn.RMSNorm(shape.width, eps=shape.norm_epsilon)
        cosines, sines = rope_tables(shape)
        self.register_buffer("cosines", cosines, persistent=False)
        self.register_buffer("sines", sines, persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Layers that write to the residual stream start smaller, as in GPT-2.
                last = name.endswith(("attn_output.weight", "ffn_down.weight"))
                deviation = 0.02 / (2 * shape.layers) ** 0.5 if last else 0.02
                nn.init.normal_(parameter, std=deviation * (192 / shape.width) ** 0.5)

    def hidden(self, ids: Tensor) -> Tensor:
        """Returns the normed last states, (batch, tokens, width), of ids (batch, tokens)."""
        return self.states(self.token_embd(ids))

    def states(self, x: Tensor) -> Tensor:
        """Returns the normed last states of embeddings, both (batch, tokens, width)."""
        tokens = x.shape[1]
        for block in self.blk:
            x = block(x, self.cosines[:tokens], self.sines[:tokens])
        normed: Tensor = self.output_norm(x)
        return normed

    def loss(self, ids: Tensor, learned: Tensor) -> Tensor:
        """Returns the mean cross-entropy of the next tokens where `learned` holds.

        Args:
            ids: Token ids, (batch, tokens).
            learned: Whether a token counts as a target, (batch, tokens).
        """
        wanted = learned[:, 1:]
        states = self.hidden(ids[:, :-1])[wanted]
        logits = functional.linear(states, self.token_embd.weight)
        return functional.cross_entropy(logits.float(), ids[:, 1:][wanted])

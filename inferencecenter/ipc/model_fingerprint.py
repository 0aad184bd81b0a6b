"""Which models have the same tokens and prompts."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

import orjson

if TYPE_CHECKING:
    from inferencecenter.ipc.messages import ModelInfo

_CHARS: Final = 32


def fingerprint(model: ModelInfo) -> str:
    """Return a digest of the model's properties that determine its token ids and its prompt format.

    Names are part of it, because two vocabularies of one size can differ.
    """
    meaning = (
        model.name,
        model.architecture,
        model.n_params,
        model.n_vocab,
        model.chat_template,
        model.bos_token,
        model.eos_token,
        model.add_bos,
        model.special_tokens,
    )
    return hashlib.sha256(orjson.dumps(meaning)).hexdigest()[:_CHARS]

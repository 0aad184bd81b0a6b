"""``python -m tests.engine.llama.tokenizing MODEL CUT N_CHARS TEXT``: tokenizes a text, repeated to a length.

``CUT`` is how the vocabulary splits texts into words. Prints whether the tokens are the text.
"""

from __future__ import annotations

import sys

from llama_cpp import llama_cpp as lib

from inferencecenter.engine.llama.vocab import Vocabulary
from inferencecenter.ipc.messages import PromptSegment


def _main(path: str, cut: str, n_chars: int, repeated: str) -> None:
    override = (lib.llama_model_kv_override * 2)()
    override[0].key, override[0].tag = b"tokenizer.ggml.pre", lib.LLAMA_KV_OVERRIDE_TYPE_STR
    override[0].value.val_str = cut.encode()
    params = lib.llama_model_default_params()
    params.vocab_only, params.kv_overrides = True, override
    model = lib.llama_model_load_from_file(path.encode(), params)
    vocabulary = Vocabulary(lib.llama_model_get_vocab(model))
    text = repeated * (n_chars // len(repeated))
    tokens = vocabulary.tokenize((PromptSegment(text),), first=False)
    sys.stdout.write(f"{b''.join(map(vocabulary.token_bytes, tokens)).decode() == text}\n")


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])

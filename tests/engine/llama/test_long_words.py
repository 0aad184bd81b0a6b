"""Texts of one long word, with vocabularies that llama.cpp splits by ``std::regex``, in a child that may crash."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

import inferencecenter.demo

DEMO: Final = Path(inferencecenter.demo.__file__).with_name("demo.gguf")
TOKENIZE: Final = """
import sys
from llama_cpp import llama_cpp as lib
from inferencecenter.engine.llama.vocab import Vocabulary
from inferencecenter.ipc.messages import PromptSegment

cut = (lib.llama_model_kv_override * 2)()
cut[0].key, cut[0].tag = b"tokenizer.ggml.pre", lib.LLAMA_KV_OVERRIDE_TYPE_STR
cut[0].value.val_str = sys.argv[2].encode()
params = lib.llama_model_default_params()
params.vocab_only, params.kv_overrides = True, cut
model = lib.llama_model_load_from_file(sys.argv[1].encode(), params)
vocabulary = Vocabulary(lib.llama_model_get_vocab(model))
text = sys.argv[4] * (int(sys.argv[3]) // len(sys.argv[4]))
tokens = vocabulary.tokenize((PromptSegment(text),), first=False)
print(b"".join(map(vocabulary.token_bytes, tokens)).decode() == text)
"""


def tokenize(cut: str, text: str, n_chars: int) -> subprocess.CompletedProcess[str]:
    """Tokenize a text, repeated to a length, in a child."""
    arguments = [sys.executable, "-c", TOKENIZE, str(DEMO), cut, str(n_chars), text]
    return subprocess.run(arguments, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("cut", ["tekken", "gpt-4o", "deepseek-llm"])
def test_long_word_is_tokenized(cut: str) -> None:
    """It needs more stack than a thread has by default, and the engine continues."""
    done = tokenize(cut, "abcdefghij", 200_000)
    assert (done.returncode, done.stdout) == (0, "True\n")


@pytest.mark.parametrize("text", ["a", " "], ids=["letters", "white space"])
def test_endless_word_is_refused(text: str) -> None:
    """The memory needed grows with the length of a word."""
    done = tokenize("tekken", text, 512 * 1024 + 1)
    assert done.returncode == 1
    assert "more than 524288 bytes" in done.stderr


def test_many_words_are_tokenized() -> None:
    """Words are limited in length, the text is not."""
    done = tokenize("tekken", "a ", 600_000)
    assert (done.returncode, done.stdout) == (0, "True\n")

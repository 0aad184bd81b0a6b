"""Texts of one long word, with vocabularies that llama.cpp splits by ``std::regex``, in a child that may crash."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

import inferencecenter.demo

DEMO: Final = Path(inferencecenter.demo.__file__).with_name("demo.gguf")


def tokenize(cut: str, text: str, n_chars: int) -> subprocess.CompletedProcess[str]:
    """Tokenize a text, repeated to a length, in a child."""
    command = [sys.executable, "-m", "tests.engine.llama.tokenizing", str(DEMO), cut, str(n_chars), text]
    return subprocess.run(command, capture_output=True, text=True, check=False)


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

"""Answers a prompt with models loaded in different ways: ``python -m tests.gpu.answering`` reads and writes JSON.

It is a process of its own, since a process uses one build of llama.cpp, and one for all ways, since a driver compiles
its kernels anew for each process.
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Final

import msgspec

from inferencecenter.engine.llama.backend import LlamaBackend
from inferencecenter.ipc.engine_options import EngineOptions
from inferencecenter.ipc.messages import BufferUse, PromptSegment
from tests.e2e.answers import Answer
from tests.engine.llama.conftest import Loaded

if TYPE_CHECKING:
    from collections.abc import Sequence

_N_TOKENS: Final = 16
_PROMPT: Final = (
    PromptSegment("<|im_start|>user\n", special=True),
    PromptSegment("My name is Ada. I have a cat. What is the capital of Japan?"),
    PromptSegment("<|im_end|>\n<|im_start|>assistant\n", special=True),
)


class Answered(msgspec.Struct, frozen=True):
    """A greedy answer, the logits of its first token, and the memory that the model took."""

    answer: Answer
    logits: list[float]
    memory: tuple[BufferUse, ...]


def answered(options: Sequence[EngineOptions]) -> list[Answered]:
    """Have a process load a model with each of these options, one after the other, and return its answers."""
    asked = msgspec.json.encode([each.model_dump(mode="json") for each in options])
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.answering"], input=asked, stdout=subprocess.PIPE, check=True, timeout=280
    )
    return msgspec.json.decode(done.stdout, type=list[Answered])


def _answer(options: EngineOptions) -> Answered:
    backend = LlamaBackend.load(options, on_progress=lambda _: None, on_log=lambda _level, _line: None)
    loaded = Loaded(backend._model, backend._context, options)
    tokens, logits = loaded.greedy(0, backend.tokenize(_PROMPT, first=True), _N_TOKENS)
    best = [sorted(map(float, row))[-2:] for row in logits]
    margins = tuple(first - second for second, first in best)
    memory = backend.model.memory
    backend.close()
    return Answered(Answer(tuple(tokens), margins), logits[0].tolist(), memory)


def main() -> None:
    """Write what the models answer."""
    options = map(EngineOptions.model_validate, msgspec.json.decode(sys.stdin.buffer.read()))
    sys.stdout.buffer.write(msgspec.json.encode([_answer(each) for each in options]))


if __name__ == "__main__":
    main()

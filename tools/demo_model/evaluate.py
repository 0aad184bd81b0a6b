"""Measures the demo model: `python -m tools.demo_model.evaluate [--model PATH] [--json]`.

Runs the file through llama.cpp on the CPU, greedily, on prompts that training never shows.
"""

import ctypes
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, Self

import inferencecenter.engine.llama  # noqa: F401 - by it the bindings find the libraries

# isort: split
import typer
from llama_cpp import llama_cpp
from rich.console import Console
from rich.table import Table

from inferencecenter.demo import demo_model_path
from tools.demo_model.cases import CONTEXT_TOKENS, Case, cases
from tools.demo_model.chatml import Message, render

SEED = 1
MINIMUM_SHARE = 0.95
SHIPPED_WITH = ("counting", "capitals", "recall at 256 tokens", "recall at 512 tokens",
                "recall at 1024 tokens")  # fmt: skip


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _silent(_level: int, _text: bytes, _data: ctypes.c_void_p) -> None:
    """Drops llama.cpp's log lines."""


class GreedyModel:
    """A model file on the CPU that answers with the likeliest token each time."""

    def __init__(self, path: Path, *, threads: int) -> None:
        llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
        if not self._model:
            raise ValueError(f"{path} is not a model file llama.cpp can load")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = CONTEXT_TOKENS
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._size = llama_cpp.llama_vocab_n_tokens(self._vocabulary)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)

    def tokens(self, text: str) -> list[int]:
        """Returns the token ids of `text`, ChatML marks as their special tokens."""
        raw = text.encode()
        buffer = (llama_cpp.llama_token * (len(raw) + 8))()
        count = llama_cpp.llama_tokenize(self._vocabulary, raw, len(raw), buffer, len(buffer), False, True)
        return list(buffer[:count])

    def text(self, tokens: Sequence[int]) -> str:
        """Returns the text of token ids, special tokens left out."""
        buffer = ctypes.create_string_buffer(256)
        pieces = []
        for token in tokens:
            size = llama_cpp.llama_token_to_piece(self._vocabulary, token, buffer, len(buffer), 0, False)
            pieces.append(buffer.raw[:size])
        return b"".join(pieces).decode(errors="replace")

    def message_tokens(self, message: Message) -> int:
        """Returns the tokens a message takes, its ChatML frame included."""
        return len(self.tokens(render((message,))))

    def answer(self, messages: Sequence[Message]) -> str:
        """Returns the answer to `messages`, cut where the context of 1,024 tokens is full."""
        prompt = self.tokens(render(messages, add_generation_prompt=True))
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        written: list[int] = []
        pending = prompt
        while len(prompt) + len(written) < CONTEXT_TOKENS:
            token = self._likeliest_after(pending)
            if llama_cpp.llama_vocab_is_eog(self._vocabulary, token):
                break
            written.append(token)
            pending = [token]
        return self.text(written)

    def _likeliest_after(self, tokens: Sequence[int]) -> int:
        buffer = (llama_cpp.llama_token * len(tokens))(*tokens)
        batch = llama_cpp.llama_batch_get_one(buffer, len(tokens))
        if llama_cpp.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama.cpp could not decode the batch")
        logits = llama_cpp.llama_get_logits_ith(self._context, -1)[: self._size]
        return max(range(self._size), key=logits.__getitem__)


@dataclass
class Score:
    """How many cases of a skill passed."""

    passed: int = 0
    total: int = 0

    @property
    def share(self) -> float:
        """The share that passed, 0 to 1."""
        return self.passed / self.total


def passes(model: GreedyModel, case: Case, failures: Console | None = None) -> bool:
    """Returns whether all questions of `case` are answered right; shows those that are not."""
    for question in case.questions:
        answer = model.answer(question.messages)
        if not question.judge(answer):
            if failures:
                question_text = question.messages[-1].content
                failures.print(f"{case.skill}: {question_text!r} -> {answer!r}", markup=False)
            return False
    return True


def evaluate(model: GreedyModel, amount: int, failures: Console | None = None, seed: int = SEED) -> dict[str, Score]:
    """Returns the score of each skill over `amount` unseen cases."""
    scores: dict[str, Score] = {}
    for case in cases(seed, amount, model.message_tokens):
        score = scores.setdefault(case.skill, Score())
        score.passed += passes(model, case, failures)
        score.total += 1
    return scores


def meets_criteria(scores: dict[str, Score]) -> bool:
    """Returns whether the skills the file ships with reach 95 % each."""
    return all(scores[skill].share >= MINIMUM_SHARE for skill in SHIPPED_WITH)


def main(
    *,
    model: Annotated[Path | None, typer.Option(help="Model file [the bundled one].")] = None,
    amount: Annotated[int, typer.Option(help="Cases of each skill.")] = 100,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not a table.")] = False,
    show_failures: Annotated[bool, typer.Option(help="Show wrong answers on stderr.")] = False,
) -> None:
    """Measures the demo model on unseen prompts; exits with 1 if it should not ship."""
    failures = Console(stderr=True) if show_failures else None
    with GreedyModel(model or demo_model_path(), threads=threads) as loaded:
        scores = evaluate(loaded, amount, failures)
    if as_json:
        typer.echo(json.dumps({k: [s.passed, s.total] for k, s in scores.items()}, indent=2))
    else:
        table = Table("skill", "passed", "of", "share")
        for skill, score in scores.items():
            table.add_row(skill, str(score.passed), str(score.total), f"{score.share:.0%}")
        Console().print(table)
    if not meets_criteria(scores):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

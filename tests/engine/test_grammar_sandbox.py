"""Grammars that take too much end a process in which nothing can come of it."""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING

import pytest

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.engine.grammar_sandbox import GrammarSandbox
from inferencecenter.engine.sampling.constraint import VocabularyNames
from inferencecenter.engine.tokenization import JobCancelledError
from inferencecenter.ipc.messages import Grammar

if TYPE_CHECKING:
    from collections.abc import Iterator

NAMES = VocabularyNames(1000, {0: "<unknown>", 900: "<tool_call>", 901: "<|im_end|>"}, (901,))
MARKERS = {"<tool_call>": 900}
SLOW = Grammar("json_schema", json.dumps({"type": "integer", "multipleOf": 999_983}))
DEEP = Grammar("lark", "start: r0\n" + "\n".join(f"r{n}: r{n + 1}" for n in range(15_000)) + '\nr15000: "a"\n')
PLAIN = Grammar("regex", "a+")


@pytest.fixture(scope="module")
def trial() -> Iterator[GrammarSandbox]:
    """A trial with a process that has started, and more patience than any machine needs."""
    trial = GrammarSandbox(timeout_s=60.0)
    trial.run(NAMES, PLAIN, MARKERS)
    yield trial
    trial.close()


def pid_of(trial: GrammarSandbox) -> int:
    """Return the number of the other process."""
    assert trial._process is not None
    return trial._process.pid


@pytest.mark.parametrize(
    "grammar",
    [
        PLAIN,
        Grammar("lark", 'start: "\U0001f600é" <[<tool_call>]> <|im_end|> <[0,999]>\n'),
        Grammar("json_schema", '{"type": "object"}'),
        Grammar("gbnf", 'root ::= "a"', "start: <[<tool_call>]> answer\n"),
    ],
)
def test_an_ordinary_grammar_passes(trial: GrammarSandbox, grammar: Grammar) -> None:
    """Whatever it names of the model's vocabulary; the same process takes the next one."""
    before = pid_of(trial)
    assert trial.run(NAMES, grammar, MARKERS) < 32 * 2**20
    assert pid_of(trial) == before


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (Grammar("regex", "(a"), "unclosed group"),
        (Grammar("json_schema", "{"), "not valid JSON"),
        (Grammar("lark", "start: <|im_start|>"), "unknown special token"),
        (Grammar("lark", "start: <[1000]>"), "1000"),
    ],
)
def test_grammar_error_keeps_the_process(trial: GrammarSandbox, grammar: Grammar, said: str) -> None:
    """The engine is spared what the trial could not compile to its end."""
    before = pid_of(trial)
    with pytest.raises(InferenceCenterError, match=re.escape(said)):
        trial.run(NAMES, grammar, MARKERS)
    assert pid_of(trial) == before


@pytest.mark.parametrize(
    ("grammar", "timeout_s", "said"),
    [
        (SLOW, 1.0, "more than 1 s"),
        (DEEP, 60.0, "too large, or nested too deeply"),
        (Grammar("lark", f"start: <|im_end|> | <[<tool_call>]> | %json {SLOW.text}"), 1.0, "more than 1 s"),
    ],
)
def test_crashed_sandbox_is_replaced(
    trial: GrammarSandbox, monkeypatch: pytest.MonkeyPatch, grammar: Grammar, timeout_s: float, said: str
) -> None:
    """The grammar is refused, and the next one is tried as if nothing had been."""
    trial.run(NAMES, PLAIN, MARKERS)
    before = pid_of(trial)
    with monkeypatch.context() as changed:
        changed.setattr(trial, "_timeout_s", timeout_s)
        with pytest.raises(InferenceCenterError, match=said) as refused:
            trial.run(NAMES, grammar, MARKERS)
    assert refused.value.code is ErrorCode.INVALID_GRAMMAR
    with pytest.raises(ProcessLookupError):
        os.kill(before, 0)
    trial.run(NAMES, PLAIN, MARKERS)


def test_a_large_grammar_says_what_it_takes_and_has_the_process_to_itself(trial: GrammarSandbox) -> None:
    """Memory that it leaves behind would not be counted with the next one."""
    many = {f"field_{n}": {"type": "string", "maxLength": n} for n in range(1500)}
    large = Grammar("json_schema", json.dumps({"type": "object", "properties": many, "required": list(many)}))
    assert trial.run(NAMES, large, MARKERS) > 2**20


def test_cancelled_compilation_is_stopped(trial: GrammarSandbox) -> None:
    """The process that compiles it is ended; an interrupt that means another grammar changes nothing."""
    trial.run(NAMES, PLAIN, MARKERS)
    before = pid_of(trial)
    asked: list[bool] = []

    def wanted() -> bool:
        asked.append(len(asked) < 2)
        if len(asked) < 3:
            trial.interrupt()
        return asked[-1]

    with pytest.raises(JobCancelledError):
        trial.run(NAMES, SLOW, MARKERS, wanted=wanted)
    assert asked == [True, True, False]
    with pytest.raises(ProcessLookupError):
        os.kill(before, 0)
    assert trial.run(NAMES, PLAIN, MARKERS) >= 0


def test_killed_sandbox_is_replaced(trial: GrammarSandbox) -> None:
    """The OOM killer may take it; no client notices."""
    trial.run(NAMES, PLAIN, MARKERS)
    os.kill(pid_of(trial), 9)
    assert trial._process is not None
    trial._process.wait()
    trial.run(NAMES, PLAIN, MARKERS)


def test_without_a_process_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is no fault of the grammar."""
    monkeypatch.setattr("inferencecenter.engine.grammar_sandbox.sys.executable", "/bin/false")
    with pytest.raises(InferenceCenterError) as failed:
        GrammarSandbox().run(NAMES, PLAIN, {})
    assert failed.value.code is ErrorCode.INTERNAL

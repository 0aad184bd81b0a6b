"""Grammars that need too much end only the sandbox's process."""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING

import pytest

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.engine.fair_workers import JobCancelledError
from inferencecenter.engine.grammar_sandbox import GrammarSandbox
from inferencecenter.engine.sampling.constraint import VocabularyNames
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
    """A sandbox with a started process and a very long timeout."""
    trial = GrammarSandbox(timeout_s=60.0)
    trial.run(NAMES, PLAIN, MARKERS)
    yield trial
    trial.close()


def pid_of(trial: GrammarSandbox) -> int:
    """Return the pid of the sandbox's process."""
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
def test_ordinary_grammar_passes(trial: GrammarSandbox, grammar: Grammar) -> None:
    """It may name any control token; the same process takes the next one."""
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
    """The engine does not compile what the sandbox could not."""
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
    """The grammar is refused, and the next one runs in a new process."""
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


def test_large_grammar_reports_its_memory_and_ends_its_process(trial: GrammarSandbox) -> None:
    """Memory it leaves behind would not be counted for the next one."""
    many = {f"field_{n}": {"type": "string", "maxLength": n} for n in range(1500)}
    large = Grammar("json_schema", json.dumps({"type": "object", "properties": many, "required": list(many)}))
    assert trial.run(NAMES, large, MARKERS) > 2**20


def test_cancelled_compilation_is_stopped(trial: GrammarSandbox) -> None:
    """Its process is killed; a cancellation of another grammar changes nothing."""
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


def test_cancelled_compilation_that_ends_keeps_the_process(
    trial: GrammarSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that aborts many turns with grammars does not have a process started for each."""
    trial.run(NAMES, PLAIN, MARKERS)
    before = pid_of(trial)
    monkeypatch.setattr(trial, "_grace_s", 60.0)
    for _ in range(3):
        with pytest.raises(JobCancelledError):
            trial.run(NAMES, PLAIN, MARKERS, wanted=lambda: False)
    assert trial.run(NAMES, PLAIN, MARKERS) >= 0
    assert pid_of(trial) == before


def test_killed_sandbox_is_replaced(trial: GrammarSandbox) -> None:
    """The OOM killer may kill it; clients do not notice."""
    trial.run(NAMES, PLAIN, MARKERS)
    os.kill(pid_of(trial), 9)
    assert trial._process is not None
    trial._process.wait()
    trial.run(NAMES, PLAIN, MARKERS)


def test_without_a_process_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The grammar is not to blame."""
    monkeypatch.setattr("inferencecenter.engine.grammar_sandbox.sys.executable", "/bin/false")
    with pytest.raises(InferenceCenterError) as failed:
        GrammarSandbox().run(NAMES, PLAIN, {})
    assert failed.value.code is ErrorCode.INTERNAL

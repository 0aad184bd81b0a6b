"""Grammars that take too much end a process in which nothing can come of it."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from inferencecenter.engine.trial import Trial
from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.messages import Grammar

if TYPE_CHECKING:
    from collections.abc import Iterator

SLOW = Grammar("json_schema", json.dumps({"type": "integer", "multipleOf": 999_983}))
DEEP = Grammar("lark", "start: r0\n" + "\n".join(f"r{n}: r{n + 1}" for n in range(15_000)) + '\nr15000: "a"\n')
PLAIN = Grammar("regex", "a+")


@pytest.fixture(scope="module")
def trial() -> Iterator[Trial]:
    """A trial with a process that has started, and not much patience."""
    trial = Trial(timeout_s=1.0)
    trial.run(PLAIN)
    yield trial
    trial.close()


def pid_of(trial: Trial) -> int:
    """Return the number of the other process."""
    assert trial._process is not None
    return trial._process.pid


@pytest.mark.parametrize(
    "grammar", [PLAIN, Grammar("regex", "(a"), Grammar("json_schema", "{"), Grammar("lark", 'start: "\ud83d\ude00é"\n')]
)
def test_an_ordinary_grammar_passes_also_if_it_is_wrong(trial: Trial, grammar: Grammar) -> None:
    """What is wrong with it is for the engine to say; the same process takes the next one."""
    before = pid_of(trial)
    assert trial.run(grammar) < 32 * 2**20
    assert pid_of(trial) == before


@pytest.mark.parametrize(("grammar", "said"), [(SLOW, "more than 1 s"), (DEEP, "too large, or nested too deeply")])
def test_what_a_grammar_ends_is_replaced(trial: Trial, grammar: Grammar, said: str) -> None:
    """The grammar is refused, and the next one is tried as if nothing had been."""
    trial.run(PLAIN)
    before = pid_of(trial)
    with pytest.raises(InferenceCenterError, match=said) as refused:
        trial.run(grammar)
    assert refused.value.code is ErrorCode.INVALID_GRAMMAR
    with pytest.raises(ProcessLookupError):
        os.kill(before, 0)
    trial.run(PLAIN)


def test_a_large_grammar_says_what_it_takes_and_has_the_process_to_itself(trial: Trial) -> None:
    """Memory that it leaves behind would not be counted with the next one."""
    many = {f"field_{n}": {"type": "string", "maxLength": n} for n in range(1500)}
    large = Grammar("json_schema", json.dumps({"type": "object", "properties": many, "required": list(many)}))
    assert trial.run(large) > 2**20


def test_a_process_that_was_ended_by_somebody_else_is_replaced(trial: Trial) -> None:
    """The kernel may take it when memory is short: nobody hears of it."""
    trial.run(PLAIN)
    os.kill(pid_of(trial), 9)
    assert trial._process is not None
    trial._process.wait()
    trial.run(PLAIN)


def test_without_a_process_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is no fault of the grammar."""
    monkeypatch.setattr("inferencecenter.engine.trial.sys.executable", "/bin/false")
    with pytest.raises(InferenceCenterError) as failed:
        Trial().run(PLAIN)
    assert failed.value.code is ErrorCode.INTERNAL

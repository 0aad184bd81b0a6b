"""The grammar cache of an engine: each grammar is compiled once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.engine import grammar_cache as module
from inferencecenter.engine.echo import MESSAGE_END, MESSAGE_START, EchoBackend
from inferencecenter.engine.grammar_cache import GrammarCache
from inferencecenter.engine.grammar_sandbox import GrammarSandbox
from inferencecenter.ipc.engine_options import EngineOptions
from inferencecenter.ipc.messages import Grammar
from tests.engine.forms import constraint_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from inferencecenter.engine.sampling.constraint import VocabularyNames

MIB = 2**20
WORD = Grammar("regex", "[a-z]+")


class Trials(GrammarSandbox):
    """A sandbox that only records calls; it returns ``size_bytes`` or raises ``refusal``."""

    def __init__(self) -> None:
        super().__init__()
        self.tried: list[str] = []
        self.size_bytes = 0
        self.refusal: InferenceCenterError | None = None
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def start(self, _names: VocabularyNames) -> None:
        """Start nothing."""

    def run(
        self,
        _names: VocabularyNames,
        grammar: Grammar,
        _markers: Mapping[str, int],
        *,
        wanted: Callable[[], bool] = lambda: True,
    ) -> int:
        """Record the call, and wait until the test continues it."""
        self.tried.append(grammar.text)
        assert self.may_go_on.wait(60)
        if self.refusal is not None:
            raise self.refusal
        return self.size_bytes


@pytest.fixture
def trials() -> Trials:
    """The recorded compilations."""
    return Trials()


@pytest.fixture
def grammars(trials: Trials) -> GrammarCache:
    """The grammars of an echo backend."""
    return GrammarCache(EchoBackend(EngineOptions(backend="echo", parent_pid=0)), sandbox=trials)


def test_grammar_is_compiled_once_for_independent_turns(grammars: GrammarCache, trials: Trials) -> None:
    """Turns do not share state; a resumed one begins after its answer."""
    assert grammars.find(WORD) is None
    first = constraint_of(grammars, WORD)
    assert grammars.find(WORD) is not None
    second = constraint_of(grammars, WORD, answer=[ord("a")])
    first.accept(ord("x"))
    assert second.allowed(258)[MESSAGE_END]
    assert not constraint_of(grammars, WORD).allowed(258)[MESSAGE_END]
    assert trials.tried == ["[a-z]+"]


def test_grammar_errors_are_cached(grammars: GrammarCache, trials: Trials) -> None:
    """A repeated request gets the same error without another compilation."""
    wrong = Grammar("regex", "(a")
    said = set()
    for _ in range(2):
        with pytest.raises(InferenceCenterError) as refused:
            constraint_of(grammars, wrong)
        said.add((refused.value.code, refused.value.message))
    assert len(said) == 1
    assert trials.tried == ["(a"]


@pytest.mark.parametrize(("code", "tried"), [(ErrorCode.INVALID_GRAMMAR, 1), (ErrorCode.INTERNAL, 2)])
def test_grammar_that_crashes_the_sandbox_is_not_compiled(
    grammars: GrammarCache, trials: Trials, code: ErrorCode, tried: int
) -> None:
    """It is not retried; if the sandbox itself failed, it is."""
    trials.refusal = InferenceCenterError(code, "planned")
    for _ in range(2):
        with pytest.raises(InferenceCenterError, match="planned"):
            constraint_of(grammars, WORD)
    assert len(trials.tried) == tried


def test_concurrent_requests_compile_once(grammars: GrammarCache, trials: Trials) -> None:
    """The second waits for the first."""
    trials.may_go_on.clear()
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(constraint_of, grammars, WORD) for _ in range(2)]
        trials.may_go_on.set()
        assert all(each.result(20).fits([ord("a"), MESSAGE_END]) for each in both)
    assert len(trials.tried) == 1


def test_grammars_are_evicted_by_size(grammars: GrammarCache, trials: Trials) -> None:
    """The most recently used ones stay."""
    trials.size_bytes = 60 * MIB
    texts = ["a", "b", "c", "d", "e"]
    for text in ["a", "b", "c", "d", "a", "e"]:
        constraint_of(grammars, Grammar("regex", text))
    assert [grammars.find(Grammar("regex", text)) is not None for text in texts] == [True, False, True, True, True]


def test_large_grammar_is_cached_only_while_in_use(grammars: GrammarCache, trials: Trials) -> None:
    """Concurrent turns share it; after the last of them it is compiled again."""
    constraint_of(grammars, WORD)
    trials.size_bytes = 300 * MIB
    large = Grammar("regex", "large")
    first = constraint_of(grammars, large)
    second = constraint_of(grammars, large)
    del first
    assert grammars.find(large) is not None
    assert grammars.find(WORD) is not None
    assert trials.tried == [WORD.text, "large"]
    del second
    assert grammars.find(large) is None
    assert len(grammars) == 1


def test_large_grammar_that_reached_a_limit_is_recompiled(grammars: GrammarCache, trials: Trials) -> None:
    """A small one is recompiled, too."""
    trials.size_bytes = 300 * MIB
    held = constraint_of(grammars, WORD)
    with pytest.raises(InferenceCenterError):
        held.accept(ord("7"))
    assert grammars.find(WORD) is None


def test_client_evicts_only_its_own_grammars(grammars: GrammarCache, trials: Trials) -> None:
    """Another client's grammars stay, however old, until it has more than this client."""
    trials.size_bytes = 50 * MIB
    grammars.compile(Grammar("regex", "mine"), client_id="modest")
    for number in range(20):
        grammars.compile(Grammar("regex", f"a{number}"), client_id="greedy")
    assert grammars.find(Grammar("regex", "mine")) is not None
    assert grammars.find(Grammar("regex", "a19")) is not None
    assert len(grammars) == 5


def test_number_of_cached_grammars_is_bounded(grammars: GrammarCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound applies to small grammars, too."""
    monkeypatch.setattr(module, "_MAX_GRAMMARS", 3)
    for number in range(5):
        constraint_of(grammars, Grammar("regex", f"a{number}"))
    assert len(grammars) == 3


def test_grammar_that_reached_a_limit_is_recompiled(grammars: GrammarCache, trials: Trials) -> None:
    """Its turns share its lexer states, so the next one would begin at the limit."""
    held = constraint_of(grammars, WORD)
    with pytest.raises(InferenceCenterError):
        held.accept(ord("7"))
    assert grammars.find(WORD) is None
    constraint_of(grammars, WORD)
    assert len(trials.tried) == 2


def test_lark_names_the_control_tokens_of_its_turn(grammars: GrammarCache) -> None:
    """The same text with other markers is another grammar."""
    named = Grammar("lark", 'start: <[<|im_start|>]> "a"')
    held = constraint_of(grammars, named, ("<|im_start|>", "<no token>"))
    assert list(np.flatnonzero(held.allowed(258))) == [MESSAGE_START]
    with pytest.raises(InferenceCenterError, match="lexer error"):
        constraint_of(grammars, named)


def test_frame_marks_gbnf_prefix(grammars: GrammarCache) -> None:
    """It names the control tokens of its turn; the same text in another frame, or in none, is another grammar."""
    text = 'root ::= "<[<|im_start|>]>"'
    framed = Grammar("gbnf", text, "start: <[<|im_start|>]> /x*/ answer\n")
    held = constraint_of(grammars, framed, ("<|im_start|>",))
    assert list(np.flatnonzero(held.allowed(258))) == [MESSAGE_START]
    held.accept(MESSAGE_START)
    assert list(np.flatnonzero(held.allowed(258))) == [ord("<"), ord("x")]
    assert list(np.flatnonzero(constraint_of(grammars, Grammar("gbnf", text)).allowed(258))) == [ord("<")]
    other = constraint_of(grammars, Grammar("gbnf", text, 'start: "y" answer\n'))
    assert list(np.flatnonzero(other.allowed(258))) == [ord("y")]


def test_grammar_without_an_end_is_refused() -> None:
    """A model without an end token cannot complete an answer."""

    class Endless(EchoBackend):
        def is_end(self, token: int) -> bool:
            return False

    grammars = GrammarCache(Endless(EngineOptions(backend="echo", parent_pid=0)), sandbox=Trials())
    with pytest.raises(InferenceCenterError, match="no end token"):
        constraint_of(grammars, WORD)

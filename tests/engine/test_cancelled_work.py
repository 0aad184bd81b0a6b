"""Aborted turns and cancelled lookups leave no work behind, and delay others little."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import msgspec
import pytest

from inferencecenter.engine import tokenization
from inferencecenter.engine.fair_workers import JobCancelledError
from inferencecenter.engine.grammar_cache import GrammarCache
from inferencecenter.engine.grammar_sandbox import GrammarSandbox
from inferencecenter.engine.scheduler.placement import Match
from inferencecenter.ipc.messages import (
    AbortTurn,
    CancelLookup,
    DetokenizeRequest,
    Failed,
    Finished,
    Grammar,
    LookupFailed,
    PromptSegment,
    Tokenized,
    TokenizeRequest,
    pack_tokens,
)
from tests.engine.harness import TIMEOUT_S, Engine, submit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from inferencecenter.engine.sampling.constraint import VocabularyNames
    from inferencecenter.ipc.messages import Submit

MANY = 500
SLOW = Grammar("json_schema", '{"type": "integer", "multipleOf": 999983}')


@pytest.fixture
def engine() -> Iterator[Engine]:
    """An engine with one worker, which tokenizes the text ``slow`` when the test allows."""
    engine = Engine(worker_threads=1)
    engine.backend.tokenizing["slow"] = threading.Event()
    yield engine
    engine.stop()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The grammars in the order of their compilation, which uses no other process here."""
    texts: list[str] = []

    def run(
        _sandbox: GrammarSandbox,
        _names: VocabularyNames,
        grammar: Grammar,
        _markers: Mapping[str, int],
        **_wanted: object,
    ) -> int:
        texts.append(grammar.text)
        return 0

    monkeypatch.setattr(GrammarSandbox, "start", lambda _sandbox, _names: None)
    monkeypatch.setattr(GrammarSandbox, "run", run)
    return texts


def formed(turn_id: str, text: str, grammar: Grammar, *, client: str) -> Submit:
    """Return a client's turn with the answer ``text`` and a grammar."""
    return msgspec.structs.replace(submit(turn_id, text, client=client), grammar=grammar)


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait until a condition of another thread holds."""
    ticks = threading.Event()
    for _ in range(TIMEOUT_S * 100):
        if holds():
            return
        ticks.wait(0.01)
    raise AssertionError("it never held")


def test_aborted_turns_leave_no_work_behind(engine: Engine, compiled: list[str]) -> None:
    """500 turns with large texts and grammars are aborted while a worker is busy: nothing is queued or kept."""
    loop = engine.loop
    engine.front.send(submit("slow", "slow", client="busy"))
    grammar = Grammar("regex", "never")
    for number in range(MANY):
        engine.front.send(submit(f"t{number}", "x" * 100_000), AbortTurn(f"t{number}"))
    engine.front.wait_for(*(f"t{number}" for number in range(MANY)))
    assert len(loop._workers) == 0
    (busy,) = loop._tokenization._pending.values()
    assert loop._tokenization._room.total == busy.size_bytes < 1000
    engine.backend.tokenizing["slow"].set()
    assert engine.front.finished("slow").reason == "stop"
    assert loop._tokenization._room.total == 0
    assert grammar.text not in compiled


def test_aborted_turns_leave_no_grammar_to_compile(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The running compilation is cancelled, queued ones never run, and the next client's does."""
    tried: list[str] = []
    entered, interrupted = threading.Event(), threading.Event()
    run, interrupt = GrammarSandbox.run, GrammarSandbox.interrupt

    def noted(
        trial: GrammarSandbox, names: VocabularyNames, grammar: Grammar, markers: Mapping[str, int], **rest: object
    ) -> int:
        tried.append(grammar.text)
        entered.set()
        return run(trial, names, grammar, markers, **rest)  # type: ignore[arg-type]

    def heard(trial: GrammarSandbox) -> None:
        interrupt(trial)
        interrupted.set()

    monkeypatch.setattr(GrammarSandbox, "run", noted)
    monkeypatch.setattr(GrammarSandbox, "interrupt", heard)
    monkeypatch.setattr(engine.loop._grammars._sandbox, "_timeout_s", 10.0 * TIMEOUT_S)
    engine.front.send(formed("t", "1", SLOW, client="a"))
    assert entered.wait(TIMEOUT_S)
    rest = [f"t{number}" for number in range(MANY)]
    engine.front.send(*(formed(name, "1", Grammar("regex", name), client="a") for name in rest))
    engine.front.send(*map(AbortTurn, [*rest, "t"]))
    engine.front.wait_for("t", *rest)
    engine.front.send(formed("other", "ab", Grammar("regex", "ab"), client="b"))
    assert engine.front.finished("other").reason == "stop"
    assert interrupted.is_set()
    assert tried == [SLOW.text, "ab"]


def test_aborted_resumed_turn_compiles_no_grammar(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end contains the earlier answer, and does not wait for the compilation."""
    entered = threading.Event()

    def never(*_: object, wanted: Callable[[], bool], **__: object) -> object:
        entered.set()
        wait_until(lambda: not wanted())
        raise JobCancelledError

    monkeypatch.setattr(GrammarCache, "_compile", never)
    turn = msgspec.structs.replace(formed("t", "abcd", SLOW, client="a"), answer=pack_tokens([*b"ab"]), shown_chars=1)
    engine.front.send(turn)
    assert entered.wait(TIMEOUT_S)
    engine.front.send(AbortTurn("t"))
    end = engine.front.finished("t")
    assert (end.reason, end.generated_tokens, engine.front.text("t")) == ("aborted", 2, "b")


def test_other_client_waits_for_at_most_one_grammar(
    engine: Engine, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients alternate at the compiler, which is one thread."""
    compile_, entered, open_ = GrammarCache._compile, threading.Event(), threading.Event()

    def held(*args: object, **rest: object) -> object:
        entered.set()
        assert open_.wait(TIMEOUT_S)
        return compile_(*args, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(GrammarCache, "_compile", held)
    engine.tell(*(formed(f"t{number}", "a", Grammar("regex", f"a|{number}"), client="a") for number in range(20)))
    assert entered.wait(TIMEOUT_S)
    engine.tell(formed("other", "b", Grammar("regex", "b"), client="b"))
    wait_until(lambda: len(engine.loop._tokenization._compilations) == 20)
    open_.set()
    engine.front.wait_for("other", *(f"t{number}" for number in range(20)))
    assert compiled.index("b") <= 2


def test_other_client_waits_for_at_most_one_text(engine: Engine) -> None:
    """Clients alternate at the workers, with turns and lookups alike."""
    order: list[str] = []
    tokenize = engine.backend.tokenize

    def noted(pieces: Sequence[PromptSegment], *, first: bool, after: Sequence[int] = ()) -> list[int]:
        order.append(pieces[-1].text if len(pieces) == 1 else pieces[1].text)
        return tokenize(pieces, first=first, after=after)

    engine.backend.tokenize = noted  # type: ignore[method-assign]
    engine.tell(submit("slow", "slow", client="busy"))
    engine.tell(*(submit(f"t{number}", f"text {number}", client="a") for number in range(20)))
    engine.tell(submit("other", "other", client="b"), TokenizeRequest(1, (PromptSegment("asked"),), True, "c"))
    wait_until(lambda: len(engine.loop._workers) == 22)
    engine.backend.tokenizing["slow"].set()
    engine.front.wait_for("other", *(f"t{number}" for number in range(20)))
    assert order[:4] == ["slow", "text 0", "other", "asked"]


@pytest.mark.slow
def test_only_the_client_that_fills_the_text_budget_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is ``queue_full``; turns accepted before stay, and a turn that leaves makes room."""
    monkeypatch.setattr(tokenization, "ROOM_BYTES", 10_000)
    engine = Engine(worker_threads=1)
    engine.backend.tokenizing["slow"] = threading.Event()
    large = "x" * 4_000
    engine.front.send(submit("slow", "slow", client="a"))
    engine.front.send(*(submit(name, large, client="a") for name in ("one", "two", "three")))
    kept = msgspec.structs.replace(submit("kept", large, client="a"), accepted=True)
    engine.front.send(submit("other", large, client="b"), kept)
    engine.front.wait_for("three")
    (failure,) = engine.front.events["three"]
    assert isinstance(failure, Failed)
    assert failure.code == "queue_full"
    engine.front.send(AbortTurn("one"), AbortTurn("two"))
    engine.front.wait_for("one", "two")
    engine.front.send(submit("four", "x", client="a"))
    engine.backend.tokenizing["slow"].set()
    engine.front.wait_for("slow", "other", "kept", "four")
    ends = [engine.front.events[name][-1] for name in ("slow", "other", "kept", "four")]
    engine.stop()
    assert [end.reason for end in ends if isinstance(end, Finished)] == ["stop"] * 4


def test_cancelled_lookup_is_not_answered(engine: Engine) -> None:
    """It may be queued or running; cancelling an unknown one has no effect."""
    engine.tell(
        TokenizeRequest(1, (PromptSegment(""), PromptSegment("slow")), True, "a"),
        TokenizeRequest(2, (PromptSegment("x"),), True, "a"),
    )
    engine.tell(DetokenizeRequest(3, pack_tokens([65]), "a"), TokenizeRequest(4, (PromptSegment("y"),), True, "a"))
    wait_until(lambda: len(engine.loop._workers) == 3)
    engine.tell(CancelLookup(1), CancelLookup(2), CancelLookup(3), CancelLookup(99))
    wait_until(lambda: len(engine.loop._tokenizer) == 1)
    engine.backend.tokenizing["slow"].set()
    engine.front.read_until(lambda: any(isinstance(frame, Tokenized) for frame in engine.front.frames))
    engine.front.send(submit("t", "hello"))
    engine.front.wait_for("t")
    answers = [frame for frame in engine.front.frames if isinstance(frame, Tokenized | LookupFailed)]
    assert [answer.lookup_id for answer in answers] == [4]


def test_aborted_turn_reads_nothing_from_disk(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its fetch is cancelled."""
    fetched, cancelled = list[str](), list[str]()
    waits = Match("parked", 256, 256, ready=False, tokens=b"")
    monkeypatch.setattr(engine.kv, "find", lambda _scope, _tokens: waits)
    monkeypatch.setattr(engine.kv, "fetch", lambda key, **_keep: fetched.append(key))
    monkeypatch.setattr(engine.kv, "cancel_fetch", cancelled.append)
    engine.front.send(submit("t", "hello " * 100))
    wait_until(lambda: fetched == ["parked"])
    engine.front.send(AbortTurn("t"))
    assert engine.front.finished("t").reason == "aborted"
    wait_until(lambda: cancelled == ["parked"])

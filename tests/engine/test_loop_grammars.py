"""Turns with grammars, and token lookups, through the engine's loop with the echo backend."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from inferencecenter.engine.grammar_cache import GrammarCache
from inferencecenter.engine.grammar_sandbox import GrammarSandbox
from inferencecenter.ipc.messages import (
    AbortTurn,
    Detokenized,
    DetokenizeRequest,
    Failed,
    Finished,
    Grammar,
    LookupFailed,
    PromptSegment,
    Submit,
    Tokenized,
    TokenizeRequest,
    TokensCounted,
    pack_tokens,
)
from tests.engine.harness import TIMEOUT_S, Engine, submit

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from inferencecenter.engine.sampling.constraint import VocabularyNames

SCHEMA = Grammar("json_schema", json.dumps({"type": "object", "additionalProperties": {"type": "integer"}}))


class Gate:
    """A sandbox that runs at once, or when the test allows."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Event()

    def run(self, _names: VocabularyNames, _grammar: Grammar, _markers: Mapping[str, int], **_wanted: object) -> int:
        """Wait for the test."""
        self.entered.set()
        assert self.open.wait(TIMEOUT_S)
        return 0


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """A gate in place of the sandbox's process."""
    gate = Gate()
    monkeypatch.setattr(GrammarSandbox, "start", lambda _sandbox, _names: None)
    monkeypatch.setattr(GrammarSandbox, "run", gate.run)
    return gate


@pytest.fixture
def engine(gate: Gate) -> Iterator[Engine]:
    """A running engine without offload."""
    engine = Engine()
    yield engine
    gate.open.set()
    engine.stop()


def formed(turn_id: str, text: str, grammar: Grammar = SCHEMA, **fields: Any) -> Submit:
    """Return a turn with the answer ``text`` and a grammar."""
    return msgspec.structs.replace(submit(turn_id, text), grammar=grammar, **fields)


def failure(engine: Engine, turn_id: str) -> Failed:
    """Return how a turn failed."""
    engine.front.wait_for(turn_id)
    last = engine.front.events[turn_id][-1]
    assert isinstance(last, Failed)
    return last


def test_output_follows_the_grammar(engine: Engine) -> None:
    """The echo backend can give one answer only; a grammar that excludes it is an error with the reason."""
    engine.front.send(formed("good", '{"a": 1}'), formed("bad", '{"a": "x"}'), submit("free", "hello"))
    assert engine.front.finished("good").reason == "stop"
    assert engine.front.text("good") == '{"a": 1}'
    assert failure(engine, "bad").code == "invalid_request"
    assert engine.front.finished("free").reason == "stop"


NEVER = '{"type": "integer", "minimum": 5, "maximum": 1}'


@pytest.mark.parametrize(
    ("turn", "code", "said"),
    [
        (formed("t", "x", Grammar("regex", "(a")), "invalid_grammar", "unclosed group"),
        (formed("t", "x", Grammar("json_schema", '{"not": {}}')), "invalid_grammar", "not"),
        (
            formed("t", "x", Grammar("lark", f"start: arguments_0_f\narguments_0_f: %json {NEVER}")),
            "invalid_grammar",
            "the schema of the tool f cannot be enforced: Unsatisfiable schema",
        ),
        (
            formed("t", "x", Grammar("lark", f"start: answer\nanswer: %json {NEVER}")),
            "invalid_grammar",
            "json_schema cannot be enforced: Unsatisfiable schema",
        ),
        (formed("t", "x", params_json=b'{"ignore_eos":true}'), "invalid_request", "ignore_eos cannot apply"),
        (formed("t", '{"a": 1}', answer=pack_tokens([*b"[1"])), "internal", ""),
    ],
)
def test_invalid_turn_fails_alone(engine: Engine, turn: Submit, code: str, said: str) -> None:
    """Its grammar, its parameters or its earlier answer affect no other turn."""
    engine.front.send(turn, submit("other", "hello"))
    failed = failure(engine, "t")
    assert failed.code == code
    assert said in failed.message
    assert engine.front.finished("other").reason == "stop"


def test_panic_during_preparation_fails_only_its_turn(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A panic is no ``Exception``, and the turn still gets its end."""

    class PanicError(BaseException):
        """As llguidance's binding raises it."""

    def panic(*_: object) -> None:
        raise PanicError("unwrap on None")

    monkeypatch.setattr(GrammarCache, "constraint", panic)
    engine.front.send(formed("t", "1"), submit("other", "hello"))
    assert failure(engine, "t").code == "internal"
    assert engine.front.finished("other").reason == "stop"


def test_resumed_turn_follows_its_grammar(engine: Engine) -> None:
    """The partial answer is consumed, and the rest follows; a complete answer gets its end."""
    answer = '{"a": 1}'
    engine.front.send(formed("begun", answer, answer=pack_tokens([*answer.encode()[:4]]), shown_chars=4))
    assert engine.front.finished("begun").generated_tokens == len(answer) + 1
    assert engine.front.text("begun") == answer[4:]
    engine.front.send(formed("over", answer, answer=pack_tokens([*answer.encode(), 257]), shown_chars=8))
    assert engine.front.finished("over").reason == "stop"


def test_slow_grammar_does_not_delay_other_turns(engine: Engine, gate: Gate) -> None:
    """Turns without a grammar or with a cached one run; the slow one ends at once when aborted."""
    engine.front.send(formed("first", '{"a": 1}'))
    engine.front.wait_for("first")
    gate.open.clear()
    gate.entered.clear()
    engine.front.send(formed("slow", "ab", Grammar("regex", "ab")), formed("gone", "ab", Grammar("regex", "ab?")))
    assert gate.entered.wait(TIMEOUT_S)
    engine.front.send(formed("known", '{"b": 2}'), submit("free", "hello"), AbortTurn("gone"))
    engine.front.wait_for("known", "free", "gone")
    assert engine.front.finished("gone").reason == "aborted"
    assert not engine.front.ended("slow")
    gate.open.set()
    assert engine.front.finished("slow").reason == "stop"


def test_preempted_turns_keep_their_grammars(gate: Gate, tmp_path: Any) -> None:
    """Preempted repeatedly, each answer is unchanged."""
    engine = Engine(tmp_path, slots=1, quantum_tokens=5)
    try:
        answers = {f"t{n}": json.dumps({f"key_{n}_{m}": n * m for m in range(4)}) for n in range(4)}
        engine.front.send(*(formed(turn_id, answer) for turn_id, answer in answers.items()))
        engine.front.wait_for(*answers)
        assert {turn_id: engine.front.text(turn_id) for turn_id in answers} == answers
        assert sum(engine.front.finished(turn_id).preempted for turn_id in answers) > 4
    finally:
        engine.stop()


def test_generated_marker_is_text(engine: Engine) -> None:
    """It counts as emitted text and stays in the history; a token that is no marker emits nothing."""
    said = pack_tokens([*b"ab", 256, *b"cd"])
    for turn_id, markers, text in (("shown", ("<|im_start|>",), "ab<|im_start|>cd"), ("hidden", (), "abcd")):
        engine.front.send(msgspec.structs.replace(submit(turn_id, "abcde", answer=said), markers=markers))
        end = engine.front.finished(turn_id)
        shown = engine.front.text(turn_id)
        assert shown.startswith(text)
        assert (end.kept_chars, end.kept_tokens) == (len(shown), end.generated_tokens)


def test_end_token_named_as_a_marker_still_ends_the_turn(engine: Engine) -> None:
    """An end token emits no text."""
    engine.front.send(msgspec.structs.replace(submit("t", "ab"), markers=("<|im_end|>",)))
    assert isinstance(engine.front.finished("t"), Finished)
    assert engine.front.text("t") == "ab"


def test_lookups_are_answered(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has one answer; one that fails gets an error, and the loop continues."""
    pieces = (PromptSegment("<|im_start|>", True), PromptSegment("é<|im_end|>"))
    engine.front.send(
        TokenizeRequest(1, pieces, True),
        DetokenizeRequest(2, pack_tokens([256, 0xC3, 0xA9])),
        DetokenizeRequest(3, pack_tokens([65, 300])),
        DetokenizeRequest(4, pack_tokens([-1])),
        TokenizeRequest(5, (PromptSegment("x"), PromptSegment("unspeakable")), False),
        DetokenizeRequest(6, pack_tokens([0xFF])),
        TokenizeRequest(7, pieces, True, count_only=True),
    )
    kinds = (Tokenized, TokensCounted, Detokenized, LookupFailed)
    engine.front.read_until(lambda: sum(isinstance(frame, kinds) for frame in engine.front.frames) == 7)
    answers = {frame.lookup_id: frame for frame in engine.front.frames if isinstance(frame, kinds)}
    spelled = (b"<|im_start|>", b"\xc3", b"\xa9", *(bytes((byte,)) for byte in b"<|im_end|>"))
    assert answers[1] == Tokenized(1, pack_tokens([256, 0xC3, 0xA9, *b"<|im_end|>"]), spelled)
    assert answers[2] == Detokenized(2, "<|im_start|>é")
    assert (answers[3], answers[4]) == (Detokenized(3, "", 300), Detokenized(4, "", -1))
    assert isinstance(answers[5], LookupFailed)
    assert answers[6] == Detokenized(6, "\ufffd")
    assert answers[7] == TokensCounted(7, 13)
    engine.front.send(submit("t", "hello"))
    assert engine.front.finished("t").reason == "stop"

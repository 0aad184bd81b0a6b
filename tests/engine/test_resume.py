"""Turns that resume after the loss of their engine: on the demo model at every token, and in the loop."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from inferencecenter.ipc.messages import (
    AbortTurn,
    ContextFull,
    Finished,
    Started,
    Submit,
    TokenDelta,
    pack_tokens,
    unpack_tokens,
)
from tests.engine.harness import Engine, Front, StandingClock, submit
from tests.engine.process import demo_options, running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KEPT = ("reason", "stop", "kept_tokens", "kept_chars", "end_text", "generated_tokens", "prompt_tokens")
# The two bytes of é, a token each in the demo model: a character that takes two tokens, and halves of it.
TWO_BYTES = {"logit_bias": {"130": 31.0, "105": 30.0}, "frequency_penalty": 2.0, "repeat_last_n": -1, "max_tokens": 24}


@dataclass(frozen=True)
class Told:
    """The events of a turn: each delta's tokens and text, and its end."""

    deltas: tuple[tuple[list[int], str], ...]
    end: Finished

    @property
    def tokens(self) -> list[int]:
        """All tokens."""
        return [token for tokens, _ in self.deltas for token in tokens]

    @property
    def text(self) -> str:
        """All text."""
        return "".join(text for _, text in self.deltas)


def heard(front: Front, turn_id: str) -> Told:
    """Return the events of a turn that finished."""
    end = front.finished(turn_id)
    deltas = (event for event in front.events[turn_id] if isinstance(event, TokenDelta))
    return Told(tuple((unpack_tokens(delta.tokens), delta.text) for delta in deltas), end)


def asked(turn_id: str, text: str, params: dict[str, Any], **changes: Any) -> Submit:
    """Return a turn with its own client, so that no two share KV."""
    turn = submit(turn_id, text, params=json.dumps(params).encode())
    return msgspec.structs.replace(turn, client_id=turn_id, **changes)


@pytest.fixture(scope="module")
def front(demo_model_path: Path) -> Iterator[Front]:
    """An engine process with the demo model."""
    with running(demo_options(demo_model_path)) as child:
        yield child.front


GREEDY: list[tuple[str, dict[str, Any]]] = [
    ("My name is Ana. What is my name?", {}),
    ("Count to ten.", {"stop": ["9, 10, 12", ", 6"]}),
    ("Count to ten.", {"stop": ["5, 7"], "max_tokens": 14}),
    ("Count to ten.", {"stop_regex": ["\\b1[01]\\b"]}),
    ("Count to ten.", {"max_tokens": 9}),
    ("Count to ten.", {"repeat_penalty": 1.6, "repeat_last_n": 6, "max_tokens": 20}),
    ("Count to ten.", {"frequency_penalty": 1.5, "presence_penalty": 0.7, "repeat_last_n": -1, "max_tokens": 20}),
    ("Count to ten.", {"dry_multiplier": 4.0, "dry_allowed_length": 1, "dry_sequence_breakers": [], "max_tokens": 20}),
    ("Count to ten.", TWO_BYTES),
    ("Count to ten.", TWO_BYTES | {"stop": ["\u00e9\u00e9\u20ac", "\u00e9\u00e9\u00e9\u00e9,"]}),
    ("Count to ten.", TWO_BYTES | {"stop": ["\u00e9" * 4]}),
    ("Count to ten.", {"logit_bias": {"14": 100}, "stop_on_repetition": 2, "max_tokens": 24}),
]


@pytest.mark.parametrize(("question", "params"), GREEDY)
def test_greedy_answer_resumes_unchanged(
    front: Front, request: pytest.FixtureRequest, question: str, params: dict[str, Any]
) -> None:
    """It is interrupted at each of its tokens, also the last; both parts join to the whole, with the same end."""
    name, params = request.node.name, {"temperature": 0} | params
    front.send(asked(f"{name} whole", question, params))
    whole = heard(front, f"{name} whole")
    n_tokens = len(whole.tokens)
    assert n_tokens > 2
    cuts = range(n_tokens + 1)
    told = ["".join(text for _, text in whole.deltas[:cut]) for cut in cuts]
    for cut in cuts:
        answer = pack_tokens(whole.tokens[:cut])
        # The text of the last delta was emitted completely or not at all.
        front.send(asked(f"{name} {cut}", question, params, answer=answer, shown_chars=len(told[cut])))
    for cut in cuts:
        rest = heard(front, f"{name} {cut}")
        assert told[cut] + rest.text == whole.text, cut
        assert whole.tokens[:cut] + rest.tokens == whole.tokens, cut
        assert [getattr(rest.end, each) for each in KEPT] == [getattr(whole.end, each) for each in KEPT], cut
        assert rest.end.warnings == ()


def test_greedy_cases_cover_their_kinds(front: Front) -> None:
    """Stop strings are held back and found, characters take several tokens, a loop is detected."""
    ends: list[Told] = []
    for number, (question, params) in enumerate(GREEDY):
        front.send(asked(f"kind {number}", question, {"temperature": 0} | params))
        ends.append(heard(front, f"kind {number}"))
    assert {told.end.reason for told in ends} == {"stop", "length", "repetition"}
    assert {told.end.stop for told in ends} >= {None, ", 6", "\\b1[01]\\b"}
    assert any(len(char.encode()) > 1 and char != "\ufffd" for told in ends for char in told.text)
    assert any(tokens and not text for told in ends for tokens, text in told.deltas[:-1])


SEEDED = {"temperature": 1.3, "top_k": 0, "top_p": 1, "min_p": 0, "seed": 7, "max_tokens": 24, "ignore_eos": True}


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"xtc_probability": 0.5, "xtc_threshold": 0.05},
        {"repeat_penalty": 1.3},
        {"samplers": ["temperature", "top_k"]},
    ],
)
def test_seeded_answer_resumes_unchanged(front: Front, request: pytest.FixtureRequest, params: Any) -> None:
    """Each token depends on the seed and its position, wherever the answer was interrupted; another seed differs."""
    # The candidates left after truncation differ by more than rounding.
    name, params = request.node.name, SEEDED | {"top_k": 20, "min_p": 0.05} | params
    front.send(asked(f"{name} whole", "Tell me a story.", params))
    front.send(asked(f"{name} other", "Tell me a story.", params | {"seed": 8}))
    whole, other = heard(front, f"{name} whole"), heard(front, f"{name} other")
    assert whole.tokens != other.tokens
    for cut in (1, 5, 8, 13, 16, 23):
        answer, shown = pack_tokens(whole.tokens[:cut]), sum(len(text) for _, text in whole.deltas[:cut])
        front.send(asked(f"{name} {cut}", "Tell me a story.", params, answer=answer, shown_chars=shown))
        rest = heard(front, f"{name} {cut}")
        assert whole.tokens[:cut] + rest.tokens == whole.tokens, cut
        assert rest.end.warnings == ()


@pytest.mark.parametrize("params", [{"mirostat": 1}, {"mirostat": 2}, {"adaptive_target": 0.3}])
def test_stateful_sampler_restarts_and_reports_it(front: Front, request: pytest.FixtureRequest, params: Any) -> None:
    """It is reproducible, and nothing is reported without an interruption."""
    name, params = request.node.name, SEEDED | params
    front.send(asked(f"{name} whole", "Tell me a story.", params))
    whole = heard(front, f"{name} whole")
    assert whole.end.warnings == ()
    answer, shown = pack_tokens(whole.tokens[:5]), sum(len(text) for _, text in whole.deltas[:5])
    turns = [asked(f"{name} {n}", "Tell me a story.", params, answer=answer, shown_chars=shown) for n in "ab"]
    front.send(*turns)
    first, second = heard(front, turns[0].turn_id), heard(front, turns[1].turn_id)
    assert first.tokens == second.tokens
    (warning,) = first.end.warnings
    assert warning.endswith("lost its state after 5 tokens, where the answer resumed")


@pytest.fixture
def engine() -> Iterator[Engine]:
    """An engine of one slot on the echo backend."""
    engine = Engine(slots=1, n_ctx=200)
    yield engine
    engine.stop()


def test_complete_answer_ends_without_another_token(engine: Engine) -> None:
    """Its prompt and its end are sent at once, even while the only slot is taken."""
    engine.front.send(submit("long", "ab", params=b'{"ignore_eos":true}'))
    engine.front.read_until(lambda: "long" in engine.front.events)
    engine.front.send(submit("t", "hello", answer=pack_tokens([*b"hello", 257]), shown_chars=3))
    end = engine.front.finished("t")
    started, delta, _ = engine.front.events["t"]
    assert isinstance(started, Started)
    assert delta == TokenDelta("t", b"", "lo")
    assert (end.reason, end.end_text, end.kept_tokens, end.generated_tokens) == ("stop", "<|im_end|>", 6, 6)
    engine.front.send(AbortTurn("long"))
    engine.front.wait_for("long")


@pytest.mark.parametrize("may_shift", [False, True])
def test_resumed_answer_that_fills_the_context_ends_or_overflows(engine: Engine, *, may_shift: bool) -> None:
    """A full context at the engine's loss does not become an oversized prompt."""
    prompt = len(engine.backend.tokenize(submit("t", "ab").pieces, first=True))
    answer = [*b"ab"] * 100
    said = answer[: 200 - prompt]
    turn = submit("t", "ab", params=b'{"ignore_eos":true}', answer=pack_tokens(said), shown_chars=len(said))
    engine.front.send(msgspec.structs.replace(turn, may_shift=may_shift))
    engine.front.wait_for("t")
    last = engine.front.events["t"][-1]
    end = last.end if isinstance(last, ContextFull) else last
    assert isinstance(last, ContextFull) == may_shift
    assert isinstance(end, Finished)
    assert (end.reason, end.kept_tokens) == ("context_full", len(said))


def test_abort_before_the_repeated_prefill_keeps_the_answer(engine: Engine) -> None:
    """Its end waits for tokenization, and reports how much of the answer is kept."""
    engine.backend.tokenizing["slow"] = threading.Event()
    engine.front.send(submit("t", "slow", session="s", answer=pack_tokens(list(b"sl")), shown_chars=1), AbortTurn("t"))
    engine.front.send(submit("other", "x"))
    engine.front.wait_for("other")
    assert "t" not in engine.front.events
    engine.backend.tokenizing["slow"].set()
    end = engine.front.finished("t")
    assert engine.front.text("t") == "l"
    assert (end.reason, end.kept_tokens, end.kept_chars, end.generated_tokens) == ("aborted", 2, 2, 2)


def test_preempted_turn_has_no_queue_timeout() -> None:
    """The queue timeout applies to turns that never had a slot."""
    clock = StandingClock()
    engine = Engine(slots=1, queue_timeout_s=60, quantum_tokens=1_000_000, clock=clock)
    engine.front.send(submit("runs", "ab", params=b'{"ignore_eos":true}'))
    engine.front.read_until(lambda: "runs" in engine.front.events)
    engine.tell(submit("back", "hello", answer=pack_tokens(list(b"he")), shown_chars=2), submit("new", "x"))
    clock.now_s = 60.0
    engine.front.wait_for("new")
    assert not engine.front.ended("back")
    engine.front.send(AbortTurn("runs"))
    assert engine.front.finished("back").reason == "stop"
    assert engine.front.text("back") == "llo"
    engine.stop()

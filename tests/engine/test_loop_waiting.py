"""Waiting, overflowing, sharing and resumed turns in the engine's loop on the echo backend."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import msgspec
import pytest

from inferencecenter.engine.loop import _TOKENIZATION_SHARE
from inferencecenter.ipc.messages import (
    AbortTurn,
    ContextFull,
    Failed,
    Finished,
    ReleaseSession,
    Started,
    StepOutput,
    TokenDelta,
    pack_tokens,
    unpack_tokens,
)
from tests.engine.harness import Engine, StandingClock, submit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from inferencecenter.engine.backend import Chunk

ENDLESS = b'{"ignore_eos":true}'


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """An engine of one slot with offload."""
    engine = Engine(tmp_path, slots=1, prefill_grid_tokens=16)
    yield engine
    engine.stop()


def started(engine: Engine, turn_id: str) -> Started:
    """Return the event of a turn's first slot."""
    (event,) = (event for event in engine.front.events[turn_id] if isinstance(event, Started))
    return event


def test_turn_without_a_slot_times_out() -> None:
    """It fails while another turn holds the only slot; that turn is not affected."""
    clock = StandingClock()
    engine = Engine(slots=1, queue_timeout_s=60, quantum_tokens=1_000_000, clock=clock)
    engine.front.send(submit("runs", "ab", params=ENDLESS))
    engine.front.read_until(lambda: bool(engine.front.text("runs")))
    engine.front.send(submit("waits", "text"))
    engine.front.read_until(lambda: "waits" in engine.front.events)
    clock.now_s = 60.0
    engine.front.wait_for("waits")
    failure = engine.front.events["waits"][-1]
    assert isinstance(failure, Failed)
    assert failure.code == "queue_timeout"
    engine.front.send(AbortTurn("runs"))
    assert engine.front.finished("runs").reason == "aborted"
    engine.stop()


def test_queue_timeout_during_tokenization_wakes_the_loop() -> None:
    """The tokens are dropped when they arrive, and the session stays usable."""
    clock = StandingClock()
    engine = Engine(queue_timeout_s=0.05, clock=clock)
    engine.backend.tokenizing["slow"] = threading.Event()
    engine.tell(submit("t", "slow", session="s"))
    clock.now_s = 1.0
    engine.front.wait_for("t")
    (failure,) = engine.front.events["t"]
    assert isinstance(failure, Failed)
    assert failure.code == "queue_timeout"
    engine.backend.tokenizing["slow"].set()
    engine.front.send(submit("next", "text", session="s"))
    assert engine.front.finished("next").reason == "stop"
    engine.stop()


def test_overflowed_turn_continues_with_a_shorter_prompt() -> None:
    """Submitted again with its partial answer, it generates the rest and repeats nothing."""
    engine = Engine(n_ctx=64)
    endless = b'{"ignore_eos":true,"max_tokens":50,"stop":["Z"]}'
    engine.front.send(submit("t", "abc", params=endless, may_shift=True))
    engine.front.wait_for("t")
    overflowed = engine.front.events["t"][-1]
    assert isinstance(overflowed, ContextFull)
    assert overflowed.n_tokens == 64
    assert overflowed.end is not None
    assert overflowed.end.reason == "context_full"
    said = b"".join(event.tokens for event in engine.front.events["t"] if isinstance(event, TokenDelta))
    before = engine.front.text("t")
    assert len(said) // 4 == overflowed.end.generated_tokens < 50
    again = submit("t", "abc", params=endless, may_shift=True, answer=said, shown_chars=len(before))
    shorter = msgspec.structs.replace(again, pieces=())
    engine.front.events.clear()
    engine.front.send(msgspec.structs.replace(shorter, tokens=pack_tokens([256, *b"user\nabc", 257])))
    end = engine.front.finished("t")
    assert unpack_tokens(started(engine, "t").tokens) == [256, *b"user\nabc", 257]
    assert (end.reason, end.generated_tokens) == ("length", 50)
    assert before + engine.front.text("t") == ("abc" * 20)[:50]
    engine.stop()


@pytest.mark.parametrize(("answer", "n_tokens"), [(b"", 219), (b"ab", 221)])
def test_oversized_prompt_overflows_if_shifting_is_allowed(answer: bytes, n_tokens: int) -> None:
    """With a partial answer the overflow carries an end, without one it never started."""
    engine = Engine(n_ctx=200)
    engine.front.send(submit("t", "x" * 200, may_shift=True, answer=pack_tokens(list(answer)), shown_chars=len(answer)))
    engine.front.wait_for("t")
    engine.stop()
    (overflowed,) = engine.front.events["t"]
    assert isinstance(overflowed, ContextFull)
    assert overflowed.n_tokens == n_tokens
    assert (overflowed.end is None) == (not answer)
    if overflowed.end is not None:
        assert (overflowed.end.kept_chars, overflowed.end.generated_tokens) == (2, 2)


def test_session_without_a_slot_is_restored(engine: Engine) -> None:
    """Its next turn finds the offloaded KV, and the gauges count it."""
    engine.front.send(submit("one", "first", session="s"))
    history = engine.front.history("one")
    engine.front.send(submit("other", "else"))
    engine.front.wait_for("other")
    last = engine.front.frames[-1]
    assert isinstance(last, StepOutput)
    assert last.parked_sessions == 1
    assert last.parked_bytes > 0
    engine.front.send(submit("two", "second", session="s", tokens=history))
    assert engine.front.finished("two").cached_tokens == len(history) // 4 - 1
    assert engine.front.text("two") == "second"


def test_recovered_sessions_are_reported_at_once(engine: Engine, tmp_path: Path) -> None:
    """They are reported before the first turn; otherwise their KV would be taken for lost."""
    engine.front.send(submit("one", "first", session="s"))
    engine.front.wait_for("one")
    engine.front.send(submit("other", "else"))
    engine.front.wait_for("other")
    engine.stop()
    following = Engine(tmp_path, slots=1)
    following.front.read_until(lambda: bool(following.front.frames))
    first = following.front.frames[0]
    following.stop()
    assert isinstance(first, StepOutput)
    assert (first.events, first.parked_sessions) == ((), 1)


def test_released_session_is_not_offloaded(engine: Engine) -> None:
    """After a release the same history is prefilled from its start."""
    engine.front.send(submit("one", "first", session="s"))
    history = engine.front.history("one")
    engine.front.send(submit("other", "else"))
    engine.front.wait_for("other")
    engine.front.send(ReleaseSession("s"), submit("two", "second", session="s", tokens=history))
    assert engine.front.finished("two").cached_tokens == 0


def test_system_prompt_is_prefilled_once(engine: Engine) -> None:
    """Two sessions of a client share their first piece; the second finds its tokens in the KV."""
    system = "<|im_start|>system\nYou are brief, friendly and precise in everything you say.<|im_end|>\n"
    turns = []
    for name in ("a", "b"):
        turn = submit(name, name)
        shared = msgspec.structs.replace(turn.pieces[0], text=system)
        turns.append(msgspec.structs.replace(turn, pieces=(shared, *turn.pieces), shared_pieces=1))
    engine.front.send(turns[0])
    engine.front.wait_for("a")
    engine.front.send(turns[1])
    prefix_tokens = len(engine.backend.tokenize(turns[1].pieces[:1], first=True))
    assert engine.front.finished("b").cached_tokens >= prefix_tokens
    assert engine.front.text("b") == "b"


def test_shared_pieces_are_tokenized_once(engine: Engine) -> None:
    """Their number of tokens is that of the prompt's beginning; a long system prompt is not read twice for it."""
    turn = submit("t", "Hello")
    engine.front.send(msgspec.structs.replace(turn, shared_pieces=1))
    engine.front.wait_for("t")
    assert engine.backend.tokenized == [piece.text for piece in turn.pieces]


def test_long_turns_share_a_slot(tmp_path: Path) -> None:
    """Three endless turns on one slot, a few tokens each time: all make progress, and each text is right.

    They have many more tokens than a quantum, since the first one decodes while the others are tokenized.
    """
    engine = Engine(tmp_path, slots=1, quantum_tokens=4)
    texts = {"a": "abc", "b": "defg", "c": "hi"}
    limited = b'{"ignore_eos":true,"max_tokens":400}'
    engine.front.send(*(submit(name, text, params=limited) for name, text in texts.items()))
    ends = {name: engine.front.finished(name) for name in texts}
    engine.stop()
    for name, text in texts.items():
        assert engine.front.text(name) == (text * 400)[:400]
        assert isinstance(ends[name], Finished)
    assert all(end.preempted >= 2 for end in ends.values())
    deltas = [
        event.turn_id
        for frame in engine.front.frames
        if isinstance(frame, StepOutput)
        for event in frame.events
        if isinstance(event, TokenDelta)
    ]
    assert set(deltas[: len(deltas) // 2]) == set(texts)


def test_turn_that_arrives_during_a_decode_is_read_right_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its prompt is tokenized before the next step is planned: no decode of the others comes in between."""
    _wait_for_tokens(monkeypatch, 60)
    engine = Engine(slots=2)
    passes: list[int] = []
    decode = engine.backend.decode

    def decode_and_submit(chunks: Sequence[Chunk]) -> None:
        passes.append(sum(len(chunk.tokens) for chunk in chunks))
        if len(passes) == 3:
            engine.tell(submit("new", "text"))
        decode(chunks)

    monkeypatch.setattr(engine.backend, "decode", decode_and_submit)
    engine.front.send(submit("old", "text", params=ENDLESS))
    engine.front.wait_for("new")
    prompt_tokens = passes[0]
    assert passes[:6] == [prompt_tokens, 1, 1, prompt_tokens, 2, 2]
    engine.stop()


@pytest.mark.parametrize(
    ("wait_s", "share"),
    [pytest.param(0.01, 1e12, id="long-tokenization"), pytest.param(3600, _TOKENIZATION_SHARE, id="short-decodes")],
)
def test_turns_continue_while_another_is_tokenized(
    monkeypatch: pytest.MonkeyPatch, wait_s: float, share: float
) -> None:
    """The loop waits at most for a limited time, and for no more than a share of a decode."""
    _wait_for_tokens(monkeypatch, wait_s, share=share)
    engine = Engine(slots=2)
    engine.backend.tokenizing["slow"] = threading.Event()
    engine.front.send(submit("old", "text", params=ENDLESS))
    engine.front.read_until(lambda: bool(engine.front.text("old")))
    engine.tell(submit("new", "slow"))
    shown = len(engine.front.text("old"))
    engine.front.read_until(lambda: len(engine.front.text("old")) > shown + 20)
    assert "new" not in engine.front.events
    engine.backend.tokenizing["slow"].set()
    assert engine.front.finished("new").reason == "stop"
    engine.stop()


def _wait_for_tokens(monkeypatch: pytest.MonkeyPatch, wait_s: float, *, share: float = 1e12) -> None:
    """Let the loop wait so long for the tokens of a turn that arrives, and at most for this share of a decode."""
    monkeypatch.setattr("inferencecenter.engine.loop._TOKENIZATION_S", wait_s)
    monkeypatch.setattr("inferencecenter.engine.loop._TOKENIZATION_SHARE", share)

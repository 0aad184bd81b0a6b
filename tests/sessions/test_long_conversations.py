"""Turns that exceed their context: shifted, stopped or refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.messages import QueuePosition, unpack_tokens
from inferencecenter.ipc.port import EngineState, EngineStatus
from inferencecenter.protocol import events
from inferencecenter.protocol.base import SessionEvent, TurnEvent
from inferencecenter.protocol.params import decode
from inferencecenter.protocol.requests import START
from tests.sessions.conftest import SessionHarness, make_model, packed

if TYPE_CHECKING:
    from collections.abc import Callable

N_CTX = 400
SYSTEM = "Be kind."


@pytest.fixture
def world() -> SessionHarness:
    """Sessions on a model with a small context."""
    return small_world()


def small_world() -> SessionHarness:
    """Sessions on a model with a small context."""
    world = SessionHarness()
    world.engine.status = EngineStatus(state=EngineState.READY, model=make_model(n_ctx=N_CTX))
    return world


def fill(world: SessionHarness, **fields: Any) -> str:
    """A session whose three turns fill most of its context."""
    session_id = world.create(**{"system": SYSTEM, **fields})
    for number in (1, 2, 3):
        world.turn(session_id, f"question {number}", f"answer {number}")
    return session_id


def length(world: SessionHarness) -> int:
    """Tokens of the last submission: its tokens, one per new character, and the answer so far."""
    turn = world.engine.last
    return (len(turn.tokens) + len(turn.answer)) // 4 + len(world.engine.last_text)


def spelled(tokens: bytes) -> str:
    """The text of packed tokens."""
    return "".join(map(chr, unpack_tokens(tokens)))


def test_answer_that_fills_the_context_is_shifted(world: SessionHarness) -> None:
    """The oldest turns are dropped, the turn keeps its id, and its answer is submitted as tokens."""
    session_id = fill(world)
    world.infer(session_id, "question 4", id="i4")
    world.engine.start()
    first = world.engine.last
    world.engine.generate("Half an ")
    seen = len(world.sink.events)
    world.engine.overflow(length(world) + len("Half an "), said="Half an ")
    again = world.engine.last
    assert (again.turn_id, again.answer, again.tokens) == (first.turn_id, packed("Half an "), b"")
    assert again.may_shift
    assert (again.params_json, again.priority, again.client_id) == (first.params_json, first.priority, first.client_id)
    assert world.engine.last_text.startswith(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\nquestion ")
    assert "question 1" not in world.engine.last_text
    assert world.engine.last_text.endswith("question 4<|im_end|>\n<|im_start|>assistant\n")
    world.engine.start()
    world.engine.generate("answer 4")
    world.engine.finish(kept="Half an answer 4")
    told = world.sink.events[seen:]
    assert [event.op for event in told] == ["context_shifted", "token", "end"]
    shifted, end = told[0], told[-1]
    assert isinstance(shifted, events.ContextShifted)
    assert isinstance(end, events.End)
    assert shifted.dropped_turns >= 1
    assert 0 < shifted.tokens < N_CTX
    assert [event.seq for event in told if isinstance(event, TurnEvent)] == [
        shifted.seq, shifted.seq + 1, shifted.seq + 2,
    ]  # fmt: skip
    assert world.transcript(session_id)[-1] == ("assistant", "Half an answer 4")
    assert len(world.transcript(session_id)) == 9
    session = world.get(session_id)
    assert session.dropped_messages == 2 * shifted.dropped_turns
    assert session.n_tokens < N_CTX


def test_next_turn_builds_on_the_shift(world: SessionHarness) -> None:
    """Its prompt keeps all tokens of the shifted turn and adds only new text."""
    session_id = fill(world)
    world.infer(session_id, "question 4")
    world.engine.start()
    world.engine.generate("ab")
    world.engine.overflow(N_CTX, said="ab")
    shifted = world.engine.last_text
    world.engine.start()
    world.engine.generate("cd")
    world.engine.finish(kept="abcd")
    world.infer(session_id, "question 5")
    assert spelled(world.engine.last.tokens) == shifted + "abcd\0"
    assert world.engine.last_text == "\n<|im_start|>user\nquestion 5<|im_end|>\n<|im_start|>assistant\n"
    assert world.engine.last.shared_pieces == 0


def test_figures_cover_the_whole_turn(world: SessionHarness) -> None:
    """Tokens, times and preemptions add up over both submissions; each prefill counts."""
    session_id = fill(world)
    world.infer(session_id, "question 4")
    prompt = length(world)
    world.now += 1
    world.engine.start()
    world.now += 2
    world.engine.generate("ab")
    world.now += 3
    world.engine.overflow(N_CTX, said="ab", preempted=2)
    shorter = length(world) - 2
    world.now += 4
    world.engine.start()
    world.now += 5
    world.engine.generate("cd")
    world.engine.finish(kept="abcd", preempted=1, stop="x", warnings=("slow",))
    end = world.sink.last
    assert (end.finish_reason, end.stop, end.warnings) == ("stop", "x", ("slow",))
    assert (end.stats.tokens, end.usage.completion_tokens, end.stats.preempted) == (5, 5, 3)
    assert (end.stats.ttft_ms, end.stats.total_ms, end.stats.queue_ms) == (3000.0, 15000.0, 5000.0)
    assert end.usage.prompt_tokens == prompt + shorter
    assert end.stats.tps == pytest.approx(4 / 12, abs=0.01)
    assert world.records[-1].stats.preempted == 3


def test_prompt_that_is_too_long_is_shortened(world: SessionHarness) -> None:
    """It is submitted again when the engine reports the overflow."""
    session_id = fill(world)
    world.infer(session_id, "question 4")
    world.engine.overflow(length(world) + 100)
    assert world.sink.last.op == "context_shifted"
    assert (world.engine.last.answer, world.engine.last.tokens) == (b"", b"")
    world.engine.answer("answer 4")
    assert world.sink.last.finish_reason == "stop"
    assert world.sink.last.usage.prompt_tokens == len(world.engine.last_text)
    assert world.transcript(session_id)[-2:] == [("user", "question 4"), ("assistant", "answer 4")]


def test_turn_can_be_shifted_again(world: SessionHarness) -> None:
    """Each shift drops more and is announced."""
    session_id = world.create(system=SYSTEM)
    for number in range(1, 9):
        world.turn(session_id, f"question {number}", f"answer {number}")
    world.infer(session_id, "question 9")
    world.engine.start()
    world.engine.generate("ab")
    world.engine.overflow(N_CTX, said="ab")
    first = world.engine.last_text
    world.engine.start()
    world.engine.generate("cd")
    world.engine.overflow(N_CTX, said="abcd")
    assert world.engine.last.answer == packed("abcd")
    assert len(world.engine.last_text) < len(first)
    assert world.engine.last_text.startswith(f"<|im_start|>system\n{SYSTEM}")
    world.engine.start()
    world.engine.finish(kept="abcd")
    shifts = [event for event in world.sink.events if isinstance(event, events.ContextShifted)]
    assert len(shifts) == 2
    assert world.get(session_id).dropped_messages == 2 * sum(shift.dropped_turns for shift in shifts)
    assert world.transcript(session_id)[-1] == ("assistant", "abcd")


def test_full_context_without_older_turns_ends_the_answer(world: SessionHarness) -> None:
    """Its last text is published, then ``context_full``; it stays in the history."""
    session_id = world.create(system=SYSTEM)
    world.infer(session_id, "Tell me all")
    world.engine.start()
    world.engine.generate("All is")
    world.engine.overflow(N_CTX, said="All is", text=" this")
    assert world.sink.ops[-2:] == ["token", "end"]
    assert world.sink.last.finish_reason == "context_full"
    assert world.sink.text == "All is this"
    assert world.transcript(session_id)[-1] == ("assistant", "All is this")
    assert len(world.engine.submitted) == 1


def test_prompt_that_cannot_be_shortened_fails(world: SessionHarness) -> None:
    """The turn fails, the history is unchanged, and the session is usable."""
    session_id = fill(world)
    before = world.get(session_id)
    world.infer(session_id, "x" * 400, id="i")
    world.engine.overflow(700)
    error = world.sink.last
    assert (error.op, error.code, error.id, error.retryable) == ("error", "prompt_too_long", "i", False)
    assert "700 tokens" in error.message
    after = world.get(session_id)
    assert (after.transcript, after.n_tokens, after.dropped_messages) == (before.transcript, before.n_tokens, 0)
    world.turn(session_id, "short", "yes")


def test_on_full_stop_does_not_shift(world: SessionHarness) -> None:
    """The submission forbids a shift, and ``context_full`` ends the turn."""
    session_id = fill(world, on_full="stop")
    world.infer(session_id, "question 4")
    assert not world.engine.last.may_shift
    world.engine.start()
    world.engine.generate("ab")
    world.engine.finish("context_full", kept="ab", end_text="")
    assert (world.sink.last.finish_reason, len(world.engine.submitted)) == ("context_full", 4)


@pytest.mark.parametrize(
    ("fields", "on_full"),
    [({}, "shift"), ({"mode": "raw"}, "stop"), ({"mode": "raw", "on_full": "shift"}, "shift")],
)
def test_mode_selects_the_default_of_on_full(world: SessionHarness, fields: dict[str, Any], on_full: str) -> None:
    """Chat sessions shift and raw sessions stop."""
    session_id = world.create(**fields)
    assert world.get(session_id).on_full == on_full
    world.infer(session_id)
    assert world.engine.last.may_shift is (on_full == "shift")


def test_raw_sessions_drop_their_oldest_prompts(world: SessionHarness) -> None:
    """The rest is submitted unchanged, without a template."""
    world.engine.status = EngineStatus(state=EngineState.READY, model=make_model(n_ctx=40))
    session_id = world.create(mode="raw", on_full="shift", system="Once ")
    for number in (1, 2, 3):
        world.turn(session_id, f"q{number} ", f"a{number} ")
    world.infer(session_id, "q4 ")
    world.engine.start()
    world.engine.generate("a4")
    world.engine.overflow(length(world) + 2, said="a4")
    assert world.engine.last_text == "Once q3 a3 q4 "
    assert not any(piece.special for piece in world.engine.last.pieces)
    world.engine.start()
    world.engine.finish(kept="a4", end_text="")
    world.infer(session_id, "q5 ")
    assert spelled(world.engine.last.tokens) == "Once q3 a3 q4 a4"
    assert len(world.transcript(session_id)) == 9


def test_n_keep_keeps_the_first_messages(world: SessionHarness) -> None:
    """It applies to a session or a turn; with ``stop`` a warning says it has no effect."""
    session_id = fill(world, params={"memory": {"n_keep": 2}})
    world.infer(session_id, "question 4")
    world.engine.overflow(length(world))
    assert "question 1<|im_end|>\n<|im_start|>assistant\nanswer 1" in world.engine.last_text
    assert "question 2" not in world.engine.last_text
    world.engine.answer("answer 4")
    world.turn(session_id, "question 5", "answer 5", params={"n_keep": 0})
    assert "question 1" not in world.engine.last_text
    assert world.engine.last.tokens == b""
    world.infer(world.create(on_full="stop"), params={"n_keep": 2})
    world.engine.answer("x")
    assert world.sink.last.warnings == ("n_keep has no effect: on_full is stop.",)


def test_abort_during_an_overflow_ends_the_turn(world: SessionHarness) -> None:
    """Nothing is submitted again, and published text stays."""
    for said, shown in (("ab", "abc"), (None, "")):
        session_id = fill(world)
        world.infer(session_id, "question 4")
        submitted = len(world.engine.submitted)
        if said is not None:
            world.engine.start()
            world.engine.generate(said)
        world.abort(session_id, id="a")
        world.engine.overflow(N_CTX, said=said, text="c" if said else "")
        assert (world.sink.last.finish_reason, world.sink.last.id) == ("aborted", "a")
        assert world.transcript(session_id)[-1] == ("assistant", shown)
        assert len(world.engine.submitted) == submitted


def test_abort_with_discard_restores_the_whole_history(world: SessionHarness) -> None:
    """The shift of the discarded turn is discarded with it."""
    session_id = fill(world)
    before = world.get(session_id)
    world.infer(session_id, "question 4")
    world.engine.start()
    world.engine.generate("ab")
    world.engine.overflow(N_CTX, said="ab")
    world.engine.start()
    world.abort(session_id, discard=True)
    world.engine.finish("aborted", kept="ab", end_text="")
    after = world.get(session_id)
    assert (after.transcript, after.n_tokens, after.dropped_messages) == (before.transcript, before.n_tokens, 0)


def test_abort_of_a_queued_shifted_turn_keeps_its_text(world: SessionHarness) -> None:
    """The next turn builds on the shortened conversation with the partial answer."""
    session_id = fill(world)
    world.infer(session_id, "question 4")
    world.engine.start()
    world.engine.generate("ab")
    world.engine.overflow(N_CTX, said="ab")
    world.abort(session_id)
    world.engine.finish("aborted", end_text="", generated_tokens=0)
    assert (world.sink.last.finish_reason, world.sink.last.stats.tokens) == ("aborted", 2)
    assert world.transcript(session_id)[-1] == ("assistant", "ab")
    assert world.get(session_id).dropped_messages > 0
    world.infer(session_id, "question 5")
    assert world.engine.last.tokens == b""
    assert "question 1" not in world.engine.last_text
    assert "question 4<|im_end|>\n<|im_start|>assistant\nab<|im_end|>" in world.engine.last_text


def test_failed_shifted_turn_leaves_the_history_unchanged(world: SessionHarness) -> None:
    """The failure reverts the shift as well."""
    session_id = fill(world)
    before = world.get(session_id)
    world.infer(session_id, "question 4")
    world.engine.start()
    world.engine.generate("ab")
    world.engine.overflow(N_CTX, said="ab")
    world.engine.fail()
    after = world.get(session_id)
    assert (after.transcript, after.n_tokens, after.dropped_messages) == (before.transcript, before.n_tokens, 0)


def test_refused_shorter_prompt_ends_the_turn(world: SessionHarness) -> None:
    """The partial answer stays with a warning; a turn without one fails with the engine's code."""
    session_id = fill(world)
    world.infer(session_id, "question 4")
    world.engine.start()
    world.engine.generate("ab")
    world.engine.refusal = InferenceCenterError(ErrorCode.QUEUE_FULL, "too many")
    world.engine.overflow(N_CTX, said="ab")
    assert world.sink.last.finish_reason == "context_full"
    assert world.sink.last.warnings == ("The context could not be shifted: too many",)
    assert world.transcript(session_id)[-1] == ("assistant", "ab")
    world.engine.refusal = None
    world.infer(session_id, "question 5")
    world.engine.refusal = InferenceCenterError(ErrorCode.QUEUE_FULL, "too many")
    world.engine.overflow(length(world))
    assert (world.sink.last.code, world.sink.last.retryable, world.sink.last.retry_after_ms) == (
        "queue_full", True, 1000,
    )  # fmt: skip
    assert "context_shifted" not in world.sink.ops


def test_template_error_after_a_shift_ends_the_turn(world: SessionHarness) -> None:
    """A conversation that cannot begin without its first question is not shifted."""
    source = (
        "{% if messages[0].content != 'question 1' %}{{ raise_exception('question 1 is missing') }}{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    world.engine.status = EngineStatus(state=EngineState.READY, model=make_model(n_ctx=N_CTX, chat_template=source))
    session_id = fill(world, system=None)
    world.infer(session_id, "question 4")
    world.engine.start()
    world.engine.generate("ab")
    world.engine.overflow(N_CTX, said="ab")
    assert world.sink.last.finish_reason == "context_full"
    assert "question 1 is missing" in world.sink.last.warnings[0]


def test_shorter_prompt_that_does_not_fit_ends_the_answer(world: SessionHarness) -> None:
    """The answer is kept and its held-back text published."""
    session_id = fill(world)
    world.infer(session_id, "question 4")
    world.engine.start()
    world.engine.generate("ab")
    world.engine.overflow(N_CTX, said="ab", text="c")
    world.engine.overflow(N_CTX * 3)
    assert (world.sink.last.op, world.sink.last.finish_reason) == ("end", "context_full")
    assert world.transcript(session_id)[-1] == ("assistant", "abc")


def test_queue_position_of_a_shifted_turn_is_published(world: SessionHarness) -> None:
    """Only changes are published."""
    session_id = fill(world)
    world.infer(session_id, "question 4")
    world.engine.start()
    world.engine.generate("ab")
    world.engine.position = 2
    seen = len(world.sink.events)
    world.engine.overflow(N_CTX, said="ab")
    for position in (2, 1, 0):
        world.engine.say(QueuePosition(world.engine.last.turn_id, position))
    world.engine.start()
    told = world.sink.events[seen:]
    assert [getattr(event, "position", event.op) for event in told] == ["context_shifted", 2, 1, 0]


def test_elapsed_time_is_not_granted_again(world: SessionHarness) -> None:
    """``max_time_ms`` counts from ``infer``; a new submission gets the rest."""
    session_id = fill(world)
    world.infer(session_id, "question 4", params={"max_time_ms": 10_000})
    world.engine.start()
    world.engine.generate("ab")
    world.now += 4
    world.engine.overflow(N_CTX, said="ab")
    assert decode(world.engine.last.params_json).max_time_ms == 6000
    world.engine.start()
    world.engine.finish("time", kept="ab", end_text="")
    world.infer(session_id, "question 5", params={"max_time_ms": 10_000})
    world.now += 40
    world.engine.overflow(length(world))
    assert decode(world.engine.last.params_json).max_time_ms == 1


def test_rewind_across_a_shift_restores_the_old_turns(world: SessionHarness) -> None:
    """The view is that of the turn's end; tokens of another rendering are dropped."""
    session_id = fill(world)
    first, last = (world.get(session_id).turns[index].turn_id for index in (0, 2))
    world.infer(session_id, "question 4")
    world.engine.overflow(length(world))
    world.engine.answer("answer 4")
    shifted = world.engine.last.turn_id
    child = world.fork(session_id, shifted)
    assert world.get(child).dropped_messages == world.get(session_id).dropped_messages > 0
    world.rewind(session_id, last)
    assert (world.get(session_id).dropped_messages, world.get(session_id).n_tokens) == (0, 0)
    world.infer(session_id, "question 4b")
    assert world.engine.last.tokens == b""
    assert "question 1" in world.engine.last_text
    world.engine.answer("answer 4b")
    world.rewind(session_id, first)
    world.rewind(session_id, START)
    assert world.transcript(session_id) == [("system", SYSTEM)]


STEPS = st.lists(
    st.sampled_from(["start", "delta", "overflow", "too_long", "finish", "fail", "abort", "infer", "rewind", "refuse"]),
    max_size=40,
)


@settings(deadline=None)
@given(steps=STEPS)
def test_overflows_never_lose_or_double_an_end(steps: list[str]) -> None:
    """Every turn ends once, numbers rise by one, and the system prompt is always in the prompt."""
    world = small_world()
    session_id = fill(world)
    world.infer(session_id)

    def said() -> str:
        turn_id = world.engine.last.turn_id
        return "".join(
            event.content for event in world.sink.events if isinstance(event, events.Token) and event.turn_id == turn_id
        )

    def refuse() -> None:
        world.engine.refusal = None if world.engine.refusal else InferenceCenterError(ErrorCode.QUEUE_FULL)

    actions: dict[str, Callable[[], object]] = {
        "start": world.engine.start,
        "delta": lambda: world.engine.generate("x"),
        "overflow": lambda: world.engine.overflow(N_CTX, said=said()),
        "too_long": lambda: world.engine.overflow(length(world)),
        "finish": lambda: world.engine.finish(kept=said()),
        "fail": world.engine.fail,
        "abort": lambda: world.abort(session_id),
        "infer": lambda: world.infer(session_id),
        "rewind": lambda: world.rewind(session_id, START),
        "refuse": refuse,
    }
    for step in [*steps, "fail"]:
        try:
            actions[step]()
        except InferenceCenterError as error:
            assert error.code in {  # noqa: PT017
                ErrorCode.SESSION_BUSY,
                ErrorCode.NOTHING_TO_ABORT,
                ErrorCode.QUEUE_FULL,
            }
    world.close(session_id)
    turn_ids = list(dict.fromkeys(turn.turn_id for turn in world.engine.submitted))
    ended = [event.turn_id for event in world.sink.events if isinstance(event, events.End | events.Error)]
    assert sorted(map(str, ended)) == sorted(turn_ids)
    numbers = [event.seq for event in world.sink.events if isinstance(event, SessionEvent | events.Error)]
    assert len(set(numbers)) == len(numbers)
    assert numbers == sorted(numbers, key=lambda number: number or 0)
    assert all(SYSTEM in spelled(turn.tokens) + "".join(p.text for p in turn.pieces) for turn in world.engine.submitted)

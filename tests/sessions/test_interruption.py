"""Turns whose engine is lost wait and resume with the same text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.config.settings import SessionSettings
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.messages import Cancelled, Failed, TokenDelta, unpack_tokens
from inferencecenter.ipc.port import EngineState, EngineStatus
from inferencecenter.protocol import events, requests
from inferencecenter.protocol.params import Params, decode
from inferencecenter.sessions.context import Principal
from inferencecenter.sessions.journal import TurnQueued
from inferencecenter.sessions.manager import SessionManager
from tests.sessions.conftest import FakeSink, InlineTemplates, SessionHarness, make_model, one_model, packed
from tests.sessions.oracle import Oracle, script

if TYPE_CHECKING:
    from collections.abc import Callable

ADA = Principal("ada", 4, "normal", frozenset({"user"}))
N_CTX = 400


def refused(code: ErrorCode, call: Callable[..., object], *args: Any, **kwargs: Any) -> InferenceCenterError:
    """The error of a call that must fail with ``code``."""
    with pytest.raises(InferenceCenterError) as caught:
        call(*args, **kwargs)
    assert caught.value.code is code
    return caught.value


def test_running_turn_resumes_on_the_next_engine(world: SessionHarness) -> None:
    """It is submitted with the same prompt, all its tokens, and the number of emitted characters."""
    session_id = world.create()
    world.turn(session_id, "Hi", "Hello")
    world.infer(session_id, "Go on")
    world.engine.start()
    world.engine.say(TokenDelta(world.engine.last.turn_id, packed("abc"), "ab"))
    first, seen = world.engine.last, len(world.sink.events)
    world.engine.lose()
    world.engine.ready()
    again = world.engine.last
    assert again == replace_submit(first, answer=packed("abc"), shown_chars=2)
    assert len(world.sink.events) == seen
    world.engine.start()
    world.engine.generate("cd")
    world.engine.finish(kept="abcd")
    assert [event.op for event in world.sink.events[seen:]] == ["token", "end"]
    assert world.transcript(session_id)[-1] == ("assistant", "abcd")


def replace_submit(submit: Any, **changes: Any) -> Any:
    """A submission with changes."""
    return type(submit)(**{name: getattr(submit, name) for name in submit.__struct_fields__} | changes)


def test_interrupted_turn_counts_its_prompt_once(world: SessionHarness) -> None:
    """Times cover the whole turn; the second prefill is not usage."""
    session_id = world.create()
    world.infer(session_id)
    prompt = len(world.engine.last_text)
    world.now += 1
    world.engine.start()
    world.now += 1
    world.engine.generate("ab")
    world.engine.lose()
    world.now += 3
    world.engine.ready()
    world.now += 1
    world.engine.start()
    world.now += 2
    world.engine.generate("cd")
    world.engine.finish(kept="abcd", preempted=1)
    end = world.sink.last
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (prompt, 5)
    assert (end.stats.ttft_ms, end.stats.total_ms, end.stats.queue_ms) == (2000.0, 8000.0, 5000.0)
    assert end.stats.preempted == 1


def test_queued_turn_is_resubmitted_unchanged(world: SessionHarness) -> None:
    """An interruption before the start leaves no trace."""
    session_id = world.create()
    world.infer(session_id)
    first = world.engine.last
    for _ in range(2):
        world.engine.lose()
    world.engine.ready()
    assert world.engine.last == first
    world.engine.answer("Hello")
    assert world.sink.ops == ["queued", "token", "end"]


def test_max_time_continues_without_an_engine(world: SessionHarness) -> None:
    """The elapsed part of ``max_time_ms`` is not granted again."""
    session_id = world.create()
    world.infer(session_id, params={"max_time_ms": 10_000})
    world.engine.start()
    world.now += 4
    world.engine.lose()
    world.now += 3
    world.engine.ready()
    assert decode(world.engine.last.params_json).max_time_ms == 3000


def test_turn_is_accepted_while_the_engine_restarts(world: SessionHarness) -> None:
    """It waits; before the first load there is no template to render it."""
    session_id = world.create()
    world.engine.lose()
    world.infer(session_id)
    assert world.sink.ops == ["queued"]
    world.engine.ready()
    world.engine.answer("Hello")
    assert world.sink.ops == ["queued", "token", "end"]
    world.engine.status = EngineStatus(state=EngineState.STARTING)
    refused(ErrorCode.MODEL_LOADING, world.infer, session_id)
    assert world.get(session_id).state == "idle"


def test_turn_without_an_engine_can_be_aborted(world: SessionHarness) -> None:
    """The partial answer stays, its end answers the abort, and the session is usable."""
    session_id = world.create()
    world.infer(session_id)
    world.engine.start()
    world.engine.generate("Hel")
    world.engine.lose()
    world.abort(session_id, id="a")
    world.engine.say(Cancelled(world.engine.last.turn_id))
    assert (world.sink.last.finish_reason, world.sink.last.id) == ("aborted", "a")
    assert world.transcript(session_id)[-1] == ("assistant", "Hel")
    del world.engine.turns[world.engine.last.turn_id]
    world.engine.ready()
    world.infer(session_id, "Next")
    assert world.engine.last.tokens == b""
    assert "assistant\nHel<|im_end|>" in world.engine.last_text


def test_failure_during_an_abort_keeps_the_partial_answer(world: SessionHarness) -> None:
    """The partial answer of a turn that was being aborted is kept."""
    session_id = world.create()
    world.infer(session_id)
    world.engine.start()
    world.engine.generate("Hel")
    world.abort(session_id)
    world.engine.fail("engine_unavailable")
    assert (world.sink.last.op, world.sink.last.finish_reason) == ("end", "aborted")
    assert world.transcript(session_id)[-1] == ("assistant", "Hel")


def test_closing_without_an_engine_ends_the_turn_once(world: SessionHarness) -> None:
    """Late calls of the engine change nothing."""
    session_id = world.create()
    world.infer(session_id)
    turn = world.engine.turns[world.engine.last.turn_id]
    world.engine.lose()
    world.close(session_id)
    turn.on_engine_event(Cancelled(turn.turn_id))
    turn.on_engine_lost()
    with pytest.raises(InferenceCenterError):
        turn.submission(lambda: None)
    turn.on_engine_event(Failed(turn_id=turn.turn_id, code="nothing_to_abort", message="over"))
    assert world.sink.ops == ["queued", "end"]


def test_another_model_does_not_continue_an_answer(world: SessionHarness) -> None:
    """The partial answer is kept, a warning gives the reason, and the next turn uses the new model."""
    session_id = world.create()
    world.turn(session_id, "Hi", "Hello")
    world.infer(session_id, "Go on")
    world.engine.start()
    world.engine.generate("Hel")
    world.engine.lose()
    world.engine.ready(make_model(n_vocab=9, n_ctx=77))
    end = world.sink.last
    assert (end.op, end.finish_reason) == ("end", "aborted")
    assert "could not be continued" in end.warnings[-1]
    assert world.transcript(session_id)[-1] == ("assistant", "Hel")
    world.infer(session_id, "Next")
    assert world.engine.last.tokens == b""
    assert "assistant\nHello<|im_end|>" in world.engine.last_text
    assert (world.get(session_id).model, world.get(session_id).n_ctx) == ("toy", 77)


def test_turn_without_tokens_moves_to_the_serving_model(world: SessionHarness) -> None:
    """It is rendered again and recorded with the new model."""
    session_id = world.create()
    world.turn(session_id, "Hi", "Hello")
    world.infer(session_id, "Go on")
    assert world.engine.last.tokens
    world.engine.lose()
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    world.engine.ready(make_model(name="other", chat_template=template))
    assert (world.engine.last.tokens, world.engine.last_text) == (b"", "[user]Hi[assistant]Hello[user]Go on[assistant]")
    assert world.journal is not None
    written = [record.spec.model_fingerprint for record in world.journal.of(TurnQueued)]
    assert written[-2] != written[-1]
    world.engine.start()
    world.engine.generate("Gone")
    world.engine.finish("length", kept="Gone", end_text="")
    world.infer(session_id, "And?")
    assert "".join(map(chr, unpack_tokens(world.engine.last.tokens))).endswith("[assistant]Gone")
    assert world.engine.last_text == "[user]And?[assistant]"


def test_reloaded_model_resumes_its_tokens(world: SessionHarness) -> None:
    """A different path or slot count does not change the model's fingerprint."""
    session_id = world.create()
    world.turn(session_id, "Hi", "Hello")
    world.engine.lose()
    world.engine.ready(make_model(slots=1, n_ctx=77, n_gpu_layers=9, path="/elsewhere"))
    world.infer(session_id, "Go on")
    assert world.engine.last.tokens
    assert world.get(session_id).n_ctx == 77


def fill(world: SessionHarness) -> str:
    """A session whose three turns fill most of a small context."""
    world.engine.status = EngineStatus(state=EngineState.READY, model=make_model(n_ctx=N_CTX))
    session_id = world.create(system="Be kind.")
    for number in (1, 2, 3):
        world.turn(session_id, f"question {number}", f"answer {number}")
    world.infer(session_id, "question 4")
    world.engine.start()
    world.engine.generate("ab")
    return session_id


def test_shifted_turn_is_resubmitted_with_its_shorter_prompt(world: SessionHarness) -> None:
    """Held-back text is held back again; both prompts are counted once each."""
    session_id = fill(world)
    longer = len(world.engine.last.tokens) // 4 + len(world.engine.last_text)
    world.engine.overflow(N_CTX, said="ab", text="c")
    shorter = world.engine.last
    assert (shorter.answer, shorter.shown_chars) == (packed("ab"), 2)
    length = len(world.engine.last_text)
    for _ in range(2):
        world.engine.lose()
        world.engine.ready()
        assert world.engine.last == shorter
        world.engine.start()
    world.engine.generate("cd")
    world.engine.finish(kept="abcd")
    assert world.sink.last.usage.prompt_tokens == longer + length
    assert world.transcript(session_id)[-1] == ("assistant", "abcd")


@pytest.mark.parametrize("said_again", [True, False])
def test_held_back_text_is_published_by_an_abort_in_the_queue(world: SessionHarness, said_again: bool) -> None:
    """The session publishes it if no engine repeats it."""
    session_id = fill(world)
    world.engine.overflow(N_CTX, said="ab", text="c")
    world.abort(session_id)
    if said_again:
        world.engine.say(TokenDelta(world.engine.last.turn_id, b"", "c"))
    world.engine.finish("aborted", kept="abc" if said_again else "", end_text="")
    assert world.sink.text.endswith("abc")
    assert world.sink.last.finish_reason == "aborted"
    assert world.transcript(session_id)[-1] == ("assistant", "abc")


def test_held_back_text_is_published_when_the_turn_is_withdrawn(world: SessionHarness) -> None:
    """No engine has the turn, but the session has the text."""
    session_id = fill(world)
    world.engine.overflow(N_CTX, said="ab", text="c")
    world.engine.lose()
    world.abort(session_id)
    world.engine.say(Cancelled(world.engine.last.turn_id))
    assert world.transcript(session_id)[-1] == ("assistant", "abc")


@given(lag=st.integers(0, 3), losses=st.lists(st.integers(0, 40), max_size=4), prompt=st.text("ab", min_size=1))
def test_interruptions_do_not_change_the_text(lag: int, losses: list[int], prompt: str) -> None:
    """Wherever engines are lost, each turn and the next have the same text."""
    oracle, sink = Oracle(lag=lag), FakeSink()
    sessions = SessionManager(
        engines=one_model(oracle),
        renderers=InlineTemplates(),
        config_params=Params(),
        settings=SessionSettings(max_sessions=9),
    )
    created = sessions.create(ADA, requests.CreateSession(op="create_session"), sink)
    for question in (prompt, prompt + "?"):
        request = requests.Infer(op="infer", session_id=created.session_id, prompt=question)
        sessions.infer(ADA, request, sink)
        for steps in losses:
            for _ in range(steps):
                oracle.step()
            oracle.lose()
            oracle.ready()
        oracle.run()
        assert sink.last.op == "end"
        answer = script(oracle.prompts[sink.last.turn_id])
        told = [event for event in sink.events if isinstance(event, events.Token)]
        assert "".join(event.content for event in told if event.turn_id == sink.last.turn_id) == answer
        assert sink.last.usage.completion_tokens == len(answer) + 1
    assert sink.ops.count("queued") == 2

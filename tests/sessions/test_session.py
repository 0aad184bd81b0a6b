"""One session: turns, history and events."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.messages import (
    InfillTokens,
    PrefillProgress,
    QueuePosition,
    SampledLogprobs,
    TokenDelta,
    TokenLogprob,
)
from inferencecenter.ipc.port import EngineState, EngineStatus
from inferencecenter.protocol import events, requests
from inferencecenter.protocol.base import SessionEvent, TurnEvent
from inferencecenter.protocol.params import decode
from inferencecenter.protocol.values import ChatMessage
from inferencecenter.sessions import turn
from inferencecenter.sessions.context import UnlimitedQuota
from inferencecenter.sessions.prompt.renderer import InlineRenderer
from inferencecenter.sessions.turn_runner import TurnRunner
from tests.sessions.conftest import SessionHarness, make_model

if TYPE_CHECKING:
    from collections.abc import Callable


def refused(code: ErrorCode, call: Callable[..., object], *args: Any, **kwargs: Any) -> InferenceCenterError:
    """The error of a call that must fail with ``code``."""
    with pytest.raises(InferenceCenterError) as caught:
        call(*args, **kwargs)
    assert caught.value.code is code
    return caught.value


def test_turn_is_acknowledged_streamed_and_ended(world: SessionHarness) -> None:
    """Events arrive in order, numbered from 1, each with the turn's id."""
    session_id = world.create()
    world.infer(session_id, id="i1")
    world.engine.start()
    world.engine.say(PrefillProgress(world.engine.last.turn_id, 3, 9))
    world.engine.generate("Hel")
    world.engine.generate("")
    world.engine.generate("lo")
    world.engine.finish(kept="Hello")
    assert world.sink.ops == ["queued", "progress", "token", "token", "end"]
    assert [event.seq for event in world.sink.events if isinstance(event, TurnEvent)] == [1, 2, 3, 4, 5]
    assert {event.turn_id for event in world.sink.events if isinstance(event, TurnEvent)} == {world.engine.last.turn_id}
    assert world.sink.events[0].id == "i1"
    assert world.sink.text == "Hello"
    assert world.sink.last.finish_reason == "stop"
    assert world.sink.last.id is None
    assert world.sink.last.stats.ttft_ms == 2.0
    assert world.sink.last.usage.prompt_tokens == 7
    assert world.transcript(session_id) == [("user", "Hi"), ("assistant", "Hello")]


def test_model_quota_and_parameters_are_resolved_once_per_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Model, quota and parameters are resolved when it begins, and its prompt is rendered once."""
    calls: Counter[str] = Counter()

    def count(owner: object, name: str) -> None:
        original = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    def quota_of(_client_id: str, _token_id: str) -> UnlimitedQuota:
        calls["quota_of"] += 1
        return UnlimitedQuota()

    world = SessionHarness(quota_of=quota_of)
    session_id = world.create()
    for owner, name in (
        (world.engines, "engine"),
        (turn, "parse_params"),
        (turn, "merge"),
        (InlineRenderer, "render"),
        (TurnRunner, "submission"),
    ):
        count(owner, name)
    calls.clear()
    world.turn(session_id, "Hi", "Hello")
    assert calls == {"engine": 1, "quota_of": 1, "parse_params": 1, "merge": 1, "render": 1, "submission": 1}


def test_next_turn_submits_the_tokens_of_the_last(world: SessionHarness) -> None:
    """Prompt and answer are submitted as tokens; only new text is text."""
    session_id = world.create(system="Be kind.")
    world.turn(session_id, "Hi", "Hello")
    world.infer(session_id, "Bye")
    assert len(world.engine.last.tokens) > len("Hello") * 4
    assert world.engine.last_text == "\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"


def test_queue_positions_are_published_when_they_change(world: SessionHarness) -> None:
    """An unchanged position is not repeated, and none follows the start."""
    world.engine.position = 3
    session_id = world.create()
    world.infer(session_id)
    for position in (3, 2, 2, 0):
        world.engine.say(QueuePosition(world.engine.last.turn_id, position))
    world.engine.start()
    assert [event.position for event in world.sink.events if isinstance(event, events.Queued)] == [3, 2, 0]


def test_logprobs_are_published_without_text(world: SessionHarness) -> None:
    """Each token's logprobs are reported, even if its text is held back."""
    session_id = world.create()
    world.infer(session_id, n_probs=1)
    world.engine.start()
    entry = SampledLogprobs(TokenLogprob("H", 72, -0.5), (TokenLogprob("H", 72, -0.5),))
    world.engine.say(TokenDelta(world.engine.last.turn_id, b"\0\0\0\0", "", (entry,)))
    assert world.sink.last.content == ""
    assert world.sink.last.logprobs[0].top[0].logprob == -0.5
    assert decode(world.engine.last.params_json).n_probs == 1


def test_busy_session_refuses_another_turn(world: SessionHarness) -> None:
    """The running turn is not affected."""
    session_id = world.create()
    world.infer(session_id)
    error = refused(ErrorCode.SESSION_BUSY, world.infer, session_id)
    assert error.spec.retryable
    append = requests.Append(op="append", session_id=session_id, messages=[ChatMessage(role="assistant", content="x")])
    refused(ErrorCode.SESSION_BUSY, world.sessions.append, world.client, append, world.sink)
    world.engine.answer("Hello")
    assert world.sink.ops == ["queued", "token", "end"]


def test_abort_keeps_the_partial_answer(world: SessionHarness) -> None:
    """Its ``end`` answers the abort, and the next turn continues after it."""
    session_id = world.create()
    world.infer(session_id)
    world.engine.start()
    world.engine.generate("Hel")
    world.abort(session_id, id="a1")
    assert world.engine.aborted == [world.engine.last.turn_id]
    world.engine.finish("aborted", kept="Hel", end_text="")
    assert (world.sink.last.id, world.sink.last.finish_reason) == ("a1", "aborted")
    assert world.transcript(session_id) == [("user", "Hi"), ("assistant", "Hel")]
    world.infer(session_id, "Go on")
    assert world.engine.last_text.startswith("<|im_end|>\n<|im_start|>user\nGo on")


def test_abort_with_discard_removes_the_turn(world: SessionHarness) -> None:
    """Question, partial answer and their tokens are removed."""
    session_id = world.create()
    world.turn(session_id, "Hi", "Hello")
    before = world.get(session_id).n_tokens
    world.infer(session_id, "Bad idea")
    world.engine.start()
    world.engine.generate("No")
    world.abort(session_id, discard=True)
    world.engine.finish("aborted", kept="No", end_text="")
    assert world.transcript(session_id) == [("user", "Hi"), ("assistant", "Hello")]
    assert world.get(session_id).n_tokens == before


def test_invalid_abort_is_refused(world: SessionHarness) -> None:
    """No turn, another turn and a second abort each have their error."""
    session_id = world.create()
    refused(ErrorCode.NOTHING_TO_ABORT, world.abort, session_id)
    world.infer(session_id)
    refused(ErrorCode.TURN_NOT_FOUND, world.abort, session_id, turn_id="t_other")
    world.abort(session_id, turn_id=world.engine.last.turn_id)
    refused(ErrorCode.NOTHING_TO_ABORT, world.abort, session_id)
    assert len(world.engine.aborted) == 1


def test_failed_turn_leaves_the_history_unchanged(world: SessionHarness) -> None:
    """The error names the frame, and the next turn runs."""
    session_id = world.create()
    world.turn(session_id, "Hi", "Hello")
    before = world.get(session_id)
    world.infer(session_id, "Boom", id="i2")
    world.engine.start()
    world.engine.generate("Par")
    world.engine.fail()
    error = world.sink.last
    assert (error.op, error.code, error.id, error.retryable) == ("error", "engine_crashed", "i2", False)
    assert (error.turn_id, error.session_id) == (world.engine.last.turn_id, session_id)
    after = world.get(session_id)
    assert (after.transcript, after.n_tokens) == (before.transcript, before.n_tokens)
    world.turn(session_id, "Again", "Yes")
    assert world.sink.last.op == "end"


def test_refused_turn_leaves_the_session_idle(world: SessionHarness) -> None:
    """A turn refused by the engine does not exist."""
    session_id = world.create()
    world.engine.refusal = InferenceCenterError(ErrorCode.QUEUE_FULL)
    refused(ErrorCode.QUEUE_FULL, world.infer, session_id)
    assert (world.get(session_id).state, world.sink.events) == ("idle", [])


def test_turn_key_runs_once(world: SessionHarness) -> None:
    """A running turn is acknowledged again; the end of an ended turn is repeated with its number."""
    session_id = world.create()
    world.infer(session_id, turn_key="k", id="i1")
    world.infer(session_id, turn_key="k", id="i2")
    assert [(event.op, event.id) for event in world.sink.events] == [("queued", "i1"), ("queued", "i2")]
    refused(ErrorCode.SESSION_BUSY, world.infer, session_id, turn_key="other")
    world.engine.answer("Hello")
    end = world.sink.last
    world.infer(session_id, turn_key="k", id="i3")
    assert world.sink.last == end.model_copy(update={"id": "i3"})
    assert len(world.engine.submitted) == 1


def test_key_of_a_failed_turn_runs_again(world: SessionHarness) -> None:
    """A retry after a failure is a new turn."""
    session_id = world.create()
    world.infer(session_id, turn_key="k")
    world.engine.fail()
    world.infer(session_id, turn_key="k")
    assert len(world.engine.submitted) == 2


def test_each_turn_has_its_own_seed(world: SessionHarness) -> None:
    """Without a seed two turns differ; a given seed is used."""
    session_id = world.create()
    seeds = []
    for params in ({}, {}, {"seed": 7}):
        world.infer(session_id, params=params)
        seeds.append(decode(world.engine.last.params_json).seed)
        world.engine.answer("x")
    assert None not in seeds
    assert seeds[0] != seeds[1]
    assert seeds[2] == 7


def test_parameters_without_effect_are_warned_of(world: SessionHarness) -> None:
    """The turn runs, and its end contains the warnings."""
    session_id = world.create()
    world.infer(session_id, params={"mirostat": 2, "top_k": 5})
    world.engine.start()
    world.engine.finish(warnings=("from the engine",))
    assert any("top_k" in warning for warning in world.sink.last.warnings)
    assert world.sink.last.warnings[-1] == "from the engine"


def test_history_size_is_limited(world: SessionHarness) -> None:
    """Text that exceeds the limit is refused before any change."""
    session_id = world.create()
    refused(ErrorCode.CONTEXT_FULL, world.infer, session_id, "x" * 10_001)
    refused(ErrorCode.CONTEXT_FULL, world.create, system="x" * 10_001)
    world.turn(session_id, "Hi", "Hello")


def test_appended_messages_are_in_the_next_prompt(world: SessionHarness) -> None:
    """Appending generates nothing."""
    session_id = world.create()
    world.append(session_id, ("user", "1+1?"), ("assistant", "2"))
    assert (world.sink.last.op, world.sink.last.messages, world.sink.last.seq) == ("appended", 2, 1)
    assert world.engine.submitted == []
    world.infer(session_id, messages=[ChatMessage(role="user", content="2+2?")])
    assert "1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>" in world.engine.last_text


def test_closing_ends_the_turn_first(world: SessionHarness) -> None:
    """The turn has one end, the engine releases the session, and late events are ignored."""
    session_id = world.create()
    world.infer(session_id)
    world.engine.start()
    world.engine.generate("Hel")
    world.now += 2
    request = requests.CloseSession(op="close_session", session_id=session_id)
    closed = world.sessions.close(world.client, request, world.sink)
    assert closed.session_id == session_id
    assert (world.sink.last.op, world.sink.last.finish_reason) == ("end", "aborted")
    assert (world.sink.last.stats.tokens, world.sink.last.stats.total_ms) == (3, 2000.0)
    world.engine.finish("aborted", kept="Hel")
    assert world.sink.ops.count("end") == 1
    assert (world.engine.aborted, world.engine.released) == ([world.engine.last.turn_id], [session_id])


def test_each_turn_logs_one_line_without_its_text(world: SessionHarness) -> None:
    """The line contains the figures and no text."""
    with capture_logs() as logs:
        session_id = world.create(system="secret-system")
        world.turn(session_id, "secret-question", "secret-answer")
    (line,) = [entry for entry in logs if entry["event"] == "turn"]
    assert line["finish"] == "stop"
    assert {"client", "session", "turn", "queue_ms", "ttft_ms", "tokens", "tps", "cached"} <= line.keys()
    assert "secret" not in str(logs)
    assert [record.finish for record in world.records] == ["stop"]


STEPS = st.lists(
    st.sampled_from(
        ["start", "delta", "progress", "position", "finish", "aborted", "fail", "abort", "discard", "infer", "close"]
    ),
    max_size=30,
)


@given(steps=STEPS)
def test_every_turn_has_exactly_one_terminal_event(steps: list[str]) -> None:
    """In any order of engine events each turn ends once, and numbers rise by one."""
    world = SessionHarness()
    session_id = world.create()
    world.infer(session_id)
    actions: dict[str, Callable[[], object]] = {
        "start": world.engine.start,
        "delta": lambda: world.engine.generate("x"),
        "progress": lambda: world.engine.say(PrefillProgress(world.engine.last.turn_id, 1, 2)),
        "position": lambda: world.engine.say(QueuePosition(world.engine.last.turn_id, 1)),
        "finish": world.engine.finish,
        "aborted": lambda: world.engine.finish("aborted", end_text=""),
        "fail": world.engine.fail,
        "abort": lambda: world.abort(session_id),
        "discard": lambda: world.abort(session_id, discard=True),
        "infer": lambda: world.infer(session_id),
        "close": lambda: world.sessions.close(
            world.client, requests.CloseSession(op="close_session", session_id=session_id)
        ),
    }
    for step in [*steps, "close"]:
        try:
            actions[step]()
        except InferenceCenterError as error:
            assert error.code in {  # noqa: PT017
                ErrorCode.SESSION_BUSY,
                ErrorCode.NOTHING_TO_ABORT,
                ErrorCode.SESSION_NOT_FOUND,
            }
    ended = [event.turn_id for event in world.sink.events if isinstance(event, events.End | events.Error)]
    assert sorted(map(str, ended)) == sorted(turn.turn_id for turn in world.engine.submitted)
    numbers = [event.seq for event in world.sink.events if isinstance(event, SessionEvent | events.Error)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(world.records) == len(world.engine.submitted)
    assert world.sessions.totals().active_generations == 0


def test_recommended_parameters_are_not_warned_of(world: SessionHarness) -> None:
    """Only parameters set by the client cause warnings."""
    model = make_model(sampling_defaults_json=b'{"top_k": 20}')
    world.engine.status = EngineStatus(state=EngineState.READY, model=model)
    for params, named in (({"temperature": 0}, False), ({"temperature": 0, "top_k": 5}, True)):
        world.infer(world.create(), params=params)
        world.engine.answer("x")
        assert any("top_k" in warning for warning in world.sink.last.warnings) is named


def test_queued_turn_has_an_expected_wait(world: SessionHarness) -> None:
    """The estimate exists once a turn has ended; a running turn has none.

    A turn that waits for an engine has none either, because the start time is unknown.
    """
    session_id = world.create()
    world.infer(session_id)
    world.engine.start()
    world.engine.generate("x")
    world.engine.finish(kept="x", queue_ms=0.0, total_ms=300.0)
    world.engine.position = 2
    world.infer(session_id)
    queued = [event for event in world.sink.events if isinstance(event, events.Queued)]
    assert [(event.position, event.eta_ms) for event in queued] == [(0, None), (2, 300)]
    world.engine.position = 0
    world.infer(world.create())
    assert isinstance(runs := world.sink.last, events.Queued)
    assert (runs.position, runs.eta_ms) == (0, None)
    world.engine.position = 2
    world.engine.status = EngineStatus(state=EngineState.ASLEEP, model=world.engine.status.model)
    world.infer(world.create())
    assert isinstance(waits := world.sink.last, events.Queued)
    assert (waits.position, waits.eta_ms) == (2, None)


def test_submission_states_what_may_be_shared_and_stored(world: SessionHarness) -> None:
    """A listed system prompt is public; ``store: false`` keeps the session off the disk."""
    world.reopen(shared_prompts=("Be kind.",))
    for fields, told in (
        ({"system": "Be kind."}, (1, True, True)),
        ({"system": "Be rude.", "store": False}, (1, False, False)),
        ({"mode": "raw", "system": "Be kind."}, (0, False, True)),
    ):
        world.infer(world.create(**fields))
        turn = world.engine.last
        assert (turn.shared_pieces, turn.public, turn.durable) == told
        world.engine.answer("x")
    session_id = world.create()
    world.infer(session_id, "Be kind.")
    assert not world.engine.last.public


def test_queue_timeout_is_retryable(world: SessionHarness) -> None:
    """The error contains a retry delay."""
    session_id = world.create()
    world.infer(session_id, id="i")
    world.engine.fail("queue_timeout")
    error = world.sink.last
    assert (error.code, error.id, error.retryable, error.retry_after_ms) == ("queue_timeout", "i", True, 1000)
    world.turn(session_id, "Hi", "Hello")


def test_preemptions_are_counted(world: SessionHarness) -> None:
    """The end contains the number of preemptions."""
    world.infer(world.create())
    world.engine.start()
    world.engine.finish(preempted=3)
    assert world.sink.last.stats.preempted == 3


def test_text_after_a_gap_is_not_part_of_the_session(world: SessionHarness) -> None:
    """The next turn continues the text before the gap and what filled it; a model without the tokens refuses."""
    with pytest.raises(InferenceCenterError, match="cannot fill") as refusal:
        world.infer(world.create(mode="raw"), "ab", infill={"suffix": "ef"})
    assert refusal.value.field == "infill"
    model = make_model(infill=InfillTokens("<P>", "<S>", "<M>"))
    world.engine.status = EngineStatus(state=EngineState.READY, model=model)
    session_id = world.create(mode="raw")
    world.turn(session_id, "ab", "cd", infill={"suffix": "ef"})
    assert world.engine.last_text == "<P>ab<S>ef<M>"
    world.infer(session_id, "gh")
    assert (world.engine.last.tokens, world.engine.last_text) == (b"", "abcdgh")

"""A change of the default model: begun turns end on their model, everything else moves to the new one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from inferencecenter.config.limits import AccessLimits
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.messages import unpack_tokens
from inferencecenter.ipc.port import EngineState, EngineStatus
from inferencecenter.protocol import events, requests
from inferencecenter.protocol.params import Params, decode
from inferencecenter.protocol.requests import START
from inferencecenter.sessions.journal import ConfigChanged, TurnFailed, TurnQueued
from tests.sessions.conftest import BRACKETS, FakeEngine, FakeSink, SessionHarness, make_model, packed


@pytest.fixture
def toy(world: SessionHarness) -> FakeEngine:
    """The engine of the first default."""
    return world.engine


@pytest.fixture
def large(world: SessionHarness) -> FakeEngine:
    """A second model with another template and a larger context."""
    return world.add_model("large", chat_template=BRACKETS, n_ctx=4096, n_vocab=512)


def swap(world: SessionHarness, name: str = "large") -> None:
    """Change the default and recall the turns without tokens."""
    before, world.engines.default = world.engine, name
    before.recall()


def spelled(tokens: bytes) -> str:
    """The text of packed tokens, one per character."""
    return "".join(map(chr, unpack_tokens(tokens)))


def orders(world: SessionHarness) -> list[tuple[str, int]]:
    """The models and numbers of all recorded turn specs."""
    assert world.journal is not None
    return [(record.spec.model, record.seq) for record in world.journal.of(TurnQueued)]


# Between turns.


def test_session_continues_from_its_messages(world: SessionHarness, toy: FakeEngine, large: FakeEngine) -> None:
    """The new model renders all of them and continues from its tokens; the same on the way back."""
    session_id = world.create(system="Be kind.")
    world.turn(session_id, "I am Ada.", "Hello Ada.")
    swap(world)
    world.infer(session_id, "Who am I?")
    assert (large.last.tokens, large.last_text) == (
        b"",
        "[system]Be kind.[user]I am Ada.[assistant]Hello Ada.[user]Who am I?[assistant]",
    )
    large.start()
    large.generate("Ada.")
    large.finish("length", kept="Ada.", end_text="")
    world.infer(session_id, "Sure?")
    assert spelled(large.last.tokens).endswith("[user]Who am I?[assistant]Ada.")
    assert large.last_text == "[user]Sure?[assistant]"
    large.answer("Yes.")
    swap(world, "toy")
    world.infer(session_id, "Bye")
    assert toy.last.tokens == b""
    assert toy.last_text.count("<|im_start|>") == 9
    for said in ("I am Ada.", "Hello Ada.", "Who am I?", "Ada.", "Sure?", "Yes.", "Bye"):
        assert said in toy.last_text


def test_dropped_messages_stay_dropped(world: SessionHarness, large: FakeEngine) -> None:
    """A larger context does not restore them; the transcript has everything."""
    world.engine.status = EngineStatus(EngineState.READY, model=make_model(n_ctx=400))
    session_id = world.create(system="Be kind.")
    for number in (1, 2, 3):
        world.turn(session_id, f"question {number}", f"answer {number}")
    world.infer(session_id, "question 4")
    world.engine.start()
    world.engine.overflow(400)
    world.engine.answer("answer 4")
    dropped = world.get(session_id).dropped_messages
    assert dropped > 0
    swap(world)
    world.infer(session_id, "question 5")
    assert "question 1" not in large.last_text
    assert (world.get(session_id).dropped_messages, len(world.transcript(session_id))) == (dropped, 9)


def test_forks_and_rewinds_across_a_swap(world: SessionHarness, large: FakeEngine) -> None:
    """A fork uses the current model and its parameters; turns of the old one can be rewound to."""
    large.status = EngineStatus(
        EngineState.READY,
        model=make_model(
            name="large", chat_template=BRACKETS, n_ctx=4096, sampling_defaults_json=b'{"temperature": 0.9}'
        ),
    )
    session_id = world.create(params={"top_k": 7})
    first = world.turn(session_id, "one", "eins")
    world.turn(session_id, "two", "zwei")
    swap(world)
    request = requests.ForkSession(op="fork_session", session_id=session_id, turn=first)
    created = world.sessions.fork(world.client, request, world.sink)
    assert (created.model, created.n_ctx) == ("large", 4096)
    assert (created.params["temperature"], created.params["top_k"]) == (0.9, 7)
    world.infer(created.session_id, "drei?")
    assert large.last_text == "[user]one[assistant]eins[user]drei?[assistant]"
    world.rewind(session_id, first)
    world.turn(session_id, "drei?", "drei")
    assert large.last_text == "[user]one[assistant]eins[user]drei?[assistant]"
    world.rewind(session_id, START)
    world.infer(session_id, "one")
    assert large.last_text == "[user]one[assistant]"
    swap(world, "toy")
    assert world.get(created.session_id).params["temperature"] == Params().temperature


def test_fork_keeps_the_chosen_model(world: SessionHarness, large: FakeEngine) -> None:
    """Without a choice it follows the default."""
    pinned, going = world.create(model="toy"), world.create()
    children = world.fork(pinned), world.fork(going)
    swap(world)
    assert [world.get(child).model for child in children] == ["toy", "large"]
    assert large.submitted == []


def set_model(world: SessionHarness, session_id: str, model: str | None) -> events.ModelSet:
    """Change a session's model and return the reply."""
    return world.sessions.set_model(world.client, requests.SetModel(op="set_model", session_id=session_id, model=model))


def test_model_of_a_session_is_changed(world: SessionHarness, toy: FakeEngine, large: FakeEngine) -> None:
    """The other model reads the history anew, with the session's own parameters; without a name it is the default."""
    told: list[tuple[str, Any]] = []
    world.sessions.subscribe(lambda client, event, _: told.append((client, event)))
    session_id = world.create(params={"top_k": 7})
    world.turn(session_id, "one", "eins")
    changed = set_model(world, session_id, "large")
    assert changed == events.ModelSet(session_id=session_id, model="large", n_ctx=4096)
    assert told == [(world.client.client_id, changed)]
    now = world.get(session_id)
    assert (now.model, now.n_ctx, now.params["top_k"]) == ("large", 4096, 7)
    assert world.journal is not None
    assert [record.config.chosen_model for record in world.journal.of(ConfigChanged)] == ["large"]
    world.infer(session_id, "two")
    assert large.last_text == "[user]one[assistant]eins[user]two[assistant]"
    large.answer("zwei")
    assert set_model(world, session_id, None).model == "toy"
    swap(world)
    assert world.get(session_id).model == "large"


@pytest.mark.parametrize(
    ("model", "code"),
    [
        ("none", ErrorCode.MODEL_NOT_FOUND),
        ("large", ErrorCode.FORBIDDEN),
        ("toy", ErrorCode.SESSION_BUSY),
    ],
)
def test_refused_model_changes_nothing(world: SessionHarness, large: FakeEngine, model: str, code: ErrorCode) -> None:
    """A model that is unknown or not allowed is refused, and so is any while a turn runs."""
    session_id = world.create()
    world.limits = AccessLimits(models=("toy", "none"))
    if code is ErrorCode.SESSION_BUSY:
        world.infer(session_id, "one")
    with pytest.raises(InferenceCenterError) as refused:
        set_model(world, session_id, model)
    assert refused.value.code is code
    assert world.journal is not None
    assert world.journal.of(ConfigChanged) == []
    assert world.get(session_id).model == "toy"


def test_resume_after_a_swap_replays_all_events(world: SessionHarness, toy: FakeEngine, large: FakeEngine) -> None:
    """Numbers continue across answers of both models."""
    session_id = world.create()
    world.infer(session_id, "one")
    toy.start()
    toy.generate("ei")
    swap(world)
    toy.generate("ns")
    toy.finish(kept="eins")
    world.turn_on(large, session_id, "two", "zwei")
    sink = FakeSink()
    world.resume(session_id, sink, epoch=world.get(session_id).epoch, last_seq=1)
    assert sink.events[0].resumed is True  # type: ignore[attr-defined]
    assert [event.op for event in sink.events[1:]] == ["token", "end", "queued", "token", "end"]
    assert sink.text == "einszwei"


# During a turn.


def test_started_turn_ends_on_its_model(world: SessionHarness, toy: FakeEngine, large: FakeEngine) -> None:
    """Its answer enters the history, and the next turn renders it for the new model."""
    session_id = world.create()
    world.infer(session_id, "Hi")
    toy.start()
    toy.generate("Hel")
    swap(world)
    assert large.submitted == []
    toy.generate("lo")
    toy.finish(kept="Hello")
    assert (world.sink.text, world.sink.last.finish_reason) == ("Hello", "stop")
    assert [record.model for record in world.records] == ["toy"]
    world.infer(session_id, "And?")
    assert large.last_text == "[user]Hi[assistant]Hello[user]And?[assistant]"


def test_abort_goes_to_the_engine_of_the_turn(world: SessionHarness, toy: FakeEngine, large: FakeEngine) -> None:
    """Aborting a turn and closing its session abort it on the engine that runs it, not on the new default."""
    aborted, closed = world.create(), world.create()
    for session_id in (aborted, closed):
        world.infer(session_id)
        toy.start()
        toy.generate("Hel")
    turns = list(toy.turns)
    swap(world)
    world.abort(aborted)
    world.close(closed)
    assert (toy.aborted, large.aborted) == (turns, [])


def test_context_shift_uses_the_context_size_of_the_turns_model(
    world: SessionHarness, toy: FakeEngine, large: FakeEngine
) -> None:
    """The turn's own context size applies."""
    toy.status = EngineStatus(EngineState.READY, model=make_model(n_ctx=400))
    session_id = world.create()
    for number in (1, 2, 3):
        world.turn(session_id, f"question {number}", f"answer {number}")
    world.infer(session_id, "question 4")
    toy.start()
    toy.generate("ab")
    swap(world)
    toy.overflow(400, said="ab")
    assert "context_shifted" in world.sink.ops
    assert (toy.last.answer, large.submitted) == (packed("ab"), [])
    toy.answer("cd")
    assert world.transcript(session_id)[-1] == ("assistant", "abcd")


def test_started_turn_resumes_on_its_model_after_engine_loss(
    world: SessionHarness, toy: FakeEngine, large: FakeEngine
) -> None:
    """The default model does not matter."""
    session_id = world.create()
    world.infer(session_id)
    toy.start()
    toy.generate("Hel")
    toy.lose()
    swap(world)
    toy.ready()
    assert (toy.last.answer, large.submitted) == (packed("Hel"), [])
    toy.start()
    toy.finish(kept="Hel")
    assert world.sink.last.finish_reason == "stop"


def test_reassigned_model_name_does_not_move_started_turns(world: SessionHarness) -> None:
    """They end on their engine; the next turn uses the new one."""
    session_id = world.create()
    world.infer(session_id, "Hi")
    old, new = world.engine, FakeEngine()
    new.status = EngineStatus(EngineState.READY, model=make_model(chat_template=BRACKETS))
    old.start()
    old.generate("Hel")
    world.engine = new
    old.recall()
    world.abort(session_id)
    assert (old.aborted, new.aborted) == ([old.last.turn_id], [])
    old.finish("aborted", kept="Hel", end_text="")
    world.infer(session_id, "And?")
    assert new.last_text == "[user]Hi[assistant]Hel[user]And?[assistant]"


def taken_back(world: SessionHarness) -> tuple[str, FakeEngine, FakeEngine]:
    """A session whose turn began on a lost engine, and the engine that replaces it."""
    session_id = world.create()
    world.turn(session_id, "Hi", "Hello")
    world.infer(session_id, "Go on")
    world.engine.start()
    world.engine.generate("ab")
    world.engine.lose()
    old, world.engine = world.engine, FakeEngine()
    return session_id, old, world.engine


def test_started_turn_resumes_on_a_replacement_engine(world: SessionHarness) -> None:
    """The model is the same; only its options differ."""
    session_id, old, new = taken_back(world)
    new.status = EngineStatus(EngineState.READY, model=make_model(slots=9))
    old.recall(begun=True)
    assert (new.last.answer, bool(new.last.tokens), old.turns) == (packed("ab"), True, {})
    assert world.sink.last.op == "queued"
    new.answer("cd")
    assert world.transcript(session_id)[-1] == ("assistant", "abcd")


def test_started_turn_ends_if_another_model_replaces_its_own(world: SessionHarness) -> None:
    """The partial answer is kept with the reason."""
    session_id, old, new = taken_back(world)
    new.status = EngineStatus(EngineState.READY, model=make_model(chat_template=BRACKETS))
    old.recall(begun=True)
    assert (world.sink.last.op, world.sink.last.finish_reason) == ("end", "aborted")
    assert world.transcript(session_id)[-1] == ("assistant", "ab")
    assert (new.turns, world.get(session_id).state) == ({}, "idle")


# Before the first token.


def test_delayed_load_republishes_the_queue_position(world: SessionHarness) -> None:
    """The position is sent again with the delay; a running turn sends none."""
    waiting(world)
    n_events = len(world.sink.events)
    (turn,) = world.engine.turns.values()
    turn.on_delay(12.5)
    (queued,) = world.sink.events[n_events:]
    assert isinstance(queued, events.Queued)
    assert (queued.turn_id, queued.eta_ms, queued.id) == (turn.turn_id, 12_500, None)
    world.engine.ready()
    world.engine.start()
    n_events = len(world.sink.events)
    turn.on_delay(12.5)
    assert world.sink.events[n_events:] == []


def waiting(world: SessionHarness, **fields: Any) -> str:
    """A session with an ended turn and a turn that waits for an engine."""
    session_id = world.create(**{"params": {"top_k": 7}, **fields})
    world.turn(session_id, "Hi", "Hello")
    world.engine.status = replace(world.engine.status, state=EngineState.BACKOFF)
    world.infer(session_id, "Go on", params={"temperature": 0.5})
    return session_id


def test_queued_turn_moves_to_the_new_model(world: SessionHarness, toy: FakeEngine, large: FakeEngine) -> None:
    """It is rendered and recorded again before its new position is published."""
    session_id = waiting(world)
    n_events = len(world.sink.events)
    large.position = 3
    swap(world)
    assert (large.last.tokens, large.last_text) == (b"", "[user]Hi[assistant]Hello[user]Go on[assistant]")
    (queued,) = world.sink.events[n_events:]
    assert isinstance(queued, events.Queued)
    assert (queued.turn_id, queued.position, queued.id) == (large.last.turn_id, 3, None)
    assert orders(world)[-1] == ("large", queued.seq)
    assert not toy.turns
    world.abort(session_id)
    assert (toy.aborted, large.aborted) == ([], [large.last.turn_id])
    large.answer("There.")
    assert [record.model for record in world.records] == ["toy", "large"]
    assert world.transcript(session_id)[-1] == ("assistant", "There.")


def test_recalled_turn_gets_the_new_models_parameters(world: SessionHarness, toy: FakeEngine) -> None:
    """Parameters of the session and the turn stay, and so does the seed."""
    recommended = b'{"temperature": 0.5, "min_p": 0.1, "top_p": 0.8}'
    toy.status = EngineStatus(EngineState.READY, model=make_model(sampling_defaults_json=recommended))
    large = world.add_model("large", sampling_defaults_json=b'{"temperature": 0.9, "typical_p": 0.6}')
    waiting(world)
    toy.ready()
    seed = decode(toy.last.params_json).seed
    swap(world)
    params = decode(large.last.params_json).model_dump(exclude_unset=True)
    assert params == {"temperature": 0.5, "typical_p": 0.6, "top_k": 7, "seed": seed}


def test_turn_in_prefill_is_recalled(world: SessionHarness, toy: FakeEngine, large: FakeEngine) -> None:
    """Times count from the request, and its prompt counts once."""
    session_id = world.create()
    world.infer(session_id, "Hi")
    world.now += 2
    toy.start()
    world.now += 1
    swap(world)
    world.now += 3
    large.start()
    large.generate("Hello")
    large.finish(kept="Hello")
    end = world.sink.last
    assert (end.stats.queue_ms, end.stats.total_ms) == (5000.0, 6000.0)
    assert world.transcript(session_id) == [("user", "Hi"), ("assistant", "Hello")]


def test_turn_with_a_chosen_model_is_not_moved(world: SessionHarness, toy: FakeEngine, large: FakeEngine) -> None:
    """There it waits again."""
    waiting(world, model="toy")
    swap(world)
    assert (len(toy.turns), large.turns) == (1, {})
    toy.ready()
    assert "Go on" in toy.last_text


def test_refused_recalled_turn_fails(world: SessionHarness, large: FakeEngine) -> None:
    """The error has the reason, and the session is unchanged."""
    session_id = waiting(world)
    large.refusal = InferenceCenterError(ErrorCode.QUEUE_FULL, "too many")
    swap(world)
    assert (world.sink.last.op, world.sink.last.code) == ("error", "queue_full")
    assert world.get(session_id).state == "idle"
    assert world.transcript(session_id)[-1] == ("assistant", "Hello")
    assert world.journal is not None
    assert len(world.journal.of(TurnFailed)) == 1


def test_turn_is_not_recalled_to_a_forbidden_model(world: SessionHarness, large: FakeEngine) -> None:
    """The turn fails and the model is not loaded."""
    world.limits = AccessLimits(models=("toy",))
    session_id = waiting(world)
    large.status = EngineStatus(EngineState.ASLEEP)
    swap(world)
    assert (world.sink.last.op, world.sink.last.code) == ("error", "forbidden")
    assert (large.turns, world.engines.wanted) == ({}, [])
    assert world.get(session_id).state == "idle"


def test_turn_is_recalled_to_a_loading_model(world: SessionHarness, large: FakeEngine) -> None:
    """It waits there and is rendered when the model is loaded."""
    waiting(world)
    large.status = EngineStatus(EngineState.STARTING)
    swap(world)
    assert world.sink.last.op == "queued"
    assert large.submitted == []
    large.ready(make_model(name="large", chat_template=BRACKETS))
    assert large.last_text.endswith("[user]Go on[assistant]")
    assert [model for model, _ in orders(world)][-2:] == ["toy", "large"]


def test_ended_turn_is_not_recalled(world: SessionHarness, toy: FakeEngine, large: FakeEngine) -> None:
    """A late recall changes nothing."""
    session_id = world.create()
    world.infer(session_id)
    turn = toy.turns[toy.last.turn_id]
    toy.answer("Hello")
    world.engines.default = "large"
    turn.resubmit()
    assert (world.sink.last.op, large.submitted) == ("end", [])


def test_engine_receives_prompts_of_its_own_model(world: SessionHarness, toy: FakeEngine, large: FakeEngine) -> None:
    """Until its recall a turn is rendered for the model that has it."""
    waiting(world)
    world.engines.default = "large"
    toy.ready()
    assert "<|im_start|>user\nGo on" in toy.last_text
    assert large.submitted == []

"""Pending turns restored by a daemon with other models or another default."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from inferencecenter.ipc.port import EngineState, EngineStatus
from inferencecenter.sessions.journal import TurnEnded, TurnFailed, TurnQueued
from tests.sessions.conftest import (
    BRACKETS,
    LARGE,
    TOY,
    FakeEngine,
    FakeEngines,
    FakeJournal,
    FakeSink,
    SessionHarness,
    make_model,
    packed,
)
from tests.sessions.oracle import kept

if TYPE_CHECKING:
    from inferencecenter.ipc.messages import ModelInfo


def orders(world: SessionHarness) -> list[str]:
    """The models of all recorded turn specs."""
    assert world.journal is not None
    return [record.spec.model for record in world.journal.of(TurnQueued)]


def restart(world: SessionHarness, *models: ModelInfo, default: str) -> None:
    """Restart the daemon with these models, none loaded, and its records."""
    assert world.journal is not None
    records = tuple(world.journal.records)
    world.journal, world.sink = FakeJournal(records=list(records)), FakeSink()
    engines = {model.name: FakeEngine(status=EngineStatus(EngineState.ASLEEP)) for model in models}
    world.engines = FakeEngines(engines=dict(engines), default=default)
    world.reopen().restore(kept(records), clean=True)
    for model in models:
        engines[model.name].ready(model)


def pending_turn(world: SessionHarness, *, said: str, model: str | None = None) -> str:
    """A session whose pending turn on ``toy`` has generated ``said``."""
    session_id = world.create(model=model)
    world.turn(session_id, "Hi", "Hello")
    world.infer(session_id, "Go on")
    if said:
        world.engine.start()
        world.engine.generate(said)
    return session_id


def test_partial_answer_resumes_on_its_model(world: SessionHarness) -> None:
    """A changed default does not matter."""
    session_id = pending_turn(world, said="ab")
    tokens = world.engine.last.tokens
    restart(world, TOY, LARGE, default="large")
    toy, large = world.engine_of("toy"), world.engine_of("large")
    assert (toy.last.answer, toy.last.tokens, large.submitted) == (packed("ab"), tokens, [])
    toy.answer("cd")
    assert world.transcript(session_id)[-1] == ("assistant", "abcd")
    assert world.get(session_id).model == "large"


@pytest.mark.parametrize(
    "models",
    [(LARGE,), (LARGE, make_model(chat_template=BRACKETS))],
    ids=["gone", "another file"],
)
def test_partial_answer_without_its_model_is_kept(world: SessionHarness, models: tuple[ModelInfo, ...]) -> None:
    """The turn ends as aborted with a reason, and the session uses the default."""
    session_id = pending_turn(world, said="ab")
    restart(world, *models, default="large")
    assert world.journal is not None
    end = world.journal.of(TurnEnded)[-1].end
    assert (end.finish_reason, world.transcript(session_id)[-1]) == ("aborted", ("assistant", "ab"))
    assert "could not be continued" in end.warnings[-1]
    world.infer(session_id, "Next")
    assert world.engine.last_text.endswith("[assistant]ab[user]Next[assistant]")


def test_turn_without_tokens_uses_the_current_model(world: SessionHarness) -> None:
    """It runs on the session's own model or else on the current default, which is recorded."""
    going, staying = pending_turn(world, said=""), pending_turn(world, said="", model="toy")
    restart(world, TOY, LARGE, default="large")
    toy, large = world.engine_of("toy"), world.engine_of("large")
    assert [turn.session_id for turn in large.submitted] == [going]
    assert [turn.session_id for turn in toy.submitted] == [staying]
    assert large.last_text == "[user]Hi[assistant]Hello[user]Go on[assistant]"
    assert orders(world)[-1] == "large"


def test_turn_without_tokens_fails_if_its_model_was_removed(world: SessionHarness) -> None:
    """Its session stays readable."""
    session_id = pending_turn(world, said="", model="toy")
    restart(world, LARGE, default="large")
    assert world.get(session_id).state == "idle"
    assert world.transcript(session_id)[-1] == ("assistant", "Hello")
    assert world.journal is not None
    assert len(world.journal.of(TurnFailed)) == 1
    assert [record.finish for record in world.records][-1] == "model_not_found"


@pytest.mark.parametrize("said", ["", "ab"])
def test_record_without_a_model_uses_the_default(world: SessionHarness, said: str) -> None:
    """Old daemons had one model and did not record its name."""
    session_id = pending_turn(world, said=said)
    assert world.journal is not None
    world.journal.records = [
        replace(record, spec=replace(record.spec, model="")) if isinstance(record, TurnQueued) else record
        for record in world.journal.records
    ]
    first = world.engine.last
    restart(world, TOY, LARGE, default="toy")
    again = world.engine.last
    assert (again.tokens, again.pieces, again.params_json) == (first.tokens, first.pieces, first.params_json)
    assert orders(world)[-1] == "toy"
    world.engine.answer("cd")
    assert world.transcript(session_id)[-1] == ("assistant", said + "cd")
    assert [record.model for record in world.records][-1] == "toy"


def test_chosen_model_is_restored(world: SessionHarness) -> None:
    """With another default, only sessions without a choice change."""
    going, staying = world.create(), world.create(model="toy")
    restart(world, TOY, LARGE, default="large")
    assert [world.get(session_id).model for session_id in (going, staying)] == ["large", "toy"]

"""Admission control: new turns are refused while existing turns continue."""

from __future__ import annotations

import pytest

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.port import EngineState, EngineStatus
from tests.sessions.conftest import SessionHarness, make_model
from tests.sessions.oracle import kept

N_CTX = 400


@pytest.fixture
def full(world: SessionHarness) -> SessionHarness:
    """Sessions on a small context with a running turn; no other turn is admitted."""
    world.engine.status = EngineStatus(state=EngineState.READY, model=make_model(n_ctx=N_CTX))
    session_id = world.create()
    for number in (1, 2, 3):
        world.turn(session_id, f"question {number}", f"answer {number}")
    world.infer(session_id, "And now?", turn_key="k")
    world.refusal = InferenceCenterError(ErrorCode.OVERLOADED)
    return world


def test_admission_refuses_a_new_turn(full: SessionHarness) -> None:
    """The refused turn leaves no trace and may be retried."""
    session_id = full.create()
    submitted = len(full.engine.submitted)
    with pytest.raises(InferenceCenterError) as refused:
        full.infer(session_id, "Hi", turn_key="later")
    assert refused.value.code is ErrorCode.OVERLOADED
    assert len(full.engine.submitted) == submitted
    assert (full.get(session_id).state, full.transcript(session_id)) == ("idle", [])
    full.refusal = None
    full.turn(session_id, "Hi", "Hello", turn_key="later")
    assert full.transcript(session_id) == [("user", "Hi"), ("assistant", "Hello")]


def test_running_turn_ends_despite_refused_admission(full: SessionHarness) -> None:
    """A repeated request attaches to the running turn."""
    session_id = full.sink.last.session_id
    full.infer(session_id, "And now?", turn_key="k")
    assert full.sink.last.op == "queued"
    full.engine.answer("Now")
    assert full.sink.last.op == "end"
    full.infer(session_id, "And now?", turn_key="k")
    assert full.sink.last.op == "end"


@pytest.mark.parametrize("said", [None, "Now "])
def test_running_turn_is_shifted_despite_refused_admission(full: SessionHarness, said: str | None) -> None:
    """A full context is shifted, with or without a partial answer."""
    turn_id = full.engine.last.turn_id
    if said is not None:
        full.engine.start()
        full.engine.generate(said)
    full.engine.overflow(N_CTX, said=said)
    assert (full.engine.last.turn_id, full.sink.last.op) == (turn_id, "context_shifted")


def test_interrupted_turn_resumes_despite_refused_admission(full: SessionHarness) -> None:
    """The turn continues on the next engine, even without tokens."""
    turn_id, submitted = full.engine.last.turn_id, len(full.engine.submitted)
    full.engine.lose()
    full.engine.ready()
    assert (full.engine.last.turn_id, len(full.engine.submitted)) == (turn_id, submitted + 1)


def test_restored_turn_resumes_despite_refused_admission(full: SessionHarness) -> None:
    """The pending turn was acknowledged and is not refused."""
    turn_id, submitted = full.engine.last.turn_id, len(full.engine.submitted)
    assert full.journal is not None
    full.reopen().restore(kept(tuple(full.journal.records)), clean=True)
    assert (full.engine.last.turn_id, len(full.engine.submitted)) == (turn_id, submitted + 1)

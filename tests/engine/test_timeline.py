"""The stages of a traced turn."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from inferencecenter.engine.output_processor import MAX_STAGES, Timeline
from inferencecenter.ipc.messages import AbortTurn, ContextFull, Failed, Finished, Started, TraceStage
from tests.engine.harness import Engine, StandingClock, submit

if TYPE_CHECKING:
    from pathlib import Path

    from inferencecenter.ipc.messages import TurnEvent

ENDLESS = b'{"ignore_eos":true}'
LONG = b'{"max_tokens":24,"ignore_eos":true}'


def stages_of(events: list[TurnEvent]) -> list[TraceStage]:
    """Return all stages of a turn's events."""
    told: list[TraceStage] = []
    for event in events:
        if isinstance(event, ContextFull):
            told += event.end.stages if event.end else ()
        else:
            told += getattr(event, "stages", ())
    return told


def test_stages_follow_without_a_gap() -> None:
    """Each is reported once."""
    line = Timeline(1.0)
    line.enter("prefill", at_s=2.0, n_tokens=10)
    assert line.take_finished() == (TraceStage("queue", 1.0, 2.0),)
    line.enter("decode", at_s=3.0, n_tokens=100)
    line.end(at_s=5.0, n_tokens=120)
    assert line.take_finished() == (TraceStage("prefill", 2.0, 3.0, 90), TraceStage("decode", 3.0, 5.0, 20))
    assert line.take_finished() == ()


def test_slot_assignment_ends_the_queue_stage() -> None:
    """Offloading at its beginning does not; between the two the turn waits."""
    line = Timeline(0.0)
    line.enter("decode", at_s=1.0, n_tokens=5)
    line.enter("queue", at_s=2.0, n_tokens=8)
    line.record_move(TraceStage("park", 2.0, 2.5, 7))
    line.record_move(TraceStage("restore", 4.0, 4.5, 7))
    line.enter("decode", at_s=5.0, n_tokens=8)
    line.end(at_s=6.0, n_tokens=9)
    assert line.take_finished()[1:] == (
        TraceStage("decode", 1.0, 2.0, 3),
        TraceStage("park", 2.0, 2.5, 7),
        TraceStage("queue", 2.0, 4.0),
        TraceStage("restore", 4.0, 4.5, 7),
        TraceStage("decode", 5.0, 6.0, 1),
    )


def test_incomplete_prefill_counts_no_tokens() -> None:
    """Its progress is unknown, both at the turn's end and when it loses its slot."""
    ended, preempted = Timeline(0.0), Timeline(0.0)
    for line in (ended, preempted):
        line.enter("prefill", at_s=1.0, n_tokens=0)
    ended.end(at_s=2.0, n_tokens=50)
    preempted.enter("queue", at_s=2.0, n_tokens=50)
    assert ended.take_finished()[-1] == preempted.take_finished()[-1] == TraceStage("prefill", 1.0, 2.0)


@given(st.lists(st.sampled_from(["queue", "prefill", "decode"]), max_size=2 * MAX_STAGES))
def test_number_of_stages_is_bounded(names: list[str]) -> None:
    """The first stages and the last are reported, however often the turn waits."""
    line = Timeline(0.0)
    for second, name in enumerate(names, start=1):
        line.enter(name, at_s=float(second), n_tokens=second)
    line.end(at_s=1000.0, n_tokens=1000)
    stages = line.take_finished()
    assert len(stages) == min(len(names) + 1, MAX_STAGES)
    assert stages[-1].ended_s == 1000.0
    assert stages[-1].name == (names[-1] if names else "queue")
    assert all(before.ended_s <= after.began_s for before, after in pairwise(stages))


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    """An engine with one slot that turns share, and a KV store."""
    return Engine(tmp_path, slots=1, quantum_tokens=4, prefill_grid_tokens=16)


def take_turns(engine: Engine, *, traced: bool) -> dict[str, Finished]:
    """Run a short turn that preempts an endless one, and return both ends."""
    endless, short = submit("a", "one two three " * 4, params=ENDLESS), submit("b", "one two three " * 4, params=LONG)
    engine.front.send(structs.replace(endless, traced=traced))
    engine.front.read_until(lambda: "a" in engine.front.events and bool(engine.front.text("a")))
    engine.front.send(structs.replace(short, traced=traced))
    engine.front.wait_for("b")
    engine.front.send(AbortTurn("a"))
    ends = {name: engine.front.finished(name) for name in ("a", "b")}
    engine.stop()
    assert (ends["a"].reason, ends["a"].preempted > 0) == ("aborted", True)
    return ends


def test_untraced_turns_report_no_stages(engine: Engine) -> None:
    """They report none when they wait for each other."""
    take_turns(engine, traced=False)
    assert [stages_of(events) for events in engine.front.events.values()] == [[], []]


def test_preempted_turns_report_their_stages(engine: Engine) -> None:
    """Each stage is inside the turn, consecutive ones do not overlap, and the tokens add up."""
    for name, end in take_turns(engine, traced=True).items():
        stages = stages_of(engine.front.events[name])
        names = [stage.name for stage in stages]
        assert names[0] == "queue"
        assert names.count("queue") == end.preempted + 1
        assert names.count("park") == end.preempted
        assert sum(stage.tokens for stage in stages if stage.name == "decode") == end.generated_tokens
        first_prefill = next(stage for stage in stages if stage.name == "prefill")
        assert first_prefill.tokens == end.prompt_tokens - end.cached_tokens
        in_a_row = [stage for stage in stages if stage.name != "park"]
        assert all(before.ended_s <= after.began_s for before, after in pairwise(in_a_row))
        assert all(stage.began_s <= stage.ended_s for stage in stages)
        assert (stages[-1].ended_s - stages[0].began_s) * 1000 == pytest.approx(end.total_ms)


def test_waiting_stage_is_reported_with_the_slot(engine: Engine) -> None:
    """It comes with ``Started``, before anything else can be lost."""
    engine.front.send(structs.replace(submit("a", "one", params=LONG), traced=True))
    engine.front.wait_for("a")
    engine.stop()
    started = next(event for event in engine.front.events["a"] if isinstance(event, Started))
    assert [stage.name for stage in started.stages] == ["queue"]


def test_aborted_turn_reports_its_stages(engine: Engine) -> None:
    """An open stage ends with the turn."""
    engine.front.send(structs.replace(submit("a", "one", params=ENDLESS), traced=True))
    engine.front.read_until(lambda: "a" in engine.front.events and bool(engine.front.text("a")))
    engine.front.send(AbortTurn("a"))
    end = engine.front.finished("a")
    engine.stop()
    assert [stage.name for stage in stages_of(engine.front.events["a"])] == ["queue", "prefill", "decode"]
    assert end.stages[-1].tokens == end.generated_tokens


def test_timed_out_turn_reports_its_wait(tmp_path: Path) -> None:
    """Its failure has the stage."""
    clock = StandingClock()
    engine = Engine(tmp_path, slots=1, queue_timeout_s=60, quantum_tokens=1_000_000, clock=clock)
    engine.front.send(submit("a", "one", params=ENDLESS))
    engine.front.read_until(lambda: "a" in engine.front.events and bool(engine.front.text("a")))
    engine.front.send(structs.replace(submit("b", "one"), traced=True))
    engine.front.read_until(lambda: "b" in engine.front.events)
    clock.now_s = 60.0
    engine.front.wait_for("b")
    engine.front.send(AbortTurn("a"))
    engine.front.wait_for("a")
    engine.stop()
    failure = engine.front.events["b"][-1]
    assert isinstance(failure, Failed)
    assert [stage.name for stage in failure.stages] == ["queue"]
    assert failure.stages[0].ended_s - failure.stages[0].began_s == 60.0

"""The engine's heartbeat in the page that the front maps."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

import pytest

from inferencecenter.engine.backend import Chunk
from inferencecenter.engine.scheduler.plan import (
    Admission,
    CopySlot,
    DecodePass,
    DecodeRow,
    ParkSlot,
    RestoreSlot,
    StepPlan,
    SwapSlots,
    TruncateSlot,
)
from inferencecenter.ipc.engine_options import EngineOptions
from inferencecenter.ipc.messages import AbortTurn, Failed, Loading, pack_tokens
from tests.engine.harness import TIMEOUT_S, Engine, submit
from tests.engine.process import child_of, demo_options, running

if TYPE_CHECKING:
    from pathlib import Path


def test_heartbeat_lists_every_turn_of_a_plan() -> None:
    """Decoding turns come first, each once; an offloaded session names no turn."""
    row = DecodeRow("reads", Chunk(0, 0, [1], sample=False))
    plan = StepPlan(
        moves=(
            TruncateSlot(0, 1, "cut"),
            TruncateSlot(1, 0, None),
            SwapSlots(0, 1, "left", None),
            ParkSlot(0, "s", "c", 1, (1,), durable=True),
            RestoreSlot(1, "s", 1, b"", "restored"),
            CopySlot(0, 1, 1, "copied"),
        ),
        preemptions=("gone",),
        admissions=(Admission("new", (1,), 0), Admission("reads", (1,), 0)),
        passes=(DecodePass((row, row), prefill=True),),
    )
    assert plan.turn_ids == ("reads", "new", "gone", "cut", "left", "restored", "copied")
    assert not plan.empty
    assert StepPlan(reasons=("nothing",)).empty


def test_decoding_turns_are_listed_until_the_step_ends() -> None:
    """Turns are listed while the backend works on them; between steps and in an idle loop none is."""
    engine = Engine()
    engine.backend.decoding.clear()
    engine.front.send(submit("a", "x"), submit("b", "x"))
    assert engine.backend.entered.wait(TIMEOUT_S)
    during, beats = engine.heartbeat.suspects, engine.heartbeat.ticks
    engine.backend.decoding.set()
    engine.front.wait_for("a", "b")
    assert set(during) <= {"a", "b"}
    assert during
    assert engine.heartbeat.suspects == ()
    assert engine.heartbeat.ticks > beats
    engine.stop()


def test_failed_step_keeps_its_turns_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unexpected error ends the engine, and the turns of that step can be read."""
    engine = Engine()

    def decode(chunks: object) -> None:
        raise RuntimeError("planned")

    monkeypatch.setattr(engine.backend, "decode", decode)
    engine.front.send(submit("t", "x"))
    until = time.monotonic() + TIMEOUT_S
    while engine.failure is None and time.monotonic() < until:
        os.sched_yield()
    assert engine.heartbeat.suspects == ("t",)
    with pytest.raises(RuntimeError, match="planned"):
        engine.stop()


def test_hanging_worker_makes_no_progress() -> None:
    """Its turn is listed, and a wake-up without work done does not count."""
    engine = Engine(queue_timeout_s=0.05)
    engine.backend.tokenizing["slow"] = threading.Event()
    hangs = submit("hangs", "slow", session="s", answer=pack_tokens([97]), shown_chars=1)
    engine.front.send(hangs, submit("behind", "x", session="s"))
    engine.front.wait_for("behind")
    failure = engine.front.events["behind"][-1]
    assert isinstance(failure, Failed)
    # Two commands were handled, and the tokens of the second.
    assert engine.heartbeat.ticks <= 3
    assert list(engine.heartbeat.suspects) == ["hangs"]
    engine.backend.tokenizing["slow"].set()
    engine.front.wait_for("hangs")
    assert engine.heartbeat.suspects == ()
    engine.stop()


def test_listed_turns_outlive_the_process() -> None:
    """An engine killed in a step leaves the names of exactly that step's turns."""
    child = child_of(EngineOptions(backend="echo", parent_pid=os.getpid(), slots=1, echo_delay_ms=60_000))
    child.ready()
    child.front.send(submit("runs", "ab", session="s"), submit("waits", "ab", session="s"))
    until = time.monotonic() + TIMEOUT_S
    while child.heartbeat.suspects != ("runs",) and time.monotonic() < until:
        os.sched_yield()
    child.process.kill()
    child.wait()
    assert child.heartbeat.suspects == ("runs",)
    child.front.close()
    child.heartbeat.close()


def test_real_model_counts_loading_and_steps_as_progress(demo_model_path: Path) -> None:
    """An engine without turns makes no progress; without a GPU none is reported."""
    with running(demo_options(demo_model_path)) as child:
        loaded = child.heartbeat.ticks
        assert loaded > 0
        child.front.send(submit("t", "Count to ten.", params=b'{"temperature":0,"max_tokens":20}'))
        end = child.front.finished("t")
        beats = child.heartbeat.ticks
        assert beats >= loaded + end.generated_tokens
        assert child.heartbeat.suspects == ()
        child.front.send(AbortTurn("unknown"), submit("next", "Hello", params=b'{"max_tokens":1}'))
        child.front.finished("next")
        fractions = [frame for frame in child.front.frames if isinstance(frame, Loading)]
        assert not any(frame.offloads for frame in fractions)
        assert [frame.fraction for frame in fractions[:2]] == [0.0, 0.0]

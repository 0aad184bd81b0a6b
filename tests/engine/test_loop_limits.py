"""Limits in the engine's loop, on the echo backend."""

from __future__ import annotations

import threading
from math import inf
from typing import TYPE_CHECKING

import pytest

from inferencecenter.engine import loop
from inferencecenter.engine.inbox import Inbox, StepThrottle
from inferencecenter.ipc.messages import AbortTurn, EngineLimits, StepOutput, TokenDelta
from tests.engine.harness import TIMEOUT_S, Engine, submit

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from inferencecenter.engine.inbox import Command

ENDLESS = b'{"ignore_eos":true}'
UNLIMITED = EngineLimits(active_slots=2, prefill_share=1.0, lowest_class=2, pause_ms=0)
INTERACTIVE_ONLY = EngineLimits(active_slots=1, prefill_share=0.25, lowest_class=0, pause_ms=0)
PAUSED = EngineLimits(active_slots=2, prefill_share=1.0, lowest_class=2, pause_ms=60_000)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """An engine of two slots with offload."""
    engine = Engine(tmp_path, slots=2, prefill_grid_tokens=16, quantum_tokens=8)
    yield engine
    engine.stop()


def test_only_interactive_turns_run_until_limits_are_lifted(engine: Engine) -> None:
    """The others then continue exactly, and end."""
    engine.front.send(INTERACTIVE_ONLY, submit("normal", "ab"), submit("urgent", "cd", priority=0))
    assert engine.front.finished("urgent").reason == "stop"
    assert not any(isinstance(event, TokenDelta) for event in engine.front.events.get("normal", ()))
    engine.front.send(UNLIMITED)
    assert engine.front.finished("normal").reason == "stop"
    assert engine.front.text("normal") == "ab"


def test_paused_turn_repeats_no_text(engine: Engine) -> None:
    """Its text before and after the pause equals the uninterrupted answer."""
    text = "abcdefghij" * 5
    engine.backend.decoding.clear()
    engine.tell(submit("t", "x" + text))
    assert engine.backend.entered.wait(TIMEOUT_S)
    engine.tell(INTERACTIVE_ONLY)
    engine.backend.decoding.set()
    engine.front.read_until(
        lambda: any(isinstance(frame, StepOutput) and frame.waiting for frame in engine.front.frames)
    )
    engine.front.send(submit("urgent", "cd", priority=0))
    engine.front.wait_for("urgent")
    assert not engine.front.ended("t")
    engine.front.send(UNLIMITED)
    assert engine.front.finished("t").reason == "stop"
    assert engine.front.text("t") == "x" + text


def test_lifted_pause_resumes_turns(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages during the pause are handled at once: no wait for a command ends without one."""
    command, answers = StepThrottle.command, []

    def noted(pause: StepThrottle) -> Command | None:
        pauses = pause._until_s != -inf
        found = command(pause)
        if pauses:
            answers.append(found)
        return found

    monkeypatch.setattr(StepThrottle, "command", noted)
    engine.front.send(PAUSED, submit("t", "ab", params=ENDLESS))
    engine.front.read_until(lambda: bool(engine.front.events.get("t")))
    engine.front.send(AbortTurn("t"))
    assert engine.front.finished("t").reason == "aborted"
    engine.front.send(submit("next", "cd"))
    engine.front.send(UNLIMITED)
    assert engine.front.finished("next").reason == "stop"
    assert answers
    assert None not in answers, "a minute's pause was waited for"


def test_waiting_for_limits_to_be_lifted_is_not_a_hang(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The heartbeat continues at intervals, without planning a step each time."""
    monkeypatch.setattr(loop, "_BLOCKED_S", 0.02)
    engine.front.send(INTERACTIVE_ONLY, submit("normal", "ab"))
    engine.front.read_until(
        lambda: any(isinstance(frame, StepOutput) and frame.waiting for frame in engine.front.frames)
    )
    get, waits_s, beats = Inbox.get, [], threading.Semaphore(0)

    def noted(inbox: Inbox, *, timeout_s: float | None) -> Command | None:
        waits_s.append(timeout_s)
        return get(inbox, timeout_s=timeout_s)

    def beat() -> None:
        beats.release()

    monkeypatch.setattr(Inbox, "get", noted)
    monkeypatch.setattr(engine.heartbeat, "tick", beat)
    while waits_s.count(0.02) < 4:
        assert beats.acquire(timeout=TIMEOUT_S), "nothing tells it from one that hangs"
    # A turn in preparation waits too, and its worker wakes the loop.
    assert set(waits_s[waits_s.index(0.02) :]) == {0.02}, "it turns without waiting"
    engine.front.send(UNLIMITED)
    assert engine.front.finished("normal").reason == "stop"
